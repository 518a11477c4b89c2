"""One round of `ipc`: the sender's writing of frames, and a worker's reading of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rayxfer.base import LoadWeights, SessionPlan
from rayxfer.engines.collective import Layouts, expect_end, landing_for, next_tensor
from rayxfer.engines.device import Device, Ready
from rayxfer.engines.handles import MAX_TENSORS, NO_EVENT, NOTHING, Exports, Frame, Imports
from rayxfer.engines.ring import RingWriter
from rayxfer.errors import ContractError
from rayxfer.packing import Bucket, Layout, Piece, align, as_bytes, plain, view_piece
from rayxfer.topology import process_gone

__all__ = ["SLOTS", "Channel", "Reader", "Writer", "free_staging"]

SLOTS = 2
"""Frames in flight: of the ring, of the staging buffers, of the events."""

_DIRECT_BYTES = 1 << 30
"""Of a direct frame, unless the user sets a bucket size. Nothing is staged for it, and a GPU copies this
much in less than a millisecond: with less, it would wait for the two hosts to talk."""

_CLOSE_S = 60.0
_NOWHERE = (NOTHING, 0)


@dataclass
class Channel:
    """The sender's end.

    Attributes:
        staging: two buffers of our own, made when first needed.
        held: per slot of the ring, what its frame refers to: kept until every worker acknowledged.
    """

    plan: SessionPlan
    device: Device
    ring: RingWriter
    events: list[Ready]
    exports: Exports
    form: str
    layouts: Layouts
    layout: Layout | None = None
    staging: list[torch.Tensor] = field(default_factory=list)
    held: list[Any] = field(default_factory=lambda: [None] * SLOTS)
    closed: bool = False


def free_staging(channel: Channel) -> None:
    """Give staging buffers back once no living worker has them open (freeing first is undefined)."""
    deadline = time.monotonic() + _CLOSE_S
    while time.monotonic() < deadline:
        staying = channel.ring.staying()
        if all(process_gone(channel.plan.workers[rank]) for rank in staying):
            break
        time.sleep(0.02)
    with channel.device.use():
        channel.device.settle()
        while channel.staging:
            channel.device.free(channel.staging.pop())


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """`plain`, and quick for what is plain already, which nearly all is."""
    odd = not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
    return plain(tensor) if odd else tensor


class Writer:
    """One round, from the iterator into the ring."""

    def __init__(
        self,
        channel: Channel,
        iterator: Iterator[tuple[str, torch.Tensor]],
        layout: Layout,
        *,
        direct: bool,
    ) -> None:
        self._channel, self._iterator, self._layout = channel, iterator, layout
        self._direct = direct
        self._next = 0
        self._size = channel.plan.bucket_size_bytes
        self._most = _DIRECT_BYTES if channel.plan.config.bucket_size_bytes is None else self._size
        self._tensors: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []
        self._bytes = self._temporary = 0

    def run(self) -> None:
        channel = self._channel
        if channel.layout is not self._layout:
            channel.layout = self._layout
            channel.exports.forget()
        channel.exports.begin()
        for bucket in self._layout.plan.buckets:
            for start in range(0, len(bucket.pieces), MAX_TENSORS):
                pieces = bucket.pieces[start : start + MAX_TENSORS]
                if self._direct:
                    self._in_place(bucket, pieces)
                else:
                    self._staged(bucket, pieces, self._iterator)
        self._flush()
        expect_end(self._iterator)
        channel.ring.drain()
        channel.held = [None] * SLOTS

    def _in_place(self, bucket: Bucket, pieces: tuple[Piece, ...]) -> None:
        """Say where these lie, together with those before them; or stage them."""
        metadata = self._layout.metadata
        tensors = [_plain(next_tensor(self._iterator, metadata[p.tensor])) for p in pieces]
        places = self._channel.exports.checked(tensors, key=pieces[0].tensor)
        if places is not None:
            size = sum(piece.num_bytes for piece in pieces)
            if len(self._places) + len(places) > MAX_TENSORS or self._bytes + size > self._most:
                self._flush()
            self._tensors += tensors
            self._places += places
            self._bytes += size
            # what was made for this pass alone is held as well, so there may be a bucket of it
            temporary = int(getattr(self._iterator, "temporary_bytes", 0)) - self._temporary
            if self._bytes >= self._most or temporary >= self._size:
                self._flush()
            return
        self._flush()
        if self._channel.form == "direct":
            names = [metadata[p.tensor].name for p in pieces]
            first = next(
                name
                for name, tensor in zip(names, tensors, strict=True)
                if self._channel.exports.place(tensor) is None
            )
            raise ContractError(
                f"ipc: {first!r} cannot be read in place (another device, or memory that CUDA IPC cannot "
                "share), and form='direct' allows nothing else",
                name=first,
            )
        named = [(metadata[p.tensor].name, t) for p, t in zip(pieces, tensors, strict=True)]
        self._staged(bucket, pieces, iter(named))

    def _flush(self) -> None:
        """Publish what was gathered."""
        tensors, places = self._tensors, self._places
        self._tensors, self._places, self._bytes = [], [], 0
        self._temporary = int(getattr(self._iterator, "temporary_bytes", 0))
        if places:
            first, slot = self._next, self._slot()
            self._next += len(places)
            self._publish(Frame(first, 0, places), slot, tensors)

    def _staged(
        self,
        bucket: Bucket,
        pieces: tuple[Piece, ...],
        tensors: Iterator[tuple[str, torch.Tensor]],
    ) -> None:
        metadata = self._layout.metadata
        if bucket.alone:
            for piece in pieces:
                tensor = next_tensor(tensors, metadata[piece.tensor])
                if piece.num_bytes:
                    self._in_parts(piece, tensor)
                else:
                    self._publish(Frame(piece.tensor, 0, [_NOWHERE]), self._slot(), None)
                self._next += 1
            return
        slot = self._slot()
        buffer, (export, base) = self._buffer()
        views = self._layout.views(bucket, buffer)
        at = pieces[0].tensor - bucket.pieces[0].tensor
        places = []
        for offset, piece in enumerate(pieces):
            tensor = next_tensor(tensors, metadata[piece.tensor])
            if piece.num_bytes:
                views[at + offset][1].copy_(tensor)
            place = (export, base + piece.offset_bytes) if piece.num_bytes else _NOWHERE
            places.append(place)
        self._publish(Frame(pieces[0].tensor, 0, places), slot, None)
        self._next += len(pieces)

    def _in_parts(self, piece: Piece, tensor: torch.Tensor) -> None:
        flat = as_bytes(plain(tensor))
        for start in range(0, piece.num_bytes, self._size):
            part = flat[start : start + self._size]
            slot = self._slot()
            buffer, place = self._buffer()
            buffer[: part.numel()].copy_(part)
            frame = Frame(piece.tensor, 0, [place], part=(start, part.numel()))
            self._publish(frame, slot, flat)

    def _slot(self) -> torch.Tensor:
        """The ring's next slot: whatever was published in it before, every worker is done with."""
        channel = self._channel
        while True:
            slot = channel.ring.slot()
            channel.held[channel.ring.turn] = None
            if not channel.exports.more_news:
                return slot
            self._publish(Frame(self._next, 0, []), slot, None)  # more than one frame can announce

    def _buffer(self) -> tuple[torch.Tensor, tuple[int, int]]:
        """The staging buffer that goes with the slot, and its place."""
        channel = self._channel
        while len(channel.staging) < SLOTS:
            channel.staging.append(channel.device.allocate(align(self._size)))
        buffer = channel.staging[channel.ring.turn]
        places = channel.exports.checked([buffer])
        assert places is not None  # our own memory can always be exported
        return buffer, places[0]

    def _publish(self, frame: Frame, slot: torch.Tensor, hold: Any) -> None:
        channel = self._channel
        turn = channel.ring.turn
        frame.event = turn if channel.events[turn].record() else NO_EVENT
        frame.opens, frame.closes = channel.exports.take_news()
        channel.held[turn] = hold  # until every worker has acknowledged
        data = torch.frombuffer(bytearray(frame.encode()), dtype=torch.uint8)
        slot[: data.numel()].copy_(data)
        channel.ring.publish()


