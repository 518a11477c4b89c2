"""What goes through a ring: the buckets of one round, as frames. Three kinds of them:

- *bytes*: the bucket itself, in the slot. One that fits a slot is one frame; a larger tensor, which
  travels alone, is cut into several.
- *there*: where the tensors of one or more buckets lie in a memory file of the sender's process (a
  placed trainer's own weights, see `rayxfer.placement`; a snapshot). The readers copy them from there,
  with several threads where there are cores to spare; nothing is staged.
- *version*: the same, in a file that stays as it is until every reader has left it: weights to be used
  where they lie (see `versions.py`).

Used between a sender and the workers of its host (`shm`), and wherever bytes fan out on one host.
"""

from __future__ import annotations

import os
import struct
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rayxfer.copying import copy_bytes, copy_spread, is_memory
from rayxfer.engines.collective import (
    expect_end,
    fill,
    next_tensor,
)
from rayxfer.engines.ring import RingWriter
from rayxfer.engines.stores import Stores
from rayxfer.memfile import MemoryFile, file_size, find
from rayxfer.packing import Bucket, Layout, Packed, as_bytes, plain
from rayxfer.threads import cores

__all__ = [
    "BYTES",
    "HEAD",
    "KEY_BYTES",
    "THERE",
    "VERSION",
    "Told",
    "send_frames",
    "send_version",
    "version_frames",
]

BYTES, THERE, VERSION = range(3)
_NOTHING = torch.empty(0, dtype=torch.uint8)
HEAD = struct.Struct("<QQQQ16sQQ")
"""pid, fd, inode, file_bytes, nonce; threads for a reader to copy with; how many offsets follow (8 bytes
each), one per tensor with bytes."""

KEY_BYTES = HEAD.size - 16
"""What of it names the file."""

_TOGETHER_BYTES = 64 << 20
"""So much of *there* may be told with one frame: threads that copy have to meet once per frame."""

_BESIDE_BYTES = 8 << 20
"""So far may the sender's digests be ahead of the reader that copies the same bytes."""

_VERSION_BYTES = 1 << 30
"""So much of a *version*: nobody has anything to do before it is there, and readers that wake up for
each bucket are in the sender's way. Often enough to be seen moving."""

_MOST_THREADS = 4
_MISSES = 3
"""A source of which so many buckets begin in no file is not looked at further: that has its cost."""


def send_frames(
    ring: RingWriter,
    layout: Layout,
    iterator: Iterator[tuple[str, torch.Tensor]],
    *,
    stable: bool = False,
) -> None:
    """Write one round into the ring; returns once every reader is done with it.

    stable: the tensors keep their memory and values until this returns.

    Raises:
        TransferError: the ring was aborted.
    """
    busy = getattr(iterator, "digests", None) is not None
    threads = threads_per_reader(ring.num_readers, busy=busy)
    told = Told(ring, THERE, _TOGETHER_BYTES, threads)
    passing = _Passing(ring, told, iterator)
    for bucket in layout.plan.buckets:
        may_be_placed = stable and told.misses < _MISSES and bucket.num_bytes
        placed = passing.tell(layout, bucket) if may_be_placed else False
        if placed:
            continue
        passing.rest()
        ahead = _Ahead(iterator, ring.stores)
        if placed is None and _placed(layout, bucket, ahead, told):
            continue
        if bucket.num_bytes:
            told.publish()
        if not bucket.num_bytes:
            fill(layout, bucket, ahead, _NOTHING)
        elif bucket.num_bytes <= ring.slot_bytes:
            slot, stream = ring.slot(), ring.stores.begin()
            fill(layout, bucket, ahead, slot, stream=stream)
            ring.stores.end()
            ring.publish()
        else:
            _send_large(ring, layout, bucket, ahead)
    passing.rest()
    expect_end(iterator)
    told.publish()
    ring.drain()


