"""Copies between host memories, with the digest taken on the way.

A digest in a pass of its own reads all of memory again. Taken piece by piece, while a piece is in the
processor's cache, it costs little (measured: 11.2 GB/s for a copy, 9.5 for a copy with its digest, at
pieces of 512 KiB). Copies take the thread that asks for them, unless it asks for more (`copy_spread`):
torch's own parallel copy puts as many threads to work in every process of the host as it has cores, and
they wait for each other spinning.

*Streamed* copies (`copies.c`) write past the processor's caches, which spares memory the reading of what is
to be overwritten. Measured for 1 GiB in pieces of 4 MiB: memmove 95 to 120 ms, streamed 61 to 72; with two
threads 72 to 88 and 50 to 57; from memory that is in cache 51 to 71 and 41 to 60. They are for what is too
large to be kept in a cache (`streams`). What somebody reads at once, a ring's slots, may be better off
there: see `engines/stores.py`.
"""

from __future__ import annotations

import ctypes
import importlib.util
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch

from rayxfer.threads import cores, spread

__all__ = [
    "Hasher",
    "can_stream",
    "copy_all",
    "copy_bits",
    "copy_bytes",
    "copy_many",
    "copy_spread",
    "has_memory",
    "is_memory",
    "shares",
    "streams",
]

PIECE_BYTES = 512 << 10
_Piece = ctypes.c_char * PIECE_BYTES

_CACHE_BYTES = 32 << 20
"""About what of a model a processor's cache may still hold when its last byte was written."""


_ALONE_BYTES = 32 << 20
_MANY = 256
_EXACT = frozenset(
    (
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float32,
        torch.float64,
        torch.complex64,
        torch.complex128,
    )
)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Copy each value into its target, of the same dtype and shape, bit for bit: all in one call, but
    for what is large and on a GPU. That is left to CUDA's own copy, one each.

    Where there are many, they are small, and are not even looked at.
    """
    if not targets:
        return
    if not targets[0].is_cuda:
        torch._foreach_copy_(list(targets), list(values))
        return
    if len(targets) < _MANY:
        large = {i for i, value in enumerate(values) if value.nbytes >= _ALONE_BYTES}
        for i in large:
            targets[i].copy_(values[i])
        if large:
            targets = [target for i, target in enumerate(targets) if i not in large]
            values = [value for i, value in enumerate(values) if i not in large]
    if targets:
        copy_bits(targets, values)


def copy_bits(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """One batched call, on whole numbers: CUDA's takes a NaN of 16 or 8 bits through float32, which
    gives it other bits (pytorch issue 159333), and refuses the rarer dtypes."""
    torch._foreach_copy_([_bits(one) for one in targets], [_bits(one) for one in values])


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as whole numbers where that makes a difference. Kept with the tensor."""
    if tensor.dtype in _EXACT:
        return tensor
    kept: torch.Tensor | None = getattr(tensor, "_rayxfer_bits", None)
    if kept is None or kept.data_ptr() != tensor.data_ptr() or kept.shape != tensor.shape:
        # no view, which would keep its base alive, and that it
        kept = torch.empty(0, dtype=_BITS[tensor.element_size()], device=tensor.device)
        kept.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor._rayxfer_bits = kept  # type: ignore[attr-defined]
    return kept


