"""From metadata to buckets to offsets. Pure: no device, no communication.

A bucket is the wire unit. Sender and receiver compute the same plan from the same metadata and
bucket size, so nothing but bytes has to travel. All sizes are Python ints, so offsets are as wide
as they need to be.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayxfer.copying import streams
from rayxfer.metadata import ParamMeta

__all__ = ["ALIGNMENT_BYTES", "Bucket", "BucketPlan", "Piece", "as_bytes", "plan_buckets"]

ALIGNMENT_BYTES = 64
"""Suits every dtype (complex128 needs 16) and keeps copies on cache-line boundaries."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of one tensor in one bucket. Whole tensors today; a slice has a start and fewer bytes."""

    tensor: int
    start_bytes: int
    num_bytes: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """One wire unit: `num_bytes` long, padding included.

    `alone`: only one of its tensors has any bytes, and it is one that is not to be packed with others.
    """

    index: int
    num_bytes: int
    pieces: tuple[Piece, ...]
    alone: bool = False


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """All buckets of one metadata list.

    Attributes:
        buckets: in metadata order; every tensor lies in exactly one.
        num_bytes: payload, without padding.
        max_bucket_bytes: the longest bucket (at most max(bucket size, largest tensor)).
    """

    buckets: tuple[Bucket, ...]
    num_bytes: int
    max_bucket_bytes: int


def align(offset_bytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """The next multiple of `alignment`."""
    return -(-offset_bytes // alignment) * alignment


def plan_buckets(
    metadata: Sequence[ParamMeta], bucket_size_bytes: int, packed_bytes: int | None = None
) -> BucketPlan:
    """Fill buckets in order with whole tensors; one longer than `packed_bytes` (None: than a bucket)
    travels alone.

    A bucket holds at most `bucket_size_bytes`, padding included, unless it is such a tensor's. Zero-size
    tensors take no room. An empty list gives no buckets.
    """
    most = bucket_size_bytes if packed_bytes is None else min(packed_bytes, bucket_size_bytes)
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = total = 0
    alone = False

    def close() -> None:
        nonlocal pieces, end
        if pieces:
            buckets.append(Bucket(len(buckets), end, tuple(pieces), alone))
        pieces, end = [], 0

    for index, meta in enumerate(metadata):
        num_bytes = meta.num_bytes
        offset = align(end)
        large = num_bytes > most
        if end and num_bytes and (large or alone or offset + num_bytes > bucket_size_bytes):
            close()
            offset, alone = 0, False
        alone |= large
        pieces.append(Piece(index, 0, num_bytes, offset if num_bytes else end))
        end = offset + num_bytes if num_bytes else end
        total += num_bytes
    close()
    return BucketPlan(tuple(buckets), total, max((b.num_bytes for b in buckets), default=0))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a flat uint8 view (any dtype, 0-d and zero-size included).

    The tensor must be contiguous and without a lazy conjugate or negative bit; see `plain`.
    """
    flat = tensor.detach().reshape(-1)
    if flat.numel() < 2:  # contiguous whatever its stride, but only a stride of 1 can be viewed
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous and with lazy bits resolved: itself where that already holds."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def view_piece(piece: Piece, meta: ParamMeta, buffer: torch.Tensor) -> torch.Tensor:
    """The tensor at its place in `buffer`: a view, which lives as long as the buffer's content."""
    if not piece.num_bytes:
        return torch.empty(meta.shape, dtype=meta.dtype, device=buffer.device)
    end = piece.offset_bytes + piece.num_bytes
    return buffer[piece.offset_bytes : end].view(meta.dtype).view(meta.shape)


class Packed:
    """A bucket's tensors by their fields, for handling them without looking at each.

    Attributes:
        first: index of the first in the metadata; they are neighbours.
        names, offsets, sizes: one entry per tensor; where in the bucket and how long, in bytes.
        count: how many of them have any bytes.
    """

    __slots__ = ("_largest", "count", "first", "names", "offsets", "sizes")

    def __init__(self, bucket: Bucket, metadata: Sequence[ParamMeta]) -> None:
        pieces = bucket.pieces
        self.first = pieces[0].tensor
        self.names = tuple([metadata[piece.tensor].name for piece in pieces])
        self.offsets = [piece.offset_bytes for piece in pieces]
        self.sizes = [piece.num_bytes for piece in pieces]
        self.count = sum(1 for size in self.sizes if size)
        self._largest = max(self.sizes)

    def until(self, start: int, most_bytes: int) -> int:
        """The first from `start` on that is longer than this, or the end."""
        sizes = self.sizes
        if self._largest <= most_bytes:
            return len(sizes)
        return next((i for i in range(start, len(sizes)) if sizes[i] > most_bytes), len(sizes))


class Layout:
    """Metadata with its bucket plan, and the views of buffers that are used round after round.

    Making a view costs more than copying a small tensor, so those of a channel's few long-lived
    buffers are kept.
    """

    def __init__(
        self,
        metadata: Sequence[ParamMeta],
        bucket_size_bytes: int,
        packed_bytes: int | None = None,
    ) -> None:
        self.metadata = tuple(metadata)
        self.plan = plan_buckets(self.metadata, bucket_size_bytes, packed_bytes)
        self.packed = [Packed(bucket, self.metadata) for bucket in self.plan.buckets]
        """By bucket."""
        sizes = (bucket.num_bytes for bucket in self.plan.buckets)
        self.shared_bytes = max((n for n in sizes if n <= bucket_size_bytes), default=0)
        """The largest bucket but for those too long for one. Buffers have this size from the start:
        one that grew would stay beside its successor, for the sake of its views."""
        self.streams = streams(self.plan.num_bytes)
        """Whether copies to where the weights stay should go past the caches."""
        self.starts: list[int] = []
        """Where each bucket begins, in a file that holds all of them."""
        self.file_bytes = 0
        for bucket in self.plan.buckets:
            self.starts.append(self.file_bytes)
            self.file_bytes = align(self.file_bytes + bucket.num_bytes)
        self._views: dict[tuple[int, int], list[tuple[str, torch.Tensor]]] = {}

    def in_file(self, bucket: Bucket) -> array[int]:
        """The offsets of the bucket's tensors with any bytes, in a file that holds all buckets."""
        packed, start = self.packed[bucket.index], self.starts[bucket.index]
        sized = zip(packed.offsets, packed.sizes, strict=True)
        return array("Q", [start + offset for offset, size in sized if size])

    def views(self, bucket: Bucket, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """`unpack`, remembered by the buffer's address: only for buffers that outlive this."""
        key = (bucket.index, buffer.data_ptr())
        found = self._views.get(key)
        if found is None:
            found = self._views[key] = unpack(bucket, self.metadata, buffer)
        return found


def unpack(
    bucket: Bucket, metadata: Sequence[ParamMeta], buffer: torch.Tensor
) -> list[tuple[str, torch.Tensor]]:
    """The bucket's tensors as views of `buffer`."""
    return [
        (metadata[p.tensor].name, view_piece(p, metadata[p.tensor], buffer)) for p in bucket.pieces
    ]