def threads_per_reader(readers: int, *, busy: bool) -> int:
    """How many threads each of them may copy with, on this machine; `busy`: the sender needs one itself."""
    return max(1, min(_MOST_THREADS, (cores() - busy) // max(1, readers)))


class Told:
    """Offsets that were not told yet: of buckets in a row, in one file."""

    def __init__(self, ring: RingWriter, kind: int, most_bytes: int, threads: int = 1) -> None:
        self._ring, self._kind, self._most, self._threads = ring, kind, most_bytes, threads
        self._about: dict[str, Any] | None = None
        self._offsets = array("Q")
        self._num_bytes = 0
        self.frames = 0
        """How many were published."""
        self.misses = 0
        """How often a bucket began in no file."""

    def add(self, about: dict[str, Any], offsets: array[int], num_bytes: int) -> None:
        room = self._ring.slot_bytes - HEAD.size
        full = 8 * (len(self._offsets) + len(offsets)) > room
        if self._about is not about or full or self._num_bytes + num_bytes > self._most:
            self.publish()
        self._about = about
        self._offsets += offsets
        self._num_bytes += num_bytes

    def publish(self) -> None:
        if self._about is not None:
            _tell(self._ring, _frame(self._about, self._offsets, self._threads), self._kind)
            self.frames += 1
        self._about, self._offsets, self._num_bytes = None, array("Q"), 0


def version_frames(ring: RingWriter) -> Told:
    """Tells where the tensors of a version are."""
    return Told(ring, VERSION, _VERSION_BYTES)


def _tell(ring: RingWriter, frame: torch.Tensor, kind: int) -> None:
    ring.slot()[: frame.numel()] = frame
    ring.publish(kind)


class _Ahead:
    """An iterator that can be looked into: what was taken out by `peek` comes again. Its copies are
    timed."""

    def __init__(self, iterator: Iterator[tuple[str, torch.Tensor]], stores: Stores) -> None:
        self._iterator, self._stores = iterator, stores
        self._seen: list[tuple[str, torch.Tensor]] = []
        self._take = getattr(iterator, "take", None)
        self._pack = getattr(iterator, "pack", None)

    def peek(self) -> tuple[str, torch.Tensor] | None:
        item = next(self._iterator, None)
        if item is not None:
            self._seen.append(item)
        return item

    def __iter__(self) -> _Ahead:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        return self._seen.pop(0) if self._seen else next(self._iterator)

    @property
    def take(self) -> Callable[..., None] | None:
        """The iterator's own, where the tensor in hand is the last that it gave."""
        return None if self._seen or self._take is None else self._timed_take

    def _timed_take(self, target: int, source: int, num_bytes: int, stream: bool) -> None:
        assert self._take is not None
        self._stores.timed(self._take, target, source, num_bytes, stream)
        self._stores.count(num_bytes)

    @property
    def pack(self) -> Callable[..., int] | None:
        """The iterator's own, where it gives the next tensor."""
        return None if self._seen or self._pack is None else self._timed_pack

    def _timed_pack(self, address: int, packed: Packed, start: int, stream: bool) -> int:
        assert self._pack is not None
        count: int = self._stores.timed(self._pack, address, packed, start, stream)
        self._stores.count(sum(packed.sizes[start : start + count]))
        return count


class _Passing:
    """Buckets of tensors that are there already: the readers are told of them before the iterator passes
    them by. What it digests then, the readers are copying at the same time, so that memory is read once:
    the second to come finds it in the processor's cache. Measured for 1 GiB and one reader: 61 to 66 ms
    for both, and 80 to 91 where one is far ahead of the other.

    The frame that was told last waits, so that the readers always have one more.
    """

    def __init__(
        self, ring: RingWriter, told: Told, iterator: Iterator[tuple[str, torch.Tensor]]
    ) -> None:
        self._ring, self._told = ring, told
        self._places, self._skip = _by_places(iterator)
        self._waiting: deque[tuple[int, Packed]] = deque()
        self._read = ring.copied()

    def tell(self, layout: Layout, bucket: Bucket) -> bool | None:
        """Whether the readers are to copy this bucket's tensors from where they lie. None: each has to be
        looked at to tell."""
        packed = layout.packed[bucket.index]
        places = self._places(packed)
        if places is None:
            return None
        lie = _in_one_file(places, packed.sizes)
        if lie is None:
            self._told.misses += 1
            return False
        self._told.add(*lie, bucket.num_bytes)
        self._waiting.append((self._told.frames, packed))
        self._pass(self._told.frames - 1)
        return True

    def rest(self) -> None:
        """Have all of them told, and passed by."""
        if self._waiting:
            self._told.publish()
            self._pass(self._told.frames)

    def _pass(self, frames: int) -> None:
        """Those of the frames before this one."""
        while self._waiting and self._waiting[0][0] < frames:
            self._skip(self._waiting.popleft()[1], self._pace)

    def _pace(self, num_bytes: int) -> None:
        self._read += num_bytes
        self._ring.beside(self._read - _BESIDE_BYTES)


def _by_places(
    iterator: Iterator[tuple[str, torch.Tensor]],
) -> tuple[Callable[[Packed], Sequence[int] | None], Callable[..., None]]:
    """Its `places` and `skip` (see `rayxfer.feed`). Of one that has none: nothing is anywhere."""
    return getattr(iterator, "places", lambda _: None), getattr(iterator, "skip", lambda *_: None)


def _placed(layout: Layout, bucket: Bucket, ahead: _Ahead, told: Told) -> bool:
    """The same of a bucket whose tensors have to be looked at."""
    about: dict[str, Any] | None = None
    offsets = array("Q")
    for piece in bucket.pieces:
        # not further than is of use: what was looked at is digested in a pass of its own
        item = ahead.peek()
        if item is None or item[1].nbytes != piece.num_bytes:
            return False  # what is wrong with it is said where it is taken
        if not piece.num_bytes:
            continue
        found = find(item[1].data_ptr(), piece.num_bytes) if is_memory(item[1]) else None
        if found is None or found[0] is not (about if about is not None else found[0]):
            told.misses += about is None and is_memory(item[1])
            return False
        about = found[0]
        offsets.append(found[1])
    if about is None:
        return False
    for piece in bucket.pieces:
        next_tensor(ahead, layout.metadata[piece.tensor])
    told.add(about, offsets, bucket.num_bytes)
    return True


def _in_one_file(
    places: Sequence[int], sizes: Sequence[int]
) -> tuple[dict[str, Any], array[int]] | None:
    """The memory file in which all of them lie, and the offsets there of those with any bytes."""
    pairs = [(place, size) for place, size in zip(places, sizes, strict=True) if size]
    found = find(*pairs[0]) if pairs else None
    if found is None:
        return None
    about, offset = found
    start = pairs[0][0] - offset
    end = start + file_size(about)
    if any(place < start or place + size > end for place, size in pairs):
        return None
    return about, array("Q", [place - start for place, _ in pairs])


def _frame(about: dict[str, Any], offsets: array[int], threads: int = 1) -> torch.Tensor:
    numbers = (about[k] for k in ("fd", "inode", "file_bytes"))
    head = HEAD.pack(os.getpid(), *numbers, bytes.fromhex(about["nonce"]), threads, len(offsets))
    return torch.frombuffer(bytearray(head + offsets.tobytes()), dtype=torch.uint8)


def _send_large(ring: RingWriter, layout: Layout, bucket: Bucket, ahead: _Ahead) -> None:
    for piece in bucket.pieces:
        tensor = next_tensor(ahead, layout.metadata[piece.tensor])
        if not piece.num_bytes:
            continue
        # `plain` makes another tensor of one that is not dense: then there is nothing to take
        take = ahead.take if is_memory(tensor) else None
        flat = as_bytes(plain(tensor)).cpu()
        for start in range(0, flat.numel(), ring.slot_bytes):
            part = flat[start : start + ring.slot_bytes]
            slot, stream = ring.slot(), ring.stores.begin()
            if take is not None:
                take(slot.data_ptr(), part.data_ptr(), part.numel(), stream)
            else:
                copy_bytes(slot.data_ptr(), part.data_ptr(), part.numel(), stream=stream)
            ring.stores.end()
            ring.publish()


def send_version(
    ring: RingWriter,
    layout: Layout,
    iterator: Iterator[tuple[str, torch.Tensor]],
    file: MemoryFile,
) -> None:
    """Write one round into `file`, every tensor at its place, and tell the readers; returns once every
    reader has seen all of it. Nobody may use the file's old content any more.

    Raises:
        TransferError: the ring was aborted.
    """
    told = version_frames(ring)
    together = _Together(ring, layout, iterator, file, told)
    for bucket, base in zip(layout.plan.buckets, layout.starts, strict=True):
        if together.takes(bucket, base):
            continue
        together.copy()
        if bucket.num_bytes:
            place = file.bytes[base : base + bucket.num_bytes]
            fill(layout, bucket, iterator, place, stream=layout.streams)
            told.add(file.about, layout.in_file(bucket), bucket.num_bytes)
        else:
            fill(layout, bucket, iterator, _NOTHING)
    together.copy()
    expect_end(iterator)
    told.publish()
    ring.drain()


class _Together:
    """Buckets whose tensors are there already, copied to a version's file in one go: by several threads,
    since none of its readers copies anything."""

    def __init__(
        self,
        ring: RingWriter,
        layout: Layout,
        iterator: Iterator[tuple[str, torch.Tensor]],
        file: MemoryFile,
        told: Told,
    ) -> None:
        self._ring, self._layout, self._file, self._told = ring, layout, file, told
        self._places, self._skip = _by_places(iterator)
        self._digests = getattr(iterator, "digests", None) is not None
        self._buckets: list[Bucket] = []
        self._columns: tuple[list[int], list[int], list[int]] = [], [], []
        self._num_bytes = 0

    def takes(self, bucket: Bucket, base: int) -> bool:
        """Whether it is one of those, and will be copied with the next `copy`."""
        packed = self._layout.packed[bucket.index]
        places = self._places(packed)
        if places is None:
            return False
        if self._num_bytes + bucket.num_bytes > _VERSION_BYTES:
            self.copy()
        start = self._file.bytes.data_ptr() + base
        targets, sources, sizes = self._columns
        targets += [start + offset for offset in packed.offsets]
        sources += places
        sizes += packed.sizes
        self._buckets.append(bucket)
        self._num_bytes += bucket.num_bytes
        return True

    def copy(self) -> None:
        """Copy them, and tell the readers.

        Raises:
            TransferError: the ring was aborted. Nothing is written any more then.
        """
        if not self._buckets:
            return
        found: list[int] | None = [] if self._digests else None
        stream, check = self._layout.streams, self._ring.check
        copy_spread(*self._columns, found, stream=stream, check=check)
        at = 0
        for bucket in self._buckets:
            packed = self._layout.packed[bucket.index]
            count = len(packed.sizes)
            self._skip(packed, digests=None if found is None else found[at : at + count])
            at += count
            if bucket.num_bytes:
                offsets = self._layout.in_file(bucket)
                self._told.add(self._file.about, offsets, bucket.num_bytes)
        self._told.publish()
        self._buckets, self._columns, self._num_bytes = [], ([], [], []), 0
