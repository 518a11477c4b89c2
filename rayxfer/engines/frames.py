"""What goes through a ring: the buckets of one round, as frames. Four kinds of them:

- *bytes*: the bucket itself, in the slot. One that fits a slot is one frame; a larger tensor, which
  travels alone, is cut into several.
- *there*: where the tensors of one or more buckets lie in a memory file of the sender's process (a
  placed trainer's own weights, see `rayxfer.placement`; a snapshot). The readers copy them from there,
  with several threads where there are cores to spare; nothing is staged.
- *direct*: the same, of tensors anywhere in the sender's memory, from where the readers may copy them
  (process_vm_readv). One copy for each reader and none at the sender, which wins as soon as there are
  several.
- *version*: where they lie in a file that stays as it is until every reader has left it: weights to be used
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

from rayxfer.copying import copy_bytes, is_memory
from rayxfer.engines.collective import (
    expect_end,
    fill,
    next_tensor,
)
from rayxfer.engines.ring import CAN_READ, RingWriter
from rayxfer.memfile import MemoryFile, find
from rayxfer.packing import Bucket, Layout, Piece, as_bytes, plain

__all__ = [
    "BYTES",
    "DIRECT",
    "HEAD",
    "KEY_BYTES",
    "THERE",
    "VERSION",
    "send_frames",
    "send_version",
]

BYTES, THERE, VERSION, DIRECT = range(4)
_NOTHING = torch.empty(0, dtype=torch.uint8)
HEAD = struct.Struct("<QQQQ16sQQ")
"""pid, fd, inode, file_bytes, nonce; threads for a reader to copy with; how many offsets follow (8 bytes
each), one per tensor with bytes. *direct*: addresses, and only the pid counts."""

KEY_BYTES = HEAD.size - 16
"""What of it names the file."""

_TOGETHER_BYTES = 64 << 20
"""So much of *there* may be told with one frame: threads that copy have to meet once per frame."""

_MOST_THREADS = 4
_DIRECT_READERS = 2
"""From so many readers on, each copies from the sender's memory: with one, a ring in the processor's
cache is faster."""

_DIRECT_BYTES = 256 << 10
"""Mean size of a bucket's tensors from which on that is worth a system call each."""

_IN_SENDER: dict[str, Any] = {"fd": 0, "inode": 0, "file_bytes": 0, "nonce": "00" * 16}


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
    told = _Told(ring, iterator, threads_per_reader(ring.num_readers, busy=busy))
    direct = ring.num_readers >= _DIRECT_READERS and all(ring.said(CAN_READ))
    for bucket in layout.plan.buckets:
        ahead = _Ahead(iterator)
        if stable and bucket.num_bytes and _placed(layout, bucket, ahead, told, direct):
            continue
        if bucket.num_bytes:
            told.publish()
        if bucket.num_bytes <= ring.slot_bytes:
            fill(layout, bucket, ahead, ring.slot() if bucket.num_bytes else _NOTHING)
            if bucket.num_bytes:
                ring.publish()
        else:
            _send_large(ring, layout, bucket, ahead)
    expect_end(iterator)
    told.publish()
    ring.drain()


