"""Programs to run and to copy from: `python -m recipes.NAME`, or through `ray job submit`."""
