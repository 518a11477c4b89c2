"""What goes through a ring: the buckets of one round, as frames. Three kinds of them:

- *bytes*: the bucket itself, in the slot. One that fits a slot is one frame; a larger tensor, which
  travels alone, is cut into several.
- *there*: where the bucket's tensors lie in a memory file of the sender's process (a placed trainer's own
  weights, see `rayxfer.placement`; a snapshot). The readers copy them from there; nothing is staged.
- *version*: the same, in a file that stays as it is until every reader has left it: weights to be used
  where they lie (see `versions.py`).

Used between a sender and the workers of its host (`shm`), and wherever bytes fan out on one host.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from rayxfer.base import LoadWeights
from rayxfer.copying import copy_bytes, is_memory
from rayxfer.engines.collective import (
    deliver,
    deliver_alone,
    expect_end,
    fill,
    next_tensor,
)
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.errors import ContractError
from rayxfer.memfile import ForeignFile, MemoryFile, find
from rayxfer.packing import Bucket, Layout, Piece, as_bytes, plain

__all__ = ["FrameReader", "receive_frames", "send_frames", "send_version"]

BYTES, THERE, VERSION = range(3)
_NOTHING = torch.empty(0, dtype=torch.uint8)
_FILE = struct.Struct("<QQQQ16sQ")
"""pid, fd, inode, file_bytes, nonce; how many offsets follow (8 bytes each), one per tensor with bytes."""

_PART_BYTES = 4 << 20
"""A large tensor is copied in parts, so that an abort gets through and progress is seen."""


# ---- the writer -------------------------------------------------------------------------------------


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
    for bucket in layout.plan.buckets:
        ahead = _Ahead(iterator)
        if stable and bucket.num_bytes and (frame := _placed(layout, bucket, ahead)) is not None:
            slot = ring.slot()
            slot[: frame.numel()] = frame
            ring.publish(THERE)
        elif bucket.num_bytes <= ring.slot_bytes:
            fill(layout, bucket, ahead, ring.slot() if bucket.num_bytes else _NOTHING)
            if bucket.num_bytes:
                ring.publish()
        else:
            _send_large(ring, layout, bucket, ahead)
    expect_end(iterator)
    ring.drain()


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


def _placed(layout: Layout, bucket: Bucket, ahead: _Ahead) -> torch.Tensor | None:
    """The frame that says where the bucket's tensors lie, if all lie in one memory file."""
    about: dict[str, Any] | None = None
    offsets = array("Q")
    for piece in bucket.pieces:
        item = ahead.peek()
        if item is None or item[1].nbytes != piece.num_bytes:
            return None  # what is wrong with it is said where it is taken
        if not piece.num_bytes:
            continue
        found = find(item[1].data_ptr(), piece.num_bytes) if is_memory(item[1]) else None
        if found is None or found[0] is not (about if about is not None else found[0]):
            return None
        about = found[0]
        offsets.append(found[1])
    if about is None:
        return None
    for piece in bucket.pieces:
        next_tensor(ahead, layout.metadata[piece.tensor])
    return _frame(about, offsets)


def _frame(about: dict[str, Any], offsets: array[int]) -> torch.Tensor:
    keys = ("pid", "fd", "inode", "file_bytes")
    head = _FILE.pack(*(about[k] for k in keys), bytes.fromhex(about["nonce"]), len(offsets))
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
            frame = _frame(file.about, offsets)
            slot = ring.slot()
            slot[: frame.numel()] = frame
            ring.publish(VERSION)
    expect_end(iterator)
    ring.drain()


# ---- the readers ------------------------------------------------------------------------------------


def receive_frames(ring: RingReader, layout: Layout, load_weights: LoadWeights) -> None:
    """Read one round of bytes from a ring that carries nothing else, and hand it over."""
    FrameReader(ring).receive(layout, load_weights)


