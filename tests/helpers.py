"""What the tests share. The tensor helpers are public: they live in `rayxfer.testing`."""

import torch

from rayxfer.testing.tensors import POISON, assert_same_bytes, poison, raw_bytes

__all__ = ["POISON", "assert_same_bytes", "mapping_of", "poison", "raw_bytes"]


def mapping_of(tensor: torch.Tensor) -> str:
    """The mapping of this process in which a tensor lies: its permissions and the file's inode and name."""
    address = tensor.data_ptr()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            fields = line.split()
            first, last = (int(part, 16) for part in fields[0].split("-"))
            if first <= address < last:
                return " ".join([fields[1], *fields[4:]])
    return "nowhere"
