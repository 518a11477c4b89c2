"""What the tests share. The tensor helpers are public: they live in `rayxfer.testing`."""

from rayxfer.testing.tensors import POISON, assert_same_bytes, poison, raw_bytes

__all__ = ["POISON", "assert_same_bytes", "poison", "raw_bytes"]
