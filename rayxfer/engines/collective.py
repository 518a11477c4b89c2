"""Packed broadcast from one sender to all workers of a channel, over any process group.

Shared by `gloo` (CPU) and `nccl`. What differs between devices is a `Group`: how an operation is
started, waited for and broken off. Two buckets are in flight: the next is packed (or received) while
this one travels. How a group comes together is in `broadcast.py`.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import LoadWeights, WeightTransferUpdateInfo
from rayxfer.copying import copy_many, is_memory
from rayxfer.errors import ConfigError, ContractError
from rayxfer.memfile import map_for_any_thread
from rayxfer.metadata import ParamMeta, metadata_from_wire
from rayxfer.packing import Bucket, Layout, as_bytes, plain, unpack, view_piece

__all__ = [
    "Group",
    "Layouts",
    "Staging",
    "TensorsUpdateInfo",
    "deliver",
    "deliver_alone",
    "expect_end",
    "fill",
    "land",
    "landing_for",
    "landing_of",
    "merged_init_info",
    "next_tensor",
    "receive_buckets",
    "send_buckets",
]

IN_FLIGHT = 2


@dataclass
class TensorsUpdateInfo(WeightTransferUpdateInfo):
    """What one round carries, for every built-in engine.

    Attributes:
        names, dtype_names, shapes: one entry per tensor, in the order of the stream; dtypes by their
            bare names ("bfloat16").
    """

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Group(ABC):
    """A process group whose rank 0 is the sender."""

    device: torch.device

    @abstractmethod
    def start(self, buffer: torch.Tensor) -> Any:
        """Begin to broadcast `buffer` (flat uint8) from rank 0; returns something to wait for.

        On a device, after everything that the calling thread's current stream has queued: the packing
        of this buffer on the sender, the last reading of it on a worker. The buffer must stay as it is
        until `wait` has returned.
        """

    @abstractmethod
    def wait(self, work: Any) -> None:
        """Return when done; raise when it failed or the group was aborted. On a device, the current
        stream comes after it from then on."""

    def drain(self) -> None:  # noqa: B027 - nothing is left to wait for where work is synchronous
        """Return when all that the current stream has queued is done; raise as `wait`."""

    def settle(self) -> bool:
        """After `abort`: return once no operation writes to its buffer any more. False: one still might."""
        return True

    @abstractmethod
    def abort(self) -> None:
        """Make every pending and later operation raise soon. From any thread."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Safe to call twice."""


class Layouts:
    """The layout of a channel's update infos: the same one as long as the same tensors are sent."""

    def __init__(self, bucket_size_bytes: int, packed_bytes: int | None = None) -> None:
        self._sizes = bucket_size_bytes, packed_bytes
        self.clear()

    def clear(self) -> None:
        """Forget it, and with it the views of buffers that it keeps."""
        self._wire: dict[str, Any] = {}
        self._layout = Layout((), *self._sizes)

    def file_bytes(self, metadata: Sequence[ParamMeta]) -> int:
        """How long a file is that holds all of these."""
        return Layout(metadata, *self._sizes).file_bytes

    def get(self, update_info: Any) -> Layout:
        """For a built-in engine's update info (a dict, or the typed dataclass).

        Raises:
            ContractError: it does not describe tensors.
        """
        keys = ("names", "dtype_names", "shapes")
        wire = (
            {k: update_info.get(k) for k in keys}
            if isinstance(update_info, dict)
            else {k: getattr(update_info, k) for k in keys}
        )
        if wire != self._wire:
            self._layout = Layout(metadata_from_wire(wire), *self._sizes)
            self._wire = wire
        return self._layout


def next_tensor(iterator: Iterator[tuple[str, torch.Tensor]], meta: ParamMeta) -> torch.Tensor:
    """The next tensor of the stream, which must be the one that the metadata names next.

    Raises:
        ContractError: it is another, or the stream has ended.
    """
    try:
        name, tensor = next(iterator)
    except StopIteration:
        raise ContractError(f"the stream ended before {meta.name!r}", name=meta.name) from None
    if name != meta.name or tensor.dtype != meta.dtype or tensor.shape != meta.shape:
        raise ContractError(
            f"the stream yielded {name!r} {list(tensor.shape)}, metadata says {meta.name!r} {meta}",
            name=meta.name,
        )
    return tensor