class Reader:
    """One round, from frames into `load_weights`."""

    def __init__(
        self,
        device: Device,
        imports: Imports,
        events: list[Ready],
        layout: Layout,
        load_weights: LoadWeights,
        bucket_size_bytes: int,
    ) -> None:
        self._device, self._imports, self._events = device, imports, events
        self._size = bucket_size_bytes
        self._layout, self._load = layout, load_weights
        self._next = 0
        self._part: tuple[torch.Tensor, bool, int] | None = None

    @property
    def complete(self) -> bool:
        return self._next == len(self._layout.metadata)

    def take(self, frame: Frame) -> None:
        """Queue the copies of one frame."""
        count = len(frame.places)
        if frame.first != self._next or self._next + count > len(self._layout.metadata):
            raise ContractError(
                f"ipc: the sender's frame begins at tensor {frame.first}, {self._next} is next"
            )
        self._imports.news(frame, self._device.settle)
        if self._events and frame.event != NO_EVENT:
            if frame.event >= len(self._events):
                raise ContractError(f"ipc: the sender has no event {frame.event}")
            # no deadline: the stream waits, not this thread
            self._events[frame.event].wait()
        if frame.part is not None:
            self._take_part(frame, *frame.part)
            return
        views = self._imports.views(frame, self._view)
        self._next += count
        if not views:
            return
        if getattr(self._load, "copies_only", False):
            self._load(views)
            return
        chunk: list[tuple[str, torch.Tensor]] = []
        size = 0
        for name, view in views:  # each its own memory, and a bucket of that at a time
            if chunk and size + view.nbytes > self._size:
                self._load(chunk)
                chunk, size = [], 0
            chunk.append((name, view.clone()))
            size += view.nbytes
        self._load(chunk)

    def _view(self, index: int, place: tuple[int, int]) -> tuple[str, torch.Tensor]:
        meta = self._layout.metadata[index]
        memory = self._imports.memory(place, meta.num_bytes)
        return meta.name, view_piece(Piece(index, 0, meta.num_bytes, 0), meta, memory)

    def _take_part(self, frame: Frame, start: int, length: int) -> None:
        meta = self._layout.metadata[frame.first]
        if self._part is None:
            place = landing_for(self._load, meta.name, self._device.torch_device)
            target = (
                place
                if place is not None
                else torch.empty(
                    meta.num_bytes, dtype=torch.uint8, device=self._device.torch_device
                )
            )
            self._part = (target, place is not None, 0)
        target, landed, done = self._part
        if start != done or not length or start + length > meta.num_bytes:
            raise ContractError(
                f"ipc: bytes {start} to {start + length} of {meta.name!r} are not next"
            )
        with torch.no_grad():
            target[start : start + length].copy_(self._imports.memory(frame.places[0], length))
        self._part = (target, landed, start + length)
        progress = getattr(self._load, "progress", None)
        if progress is not None:
            progress(0)
        if start + length < meta.num_bytes:
            return
        self._part = None
        self._next += 1
        if landed:
            self._load.landed(meta.name)  # type: ignore[attr-defined]
        else:
            whole = Piece(frame.first, 0, meta.num_bytes, 0)
            self._load([(meta.name, view_piece(whole, meta, target))])