def threads_per_reader(readers: int, *, busy: bool) -> int:
    """How many threads each of them may copy with, on this machine; `busy`: the sender needs one itself."""
    cores = len(os.sched_getaffinity(0)) - busy
    return max(1, min(_MOST_THREADS, cores // max(1, readers)))


class _Told:
    """Places that were not told yet: of buckets in a row, in one file or anywhere in this process."""

    def __init__(self, ring: RingWriter, iterator: Any, threads: int) -> None:
        self._ring, self._iterator, self._threads = ring, iterator, threads
        self._about: dict[str, Any] | None = None
        self._places = array("Q")
        self._num_bytes = 0
        self._tensors: list[torch.Tensor] = []
        self._told: deque[list[torch.Tensor]] = deque(maxlen=ring.num_slots)

    def add(
        self,
        about: dict[str, Any],
        places: array[int],
        num_bytes: int,
        tensors: list[torch.Tensor],
    ) -> None:
        room = self._ring.slot_bytes - HEAD.size
        full = 8 * (len(self._places) + len(places)) > room
        # what was made for this pass alone is to be let go of soon
        most = 0 if getattr(self._iterator, "temporary_bytes", 0) else _TOGETHER_BYTES
        if self._about is not about or full or self._num_bytes + num_bytes > most:
            self.publish()
        self._about = about
        self._places += places
        self._num_bytes += num_bytes
        self._tensors += tensors

    def publish(self) -> None:
        if self._about is not None:
            frame = _frame(self._about, self._places, self._threads)
            _tell(self._ring, frame, DIRECT if self._about is _IN_SENDER else THERE)
            self._told.append(self._tensors)  # as many as the ring has slots: the rest was read
        self._about, self._places, self._num_bytes = None, array("Q"), 0
        self._tensors = []


def _tell(ring: RingWriter, frame: torch.Tensor, kind: int) -> None:
    ring.slot()[: frame.numel()] = frame
    ring.publish(kind)


class _Ahead:
    """An iterator that can be looked into: what was taken out by `peek` comes again."""

    def __init__(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        self._iterator = iterator
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
    def take(self) -> Callable[[int, int, int], None] | None:
        """The iterator's own, where the tensor in hand is the last that it gave."""
        return self._take if not self._seen else None

    @property
    def pack(self) -> Callable[[int, Sequence[Piece], int], int] | None:
        """The iterator's own, where it gives the next tensor."""
        return self._pack if not self._seen else None


def _placed(layout: Layout, bucket: Bucket, ahead: _Ahead, told: _Told, direct: bool) -> bool:
    """Whether the readers are to copy this bucket's tensors from where they lie: all in one memory file, or
    all large enough and `direct`."""
    pieces = [piece for piece in bucket.pieces if piece.num_bytes]
    direct = direct and bucket.num_bytes >= _DIRECT_BYTES * len(pieces)
    first = ahead.peek()
    if first is None:
        return False
    tensors = [first[1]]
    for _ in bucket.pieces[1:]:
        # not further than is of use: what was looked at is digested in a pass of its own
        if not direct and not _in_file(tensors[-1]):
            return False
        item = ahead.peek()
        if item is None:
            return False
        tensors.append(item[1])
    by_piece = list(zip(bucket.pieces, tensors, strict=True))
    if any(p.num_bytes != t.nbytes or (p.num_bytes and not is_memory(t)) for p, t in by_piece):
        return False  # strided; or wrong, which is said where it is taken
    found = [find(tensor.data_ptr(), tensor.nbytes) for tensor in tensors if tensor.nbytes]
    about = found[0][0] if found[0] is not None else None
    if about is not None and all(one is not None and one[0] is about for one in found):
        places = array("Q", (one[1] for one in found if one is not None))
    elif direct:
        about, places = _IN_SENDER, array("Q", (t.data_ptr() for t in tensors if t.nbytes))
    else:
        return False
    for piece in bucket.pieces:
        next_tensor(ahead, layout.metadata[piece.tensor])
    told.add(about, places, bucket.num_bytes, tensors)
    return True


def _in_file(tensor: torch.Tensor) -> bool:
    return not tensor.nbytes or find(tensor.data_ptr(), tensor.nbytes) is not None


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
            (take or copy_bytes)(ring.slot().data_ptr(), part.data_ptr(), part.numel())
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
    take = getattr(iterator, "take", None)
    for bucket, base in zip(layout.plan.buckets, layout.starts, strict=True):
        offsets = array("Q")
        for piece in bucket.pieces:
            tensor = next_tensor(iterator, layout.metadata[piece.tensor])
            if not piece.num_bytes:
                continue
            dense = is_memory(tensor)
            flat = as_bytes(plain(tensor)).cpu()
            copy = take if take is not None and dense else copy_bytes
            offset = base + piece.offset_bytes
            copy(file.address + offset, flat.data_ptr(), piece.num_bytes)
            offsets.append(offset)
        if offsets:
            _tell(ring, _frame(file.about, offsets), VERSION)
    expect_end(iterator)
    ring.drain()