class FrameReader:
    """Reads rounds from one ring. Keeps the files that it was pointed to, and the views of them."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._files: dict[tuple[bytes, bool], ForeignFile] = {}
        self._views: dict[tuple[int, int, bytes], list[tuple[str, torch.Tensor]]] = {}
        self._layout: Layout | None = None

    def receive(self, layout: Layout, load_weights: LoadWeights) -> None:
        """Read one round and hand it over.

        Raises:
            TransferError: the ring was aborted. BackendUnavailable, ContractError: a frame points to
                a file that cannot be opened, or past its end.
        """
        if layout is not self._layout:
            self._layout = layout
            self._views.clear()
        fresh: set[tuple[int, int, bytes]] = set()
        for bucket in layout.plan.buckets:
            if not bucket.num_bytes:
                deliver_alone(layout, bucket, None, load_weights, landed=False)
                continue
            slot = self._ring.slot()
            kind = self._ring.kind
            if kind != BYTES:
                fresh.add(self._refer(layout, bucket, slot, kind, load_weights))
                self._ring.release()
            elif bucket.num_bytes <= self._ring.slot_bytes:
                deliver(layout, bucket, slot, load_weights)
                self._ring.release()
            else:
                self._receive_large(layout, bucket, load_weights)
        # two versions take turns; what was before the last of either is of no use
        self._drop_stale(fresh)

    def _drop_stale(self, fresh: set[tuple[int, int, bytes]]) -> None:
        used = {key[2][: _FILE.size - 8] for key in fresh}
        files = {key[0] for key in self._files}
        if len(files) > _KEPT_FILES and used:
            for key in [key for key in self._files if key[0] not in used]:
                del self._files[key]
            kept = {key[0] for key in self._files}
            for view in [view for view in self._views if view[2][: _FILE.size - 8] not in kept]:
                del self._views[view]

    def _refer(
        self, layout: Layout, bucket: Bucket, slot: torch.Tensor, kind: int, load: LoadWeights
    ) -> tuple[int, int, bytes]:
        """A frame that says where the tensors are."""
        head = bytes(slot[: _FILE.size].numpy())
        *numbers, nonce, count = _FILE.unpack(head)
        pieces = [piece for piece in bucket.pieces if piece.num_bytes]
        if count != len(pieces):
            raise ContractError(f"shm: a frame of {count} tensors where {len(pieces)} are due")
        frame = bytes(slot[: _FILE.size + 8 * count].numpy())
        file = self._file(head[:-8], numbers, nonce, private=kind == VERSION)
        key = (kind, bucket.index, frame)
        views = self._views.get(key)
        if views is None:
            offsets = iter(memoryview(frame)[_FILE.size :].cast("Q"))
            views = []
            for piece in bucket.pieces:
                meta = layout.metadata[piece.tensor]
                if not piece.num_bytes:
                    views.append((meta.name, torch.empty(meta.shape, dtype=meta.dtype)))
                    continue
                start = next(offsets)
                part = file.bytes[start : start + piece.num_bytes]
                if part.numel() != piece.num_bytes:
                    raise ContractError(f"shm: {meta.name!r} is said to lie past its file's end")
                views.append((meta.name, part.view(meta.dtype).view(meta.shape)))
            self._views[key] = views
        keep = getattr(load, "keep", None)
        if kind == VERSION and keep is not None:
            hold = self._ring.hold
            keep(views, file, lambda: hold(numbers[2]))
        else:
            self._copy_out(layout, bucket, views, load)
        return key

    def _file(self, head: bytes, numbers: list[int], nonce: bytes, *, private: bool) -> ForeignFile:
        found = self._files.get((head, private))
        if found is None:
            pid, fd, inode, file_bytes = numbers
            found = self._files[head, private] = ForeignFile(
                pid=pid,
                fd=fd,
                inode=inode,
                file_bytes=file_bytes,
                nonce=nonce.hex(),
                private=private,
            )
        return found

    @staticmethod
    def _copy_out(
        layout: Layout,
        bucket: Bucket,
        views: list[tuple[str, torch.Tensor]],
        load_weights: LoadWeights,
    ) -> None:
        if len(views) == 1 and views[0][1].nbytes > _PART_BYTES:
            name, view = views[0]
            target, landed = _target(load_weights, name, view.nbytes)
            source, progress = view.data_ptr(), getattr(load_weights, "progress", None)
            for start in range(0, view.nbytes, _PART_BYTES):
                size = min(_PART_BYTES, view.nbytes - start)
                copy_bytes(target.data_ptr() + start, source + start, size)
                if progress is not None:
                    progress(0)
            deliver_alone(layout, bucket, target, load_weights, landed=landed)
            return
        if not getattr(load_weights, "copies_only", False):
            views = [(name, view.clone()) for name, view in views]
        load_weights(views)

    def _receive_large(self, layout: Layout, bucket: Bucket, load_weights: LoadWeights) -> None:
        ring = self._ring
        progress = getattr(load_weights, "progress", None)
        meta = layout.metadata[next(p.tensor for p in bucket.pieces if p.num_bytes)]
        target, landed = _target(load_weights, meta.name, bucket.num_bytes)
        for start in range(0, bucket.num_bytes, ring.slot_bytes):
            part = target[start : start + ring.slot_bytes]
            slot = ring.slot()
            copy_bytes(part.data_ptr(), slot.data_ptr(), part.numel())
            ring.release()
            if progress is not None:
                progress(0)
        deliver_alone(layout, bucket, target, load_weights, landed=landed)


_KEPT_FILES = 2


def _target(load_weights: LoadWeights, name: str, num_bytes: int) -> tuple[torch.Tensor, bool]:
    """Where a large tensor is put together: its own place in the worker, or memory to give away."""
    landing = getattr(load_weights, "landing", None)
    place = landing(name) if landing is not None else None
    if place is not None and place.device.type == "cpu":
        return place, True
    return torch.empty(num_bytes, dtype=torch.uint8), False