def is_memory(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is exactly its dense bytes, on the host."""
    dense = tensor.is_cpu and tensor.is_contiguous()
    return dense and not tensor.is_conj() and not tensor.is_neg() and has_memory(tensor)


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its elements are anywhere: not so where the storage was freed, and in wrappers (tensors of
    classes that keep their values elsewhere)."""
    return bool(tensor.data_ptr()) or not tensor.nbytes


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


def _load_native() -> Any:
    """`copies.c`, or None: it was not built (no compiler; a source tree that was never installed)."""
    found = importlib.util.find_spec("rayxfer._copies")
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        one, many = library.rayxfer_stream, library.rayxfer_copy_many
        streams = ctypes.c_int.in_dll(library, "rayxfer_streams").value
    except (OSError, AttributeError, ValueError):  # another machine's build
        return None
    one.argtypes, one.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    pointers = (ctypes.c_void_p,) * 3
    many.argtypes, many.restype = (*pointers, ctypes.c_size_t, ctypes.c_int), None
    return (one if streams else ctypes.memmove), many


_native = _load_native()


def can_stream() -> bool:
    """Whether streamed copies are any other than usual ones here."""
    return _native is not None and _native[0] is not ctypes.memmove


def streams(num_bytes: int) -> bool:
    """Whether weights of so many bytes in all are better streamed to where they stay: the end of them would
    push the beginning out of the cache anyway."""
    return num_bytes >= _CACHE_BYTES


def copy_bytes(
    target: int,
    source: int,
    num_bytes: int,
    hasher: Hasher | None = None,
    *,
    stream: bool = False,
) -> None:
    """Copy between two addresses that do not overlap; `hasher` is fed the source's bytes.

    stream: past the caches, where that can be done.

    Both memories have to be kept alive by the caller. Releases the GIL while it works.
    """
    move: Any = _native[0] if stream and _native is not None else ctypes.memmove
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


def copy_many(
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    digests: list[int] | None,
    *,
    stream: bool = False,
) -> None:
    """`copy_bytes` for many small memories; appends the digest of each source to `digests`."""
    if not len(targets) == len(sources) == len(sizes):
        raise ValueError(f"{len(targets)} targets, {len(sources)} sources, {len(sizes)} sizes")
    if digests is None:
        _move_many(targets, sources, sizes, stream)
        return
    import xxhash

    xxh3, char = xxhash.xxh3_64_intdigest, ctypes.c_char
    # few at a time: they are digested while they are in cache
    few = max(1, PIECE_BYTES * len(sizes) // max(1, sum(sizes)))
    for start in range(0, len(sizes), few):
        run = slice(start, start + few)
        _move_many(targets[run], sources[run], sizes[run], stream)
        digests += [
            xxh3((char * size).from_address(source) if size else b"")
            for source, size in zip(sources[run], sizes[run], strict=True)
        ]


_SHARE_BYTES = 4 << 20
_MOST_THREADS = 4
_WORTH_BYTES = 32 << 20
THREADED_BYTES = 64 << 10
"""Threads that digest smaller ones by turns cost each other more than they save."""


def copy_spread(
    targets: Sequence[int],
    sources: Sequence[int],
    sizes: Sequence[int],
    digests: list[int] | None,
    *,
    stream: bool = False,
    check: Callable[[], None] = lambda: None,
) -> None:
    """`copy_many` of memories of any size, by several threads where that is faster: for whoever has no
    other use for the cores meanwhile. What `check` raises, which every thread asks after every few MiB,
    ends it; nobody writes any more then."""
    num_bytes = sum(sizes)
    threads = min(_MOST_THREADS, cores()) if num_bytes >= _WORTH_BYTES else 1
    if digests is not None and num_bytes < THREADED_BYTES * len(sizes):
        threads = 1  # their digests would be taken in turns
    todo = shares(sizes, _SHARE_BYTES, whole=digests is not None)
    # what cannot be cut goes first, so that nobody is left with it at the end
    order = sorted(range(len(todo)), key=lambda i: -todo[i][3])

    def copy(number: int) -> list[int]:
        first, stop, offset, size = todo[number]
        found: list[int] = []
        if stop - first > 1:
            check()
            run = slice(first, stop)
            columns = targets[run], sources[run], sizes[run]
            copy_many(*columns, None if digests is None else found, stream=stream)
            return found
        hasher = None if digests is None else Hasher()
        target, source = targets[first] + offset, sources[first] + offset
        for at in range(0, size, _SHARE_BYTES):
            check()
            part = min(_SHARE_BYTES, size - at)
            copy_bytes(target + at, source + at, part, hasher, stream=stream)
        return found if hasher is None else [hasher.value()]

    done = spread(copy, order, threads) if threads > 1 else list(map(copy, order))
    if digests is not None:
        for _, found in sorted(zip(order, done, strict=True)):
            digests += found


def shares(
    sizes: Sequence[int], most_bytes: int, *, whole: bool
) -> list[tuple[int, int, int, int]]:
    """Memories by their numbers, (first, stop, offset, bytes): those of `most_bytes` and more alone, in
    parts of so many unless they are to stay `whole`, and small ones that are neighbours together."""
    found: list[tuple[int, int, int, int]] = []
    first, together = 0, 0
    for index, size in enumerate(sizes):
        if size < most_bytes and together + size <= most_bytes:
            together += size
            continue
        if index > first:
            found.append((first, index, 0, together))
        first, together = index, size
        if size < most_bytes:
            continue
        step = size if whole else most_bytes
        found += [(index, index + 1, at, min(step, size - at)) for at in range(0, size, step)]
        first, together = index + 1, 0
    if len(sizes) > first:
        found.append((first, len(sizes), 0, together))
    return found


def _move_many(
    targets: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: bool
) -> None:
    if _native is None:
        for target, source, size in zip(targets, sources, sizes, strict=True):
            ctypes.memmove(target, source, size)
        return
    columns = [array("Q", column) for column in (targets, sources, sizes)]
    _native[1](*(column.buffer_info()[0] for column in columns), len(sizes), stream)
