"""What goes through a ring: the buckets of one round, as frames.

A bucket that fits a slot is one frame; a larger tensor, which travels alone, is cut into several. Used
between a sender and the workers of its host (`shm`), and wherever bytes fan out on one host.
"""

from __future__ import annotations

from collections.abc import Iterator

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
from rayxfer.packing import Layout, as_bytes, plain

__all__ = ["receive_frames", "send_frames"]

_NOTHING = torch.empty(0, dtype=torch.uint8)


def send_frames(
    ring: RingWriter, layout: Layout, iterator: Iterator[tuple[str, torch.Tensor]]
) -> None:
    """Write one round into the ring; returns once every reader is done with it.

    Raises:
        TransferError: the ring was aborted.
    """
    for bucket in layout.plan.buckets:
        if bucket.num_bytes <= ring.slot_bytes:
            fill(layout, bucket, iterator, ring.slot() if bucket.num_bytes else _NOTHING)
            if bucket.num_bytes:
                ring.publish()
            continue
        for piece in bucket.pieces:
            tensor = next_tensor(iterator, layout.metadata[piece.tensor])
            if not piece.num_bytes:
                continue
            # `plain` makes another tensor of one that is not dense: then there is nothing to take
            take = getattr(iterator, "take", None) if is_memory(tensor) else None
            flat = as_bytes(plain(tensor)).cpu()
            for start in range(0, flat.numel(), ring.slot_bytes):
                part = flat[start : start + ring.slot_bytes]
                (take or copy_bytes)(ring.slot().data_ptr(), part.data_ptr(), part.numel())
                ring.publish()
    expect_end(iterator)
    ring.drain()


def receive_frames(ring: RingReader, layout: Layout, load_weights: LoadWeights) -> None:
    """Read one round from the ring and hand it over.

    Raises:
        TransferError: the ring was aborted.
    """
    landing = getattr(load_weights, "landing", None)
    progress = getattr(load_weights, "progress", None)
    for bucket in layout.plan.buckets:
        if not bucket.num_bytes:
            deliver_alone(layout, bucket, None, load_weights, landed=False)
            continue
        if bucket.num_bytes <= ring.slot_bytes:
            deliver(layout, bucket, ring.slot(), load_weights)
            ring.release()
            continue
        meta = layout.metadata[next(p.tensor for p in bucket.pieces if p.num_bytes)]
        place = landing(meta.name) if landing is not None else None
        if place is not None and place.device.type != "cpu":
            place = None
        target = place if place is not None else torch.empty(bucket.num_bytes, dtype=torch.uint8)
        for start in range(0, bucket.num_bytes, ring.slot_bytes):
            part = target[start : start + ring.slot_bytes]
            slot = ring.slot()
            copy_bytes(part.data_ptr(), slot.data_ptr(), part.numel())
            ring.release()
            if progress is not None:
                progress(0)
        deliver_alone(layout, bucket, target, load_weights, landed=place is not None)