def merged_init_info(own: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """A built-in engine's init info, with the user's extra fields.

    Raises:
        ConfigError: a field of `extra` that the session sets itself, to another value: both sides
            must agree.
    """
    for key, value in extra.items():
        if key in own and own[key] != value:
            raise ConfigError(
                f"init_info[{key!r}]={value!r}, but this session has {own[key]!r}: sender and workers "
                "must agree, so leave it out"
            )
    return {**extra, **own}


class Staging:
    """Buffers that live as long as the channel, so that a steady state allocates nothing."""

    def __init__(self, device: torch.device, count: int = IN_FLIGHT) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None] * count

    def __len__(self) -> int:
        return len(self._buffers)

    def get(self, turn: int, num_bytes: int) -> torch.Tensor:
        slot = turn % len(self._buffers)
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[slot] = _new_buffer(num_bytes, self._device)
        return buffer[:num_bytes]


def _new_buffer(num_bytes: int, device: torch.device) -> torch.Tensor:
    """On a CPU a mapping of its own, which goes back to the system when it is dropped.

    malloc keeps freed buffers of this size in the arena of whichever short-lived thread asked for them:
    a process that opened and closed 500 channels one after another grew from 260 to 440 MiB.
    """
    if device.type == "cpu" and num_bytes > 0:
        with contextlib.suppress(OSError, RuntimeError):  # no memory files here
            file = os.memfd_create("rayxfer-staging")
            try:
                os.ftruncate(file, num_bytes)
                return map_for_any_thread(file, num_bytes)
            finally:
                os.close(file)
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def send_buckets(
    group: Group,
    staging: Staging,
    iterator: Iterator[tuple[str, torch.Tensor]],
    layout: Layout,
) -> None:
    """Sender: pack and broadcast every bucket. Returns when all bytes are out."""
    pending: list[Any] = []
    turn = 0
    metadata = layout.metadata
    for bucket in layout.plan.buckets:
        if bucket.alone:
            # One large tensor travels alone, from where it lies: no staging. Drained at once, since
            # its owner may change it as soon as the next one is asked for.
            for piece in bucket.pieces:
                tensor = plain(next_tensor(iterator, metadata[piece.tensor]))
                if piece.num_bytes:
                    pending.append(group.start(as_bytes(tensor.to(group.device))))
                    while pending:
                        group.wait(pending.pop(0))
            continue
        if len(pending) == IN_FLIGHT:
            group.wait(pending.pop(0))
        buffer = staging.get(turn, layout.shared_bytes)[: bucket.num_bytes]
        fill(layout, bucket, iterator, buffer)
        if bucket.num_bytes:
            pending.append(group.start(buffer))
            turn += 1
    expect_end(iterator)
    while pending:
        group.wait(pending.pop(0))
    group.drain()


def fill(
    layout: Layout,
    bucket: Bucket,
    iterator: Iterator[tuple[str, torch.Tensor]],
    buffer: torch.Tensor,
    *,
    stream: bool = False,
) -> None:
    """Take the bucket's tensors from the iterator and copy them to their places in a kept buffer; with
    `stream` past the caches (see `copying.py`)."""
    on_host = buffer.device.type == "cpu"
    address, pieces, done = buffer.data_ptr(), bucket.pieces, 0
    packed = layout.packed[bucket.index]
    with torch.no_grad():
        while done < len(pieces):
            pack = getattr(iterator, "pack", None) if on_host else None
            if pack is not None and (count := pack(address, packed, done, stream)):
                done += count
                continue
            piece = pieces[done]
            tensor = next_tensor(iterator, layout.metadata[piece.tensor])
            take = getattr(iterator, "take", None) if on_host else None
            if not piece.num_bytes:
                pass
            elif take is not None and is_memory(tensor):
                take(address + piece.offset_bytes, tensor.data_ptr(), piece.num_bytes, stream)
            else:
                _view(layout, bucket, buffer, done).copy_(tensor)
            done += 1


def _view(layout: Layout, bucket: Bucket, buffer: torch.Tensor, at: int) -> torch.Tensor:
    """The place of one tensor in a buffer. Kept for next time on a device, where that counts; a buffer of
    the host may be one that comes and goes (see `frames.send_version`)."""
    if buffer.device.type == "cpu":
        piece = bucket.pieces[at]
        return view_piece(piece, layout.metadata[piece.tensor], buffer)
    return layout.views(bucket, buffer)[at][1]


