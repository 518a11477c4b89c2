"""Copies between host memories, with the digest taken on the way.

A digest in a pass of its own reads all of memory again. Taken piece by piece, while a piece is in the
processor's cache, it costs little (measured: 11.2 GB/s for a copy, 9.5 for a copy with its digest, at
pieces of 512 KiB). Copies are `memmove` on one thread: torch's own parallel copy puts as
many threads to work in every process of the host as it has cores, and they wait for each other spinning.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

__all__ = ["Hasher", "copy_bytes", "is_memory"]

PIECE_BYTES = 512 << 10
_Piece = ctypes.c_char * PIECE_BYTES


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is exactly its dense bytes, on the host."""
    return (
        tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


class Hasher:
    """A running xxh3_64 over bytes in host memory. `num_bytes`: how many it has seen."""

    def __init__(self) -> None:
        import xxhash

        self._state: Any = xxhash.xxh3_64()
        self.num_bytes = 0

    def update(self, address: int, num_bytes: int) -> None:
        self._state.update((ctypes.c_char * num_bytes).from_address(address))
        self.num_bytes += num_bytes

    def value(self) -> int:
        return int(self._state.intdigest())


def copy_bytes(target: int, source: int, num_bytes: int, hasher: Hasher | None = None) -> None:
    """Copy between two addresses that do not overlap; `hasher` is fed the source's bytes.

    Both memories have to be kept alive by the caller. Releases the GIL while it works.
    """
    move = ctypes.memmove
    if hasher is None:
        move(target, source, num_bytes)
        return
    update, at = hasher._state.update, _Piece.from_address
    whole = num_bytes - num_bytes % PIECE_BYTES
    for start in range(0, whole, PIECE_BYTES):
        update(at(source + start))
        move(target + start, source + start, PIECE_BYTES)
    hasher.num_bytes += whole
    if rest := num_bytes - whole:
        hasher.update(source + whole, rest)
        move(target + whole, source + whole, rest)
