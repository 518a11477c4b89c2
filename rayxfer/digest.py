"""A 64-bit digest of a tensor's bytes: what the sender read against what the worker holds. Which of the two
is used in a round, its sender says (`digest_named`): this one, or that of `gpu_digest.py`.

xxh3 (the `xxhash` package) reads about as fast as memory delivers and releases the GIL; it finds
every accidental change with probability 1 - 2**-64. It is no defence against an adversary, who could
as well send other weights.
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rayxfer.copying import THREADED_BYTES, Hasher, has_memory, is_memory, shares
from rayxfer.errors import ContractError
from rayxfer.packing import as_bytes, plain
from rayxfer.threads import cores, spread

__all__ = [
    "XXH3",
    "Digest",
    "digest",
    "digest_many",
    "digest_memories",
    "digest_memory",
    "digest_named",
    "digest_paced",
    "memory",
]

_SMALL_BYTES = 1 << 20
_THREADS = 2
_PACED_BYTES = 2 << 20


class Digest(ABC):
    """A way to digest tensors. Both ends of a round use the same."""

    name: str

    @abstractmethod
    def of(self, tensor: torch.Tensor) -> int:
        """Of the tensor's dense bytes, in row-major order, whatever its strides or device."""

    @abstractmethod
    def many(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """`of` each."""

    def later(self, tensor: torch.Tensor) -> int | torch.Tensor:
        """`of`, or what the tensor's device makes it from after all that the current stream has queued;
        until `settle`."""
        return self.of(tensor)

    def settle(self, found: Sequence[int | torch.Tensor]) -> list[int]:
        """The digests that `later` gave."""
        return [one for one in found if isinstance(one, int)]


def digest_named(name: str) -> Digest:
    """Raises ContractError: there is none of this name."""
    if name == XXH3.name:
        return XXH3
    from rayxfer.gpu_digest import WORDS

    if name == WORDS.name:
        return WORDS
    raise ContractError(f"no digest is called {name!r}: expected {XXH3.name!r} or {WORDS.name!r}")


def digest(tensor: torch.Tensor) -> int:
    """xxh3_64 of the tensor's dense bytes, in row-major order, whatever its strides or device."""
    import xxhash

    if not is_memory(tensor):
        tensor = as_bytes(plain(tensor)).cpu()
        if not has_memory(tensor):
            raise ContractError(f"a {type(tensor).__name__} has no bytes of its own to digest")
    return int(xxhash.xxh3_64_intdigest(memory(tensor)))


def memory(tensor: torch.Tensor) -> Any:
    """The dense bytes of a tensor for which `is_memory` holds, as a buffer that does not keep it alive.

    By address: four times faster for small tensors than views and numpy.
    """
    return _memory_at(tensor.data_ptr(), tensor.nbytes)


def _memory_at(address: int, num_bytes: int) -> Any:
    return (ctypes.c_char * num_bytes).from_address(address) if num_bytes else b""


def digest_memory(address: int, num_bytes: int) -> int:
    """The same of dense bytes in the host's memory, which the caller keeps alive."""
    import xxhash

    return int(xxhash.xxh3_64_intdigest(_memory_at(address, num_bytes)))


def digest_paced(
    addresses: Sequence[int], sizes: Sequence[int], pace: Callable[[int], None] | None
) -> list[int]:
    """`digest_memory` of each; before so many bytes more are read, `pace` may wait."""
    if pace is None:
        return list(map(digest_memory, addresses, sizes))
    found: list[int] = []
    for first, stop, _, num_bytes in shares(sizes, _PACED_BYTES, whole=True):
        if stop - first > 1:
            pace(num_bytes)
            run = slice(first, stop)
            found += map(digest_memory, addresses[run], sizes[run])
        else:
            found.append(_digest_alone(addresses[first], sizes[first], pace))
    return found


def _digest_alone(address: int, size: int, pace: Callable[[int], None]) -> int:
    hasher = Hasher()
    for start in range(0, size, _PACED_BYTES):
        part = min(_PACED_BYTES, size - start)
        pace(part)
        hasher.update(address + start, part)
    return hasher.value()


def digest_many(tensors: Iterable[torch.Tensor]) -> list[int]:
    """`digest` of each, large ones on up to two threads (hashing is bound by memory, not cores)."""
    todo = list(tensors)
    return _spread(digest, todo, sum(t.numel() * t.element_size() for t in todo))


class _XXH3(Digest):
    name = "xxh3"

    def of(self, tensor: torch.Tensor) -> int:
        return digest(tensor)

    def many(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        return digest_many(tensors)


XXH3 = _XXH3()


def digest_memories(memories: Sequence[Any]) -> list[int]:
    """The same of what `memory` gave for each, whose tensors the caller keeps alive."""
    import xxhash

    return _spread(xxhash.xxh3_64_intdigest, memories, sum(map(len, memories)))


def _spread(function: Callable[[Any], int], todo: Sequence[Any], num_bytes: int) -> list[int]:
    threads = min(_THREADS, cores())
    few = len(todo) < 2 or num_bytes < THREADED_BYTES * len(todo)
    if threads < 2 or num_bytes <= 8 * _SMALL_BYTES or few:
        return list(map(function, todo))
    return spread(function, todo, threads)
