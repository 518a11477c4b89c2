"""The readers' end of a ring that carries frames: see `frames.py`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from rayxfer.base import LoadWeights
from rayxfer.copying import copy_bytes
from rayxfer.engines.collective import deliver, deliver_alone, land, landing_for, landing_of
from rayxfer.engines.frames import BYTES, HEAD, KEY_BYTES, VERSION
from rayxfer.engines.ring import RingReader
from rayxfer.errors import ContractError
from rayxfer.memfile import ForeignFile
from rayxfer.packing import Bucket, Layout
from rayxfer.threads import spread

__all__ = ["FrameReader"]

_PART_BYTES = 4 << 20
"""A large tensor is copied in parts, so that an abort gets through and progress is seen."""

_LARGE_BYTES = 1 << 20
"""From this mean size on, tensors are copied to their places here; smaller ones the loader takes by
the bucket, which costs less than asking it for every single place."""

_KEPT_FILES = 2
_HOST = torch.device("cpu")


class FrameReader:
    """Reads rounds from one ring. Keeps the files that it was pointed to, and the views of them."""

    def __init__(self, ring: RingReader) -> None:
        self._ring = ring
        self._files: dict[tuple[bytes, bool], ForeignFile] = {}
        self._views: dict[tuple[int, bytes, bool], list[list[tuple[str, torch.Tensor]]]] = {}
        self._layout: Layout | None = None
        self._pool: ThreadPoolExecutor | None = None

    def abort(self) -> None:
        """Make a `receive` that waits for the ring raise soon. From any thread."""
        self._ring.abort()

    def close(self) -> None:
        """End its threads."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)

    def receive(self, layout: Layout, load_weights: LoadWeights) -> None:
        """Read one round and hand it over.

        Raises:
            TransferError: the ring was aborted. BackendUnavailable, ContractError: a frame points to
                a file that cannot be opened, or past its end.
        """
        if layout is not self._layout:
            self._layout = layout
            self._views.clear()
        used: set[bytes] = set()
        buckets = iter(layout.plan.buckets)
        for bucket in buckets:
            if not bucket.num_bytes:
                deliver_alone(layout, bucket, None, load_weights, landed=False)
                continue
            slot = self._ring.slot()
            kind = self._ring.kind
            if kind != BYTES:
                used.add(self._refer(layout, bucket, buckets, slot, kind, load_weights))
                self._ring.release()
            elif bucket.num_bytes <= self._ring.slot_bytes:
                deliver(layout, bucket, slot, load_weights)
                self._ring.release()
            else:
                self._receive_large(layout, bucket, load_weights)
        self._drop_stale(used)

    def _drop_stale(self, used: set[bytes]) -> None:
        """Two versions take turns; a file before those is of no use."""
        if len(self._files) > _KEPT_FILES and used:
            self._files = {key: file for key, file in self._files.items() if key[0] in used}
            self._views = {
                key: views for key, views in self._views.items() if key[1][:KEY_BYTES] in used
            }

    def _refer(
        self,
        layout: Layout,
        bucket: Bucket,
        following: Iterator[Bucket],
        slot: torch.Tensor,
        kind: int,
        load: LoadWeights,
    ) -> bytes:
        """A frame that says where tensors are: of this bucket, and as many after it as it tells of."""
        *numbers, nonce, threads, count = HEAD.unpack(bytes(slot[: HEAD.size].numpy()))
        frame = bytes(slot[: HEAD.size + 8 * count].numpy())
        offsets = memoryview(frame)[HEAD.size :].cast("Q")
        told: list[tuple[Bucket, memoryview]] = []
        left = count
        for one in itertools.chain((bucket,), following):
            size = layout.packed[one.index].count
            told.append((one, offsets[count - left : count - left + size]))
            left -= size
            if left <= 0:
                break
        if left:
            raise ContractError(
                f"shm: a frame of {count} tensors, which {len(told)} buckets have not"
            )
        file = self._file(frame[:KEY_BYTES], numbers, nonce, private=kind == VERSION)
        keep = getattr(load, "keep", None) if kind == VERSION else None
        whole = keep is not None and load.keeps  # type: ignore[attr-defined]
        if keep is None and sum(one.num_bytes for one, _ in told) < _LARGE_BYTES * count:
            for one, places in told:
                self._take_small(layout, one, file, places, load)
                self._ring.copied(sum(layout.packed[one.index].sizes))
            return frame[:KEY_BYTES]
        key = (bucket.index, frame, whole)
        views = self._views.get(key)
        if views is None:
            views = [_views(layout, one, file, iter(places)) for one, places in told]
            if whole:  # which costs nothing, so all of it at once
                views = [list(itertools.chain.from_iterable(views))]
            self._views[key] = views
        if keep is not None:
            claim = RingClaim(self._ring, numbers[2])
            for some in views:
                keep(some, file, claim)
        else:
            self._take([_items(some) for some in views], load, threads, layout.streams)
        return frame[:KEY_BYTES]

    @staticmethod
    def _take_small(
        layout: Layout, bucket: Bucket, file: ForeignFile, places: memoryview, load: LoadWeights
    ) -> None:
        """Small tensors, from where they lie in the file."""
        packed = layout.packed[bucket.index]
        given = iter(places)
        offsets = [next(given) if size else 0 for size in packed.sizes]
        end = file.bytes.numel()
        for name, offset, size in zip(packed.names, offsets, packed.sizes, strict=True):
            if offset + size > end:
                raise ContractError(f"shm: {name!r} is said to lie past its file's end")
        if land(layout, bucket, file.address, offsets, load):
            return
        views = _views(layout, bucket, file, iter(places))
        if not getattr(load, "copies_only", False):
            views = [(name, view.clone()) for name, view in views]
        load(views)

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

    def _take(
        self,
        buckets: list[list[_Item]],
        load_weights: LoadWeights,
        threads: int,
        stream: bool,
    ) -> None:
        """Copy tensors to their own places in the worker, all at once; what has no such place is copied to
        memory of its own and given away, bucket by bucket."""
        progress = getattr(load_weights, "progress", None)
        landed: list[str] = []
        copies: list[tuple[int, int, int]] = []
        for bucket in buckets:
            for item in bucket:
                place = landing_for(load_weights, item.name, _HOST) if item.num_bytes else None
                if place is not None:
                    copies.append((place.data_ptr(), item.address, item.num_bytes))
                    landed.append(item.name)
        self._copy(copies, threads, stream, progress)
        for name in landed:
            load_weights.landed(name)  # type: ignore[attr-defined]
        done = frozenset(landed)
        for bucket in buckets:
            own = [
                (item, torch.empty(item.shape, dtype=item.dtype))
                for item in bucket
                if item.name not in done
            ]
            copies = [(t.data_ptr(), item.address, item.num_bytes) for item, t in own if t.nbytes]
            self._copy(copies, threads, stream, progress)
            if own:
                load_weights([(item.name, tensor) for item, tensor in own])

    def _copy(
        self,
        copies: list[tuple[int, int, int]],
        threads: int,
        stream: bool,
        progress: Callable[[int], None] | None,
    ) -> None:
        """Copy (to, from, bytes), this thread taking its share."""
        parts = [
            (to + start, source + start, min(_PART_BYTES, size - start))
            for to, source, size in copies
            for start in range(0, size, _PART_BYTES)
        ]

        def copy(part: tuple[int, int, int]) -> None:
            to, source, size = part
            copy_bytes(to, source, size, stream=stream)
            self._ring.copied(size)
            if progress is not None:
                progress(0)

        if threads > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="rayxfer-copy")
        spread(copy, parts, threads, self._pool)

    def _receive_large(self, layout: Layout, bucket: Bucket, load_weights: LoadWeights) -> None:
        ring = self._ring
        progress = getattr(load_weights, "progress", None)
        place = landing_of(load_weights, layout, bucket, _HOST)
        target = place if place is not None else torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for start in range(0, bucket.num_bytes, ring.slot_bytes):
            part = target[start : start + ring.slot_bytes]
            slot = ring.slot()
            copy_bytes(part.data_ptr(), slot.data_ptr(), part.numel(), stream=layout.streams)
            ring.release()
            if progress is not None:
                progress(0)
        deliver_alone(layout, bucket, target, load_weights, landed=place is not None)


@dataclass(frozen=True)
class RingClaim:
    """Tells the ring's writer which file its reader uses."""

    ring: RingReader
    inode: int
    own: bool = False

    def going(self) -> None:
        self.ring.going(self.inode)

    def live(self) -> None:
        self.ring.hold(self.inode)


@dataclass(frozen=True, slots=True)
class _Item:
    """A tensor in the sender's file, at an address here."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    address: int
    num_bytes: int


def _items(views: list[tuple[str, torch.Tensor]]) -> list[_Item]:
    return [
        _Item(name, view.dtype, tuple(view.shape), view.data_ptr(), view.nbytes)
        for name, view in views
    ]


def _views(
    layout: Layout, bucket: Bucket, file: ForeignFile, offsets: Iterator[int]
) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors, where they lie in the file."""
    views: list[tuple[str, torch.Tensor]] = []
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
    return views
