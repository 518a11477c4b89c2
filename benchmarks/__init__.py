"""Side by side with what a user would pick instead. Run as `python -m benchmarks.NAME`."""