def expect_end(iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
    """The stream must be over.

    Raises:
        ContractError: it yields one more.
    """
    extra = next(iterator, None)
    if extra is not None:
        raise ContractError(f"the stream yielded {extra[0]!r} after the last name", name=extra[0])


def receive_buckets(
    group: Group,
    staging: Staging,
    layout: Layout,
    load_weights: LoadWeights,
) -> None:
    """Worker: receive every bucket and hand over its tensors, the next one already on its way."""
    buckets = layout.plan.buckets
    started: list[tuple[Bucket, torch.Tensor | None, Any, bool]] = []
    turn = 0

    def start(bucket: Bucket) -> None:
        nonlocal turn
        if not bucket.num_bytes:
            started.append((bucket, None, None, False))
            return
        landing = None
        if bucket.alone:
            landing = landing_of(load_weights, layout, bucket, group.device)
            buffer = (
                landing
                if landing is not None
                else torch.empty(bucket.num_bytes, dtype=torch.uint8, device=group.device)
            )
        else:
            buffer = staging.get(turn, layout.shared_bytes)[: bucket.num_bytes]
            turn += 1
        started.append((bucket, buffer, group.start(buffer), landing is not None))

    ahead = iter(buckets)
    for bucket in ahead:
        start(bucket)
        if len(started) == IN_FLIGHT:
            break
    while started:
        bucket, buffer, work, landed = started[0]
        if work is not None:
            group.wait(work)
        if buffer is not None and not bucket.alone:
            deliver(layout, bucket, buffer, load_weights)
        else:
            deliver_alone(layout, bucket, buffer, load_weights, landed=landed)
        started.pop(0)
        following = next(ahead, None)
        if following is not None:
            start(following)
    group.drain()


def landing_of(
    load_weights: LoadWeights, layout: Layout, bucket: Bucket, device: torch.device
) -> torch.Tensor | None:
    """Where the loader wants the bytes of the one tensor of this bucket that has any (flat uint8), if it
    has such a place on this device."""
    index = next(piece.tensor for piece in bucket.pieces if piece.num_bytes)
    return landing_for(load_weights, layout.metadata[index].name, device)


def landing_for(load_weights: LoadWeights, name: str, device: torch.device) -> torch.Tensor | None:
    """Where the loader wants the bytes of `name` (flat uint8), if it has such a place on this device."""
    find = getattr(load_weights, "landing", None)
    place: torch.Tensor | None = find(name) if find is not None else None
    return place if place is not None and place.device == device else None


def land(
    layout: Layout, bucket: Bucket, base: int, offsets: Sequence[int], load_weights: LoadWeights
) -> bool:
    """Copy a bucket's tensors from host memory (at these offsets from an address) straight to the loader's
    own places. False, and nothing done, where it has not a plain place for every one of them."""
    packed = layout.packed[bucket.index]
    find = getattr(load_weights, "landings", None)
    places = find(packed.names, packed.sizes) if find is not None else None
    if places is None:
        return False
    sources = [base + offset for offset in offsets]
    copy_many(places, sources, packed.sizes, None, stream=layout.streams)
    load_weights.landed_all(packed.names)  # type: ignore[attr-defined]
    return True


def deliver(
    layout: Layout, bucket: Bucket, buffer: torch.Tensor, load_weights: LoadWeights
) -> None:
    """Hand over a bucket in a kept buffer: views where the loader only copies, else its own memory."""
    offsets = layout.packed[bucket.index].offsets
    if buffer.is_cpu and land(layout, bucket, buffer.data_ptr(), offsets, load_weights):
        return
    views = layout.views(bucket, buffer)
    if not getattr(load_weights, "copies_only", False):
        views = [(name, view.clone()) for name, view in views]
    load_weights(views)


def deliver_alone(
    layout: Layout,
    bucket: Bucket,
    buffer: torch.Tensor | None,
    load_weights: LoadWeights,
    *,
    landed: bool,
) -> None:
    """Hand over a bucket whose buffer is nobody else's (or that has no bytes): given away as it is.

    `landed`: the buffer is the loader's own place for the one tensor with bytes.
    """
    if buffer is None:
        buffer = torch.empty(0, dtype=torch.uint8)
    items: list[tuple[str, torch.Tensor]] = []
    for piece, item in zip(bucket.pieces, unpack(bucket, layout.metadata, buffer), strict=True):
        if landed and piece.num_bytes:
            load_weights.landed(item[0])  # type: ignore[attr-defined]
        else:
            items.append(item)
    if items:
        load_weights(items)
