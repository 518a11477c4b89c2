from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayxfer import ParamMeta
from rayxfer.engines.collective import fill
from rayxfer.packing import (
    ALIGNMENT_BYTES,
    Bucket,
    BucketPlan,
    Layout,
    align,
    as_bytes,
    plain,
    plan_buckets,
    unpack,
    view_piece,
)
from tests.helpers import POISON, raw_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
]

LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda t: t,
    "0-d": lambda t: t[0, 1, 2, 3],
    "zero-size": lambda t: t[:, :0],
    "transposed": lambda t: t.transpose(1, 3),
    "strided": lambda t: t[:, :, ::2, ::3],
    "expanded": lambda t: t[:, :1].expand(-1, 4, -1, -1),
    "expanded 0-d": lambda t: t[0, 0, 0, 1].expand(3, 2),
    "one of a stride": lambda t: t[0, 1, 1::2, 3][:1],
    "one of many strides": lambda t: t[:, :, ::2, ::3][1:, 1:2, 1:, :1],
    "none of a stride": lambda t: t[0, 1, 1::2, 3][:0],
    "offset": lambda t: t[1:, 2:, 1:, 3:],
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
}


def random_base(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """(2, 3, 4, 5) of random bits: NaNs with payloads, infinities, denormals and all."""
    count = 2 * 3 * 4 * 5
    generator = torch.Generator().manual_seed(seed)
    high = 2 if dtype is torch.bool else 256
    data = torch.randint(0, high, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype).view(2, 3, 4, 5)


def meta_of(name: str, tensor: torch.Tensor) -> ParamMeta:
    return ParamMeta(name, tensor.dtype, tuple(tensor.shape))


# --- the plan -------------------------------------------------------------------------------


def check_plan(metadata: list[ParamMeta], size: int, plan: BucketPlan) -> None:
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    # every tensor exactly once, whole, in order
    assert [piece.tensor for piece in pieces] == list(range(len(metadata)))
    assert [piece.num_bytes for piece in pieces] == [meta.num_bytes for meta in metadata]
    assert all(piece.start_bytes == 0 for piece in pieces)
    assert plan.num_bytes == sum(meta.num_bytes for meta in metadata)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    largest = max((meta.num_bytes for meta in metadata), default=0)
    assert plan.max_bucket_bytes == max((b.num_bytes for b in plan.buckets), default=0)
    assert plan.max_bucket_bytes <= max(size, largest)
    for bucket in plan.buckets:
        assert bucket.pieces
        filled = [piece for piece in bucket.pieces if piece.num_bytes]
        # aligned, no overlap, nothing past the end, no more padding than alignment needs
        assert all(piece.offset_bytes % ALIGNMENT_BYTES == 0 for piece in filled)
        ends = [piece.offset_bytes + piece.num_bytes for piece in filled]
        for end, following in zip(ends, filled[1:], strict=False):
            assert end <= following.offset_bytes < end + ALIGNMENT_BYTES
        assert bucket.num_bytes == (ends[-1] if ends else 0)
        if filled:
            assert filled[0].offset_bytes == 0
        if bucket.num_bytes > size:
            assert len(filled) == 1
        for piece in bucket.pieces:
            if not piece.num_bytes:
                assert 0 <= piece.offset_bytes <= bucket.num_bytes
    for left, right in pairwise(plan.buckets):
        # greedy: what opened a bucket did not fit into the one before
        first = next(piece for piece in right.pieces if piece.num_bytes)
        assert left.num_bytes
        assert align(left.num_bytes) + first.num_bytes > size


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
metadata_lists = st.lists(
    st.builds(lambda d, s: (d, s), st.sampled_from(DTYPES), shapes), max_size=40
).map(lambda found: [ParamMeta(f"t{i}", d, s) for i, (d, s) in enumerate(found)])


@given(metadata_lists, st.integers(1, 6000))
@settings(max_examples=300)
def test_any_plan_holds_the_rules(metadata: list[ParamMeta], size: int) -> None:
    plan = plan_buckets(metadata, size)
    check_plan(metadata, size, plan)
    assert plan_buckets(tuple(metadata), size) == plan  # both sides get the same one


@given(
    st.lists(st.integers(0, 1 << 34), max_size=30),
    st.integers(1, 1 << 35),
)
@settings(max_examples=200)
def test_any_plan_of_large_tensors_holds_the_rules(sizes: list[int], size: int) -> None:
    metadata = [ParamMeta(f"t{i}", torch.uint8, (count,)) for i, count in enumerate(sizes)]
    check_plan(metadata, size, plan_buckets(metadata, size))


@given(metadata_lists, st.integers(1, 6000), st.integers(0, 6000))
@settings(max_examples=300)
def test_long_tensors_travel_alone(metadata: list[ParamMeta], size: int, most: int) -> None:
    plan = plan_buckets(metadata, size, most)
    pieces = [piece for bucket in plan.buckets for piece in bucket.pieces]
    assert [piece.tensor for piece in pieces] == list(range(len(metadata)))
    for bucket in plan.buckets:
        filled = [piece.num_bytes for piece in bucket.pieces if piece.num_bytes]
        assert bucket.alone == any(count > min(most, size) for count in filled)
        if bucket.alone:
            assert filled == [bucket.num_bytes]
        else:
            assert bucket.num_bytes <= size


def test_nothing_gives_no_bucket() -> None:
    assert plan_buckets([], 1) == BucketPlan((), 0, 0)


def offsets(plan: BucketPlan) -> list[list[tuple[int, int, int]]]:
    return [[(p.tensor, p.offset_bytes, p.num_bytes) for p in b.pieces] for b in plan.buckets]


def uint8(*sizes: int) -> list[ParamMeta]:
    return [ParamMeta(f"t{i}", torch.uint8, (size,)) for i, size in enumerate(sizes)]


def test_padding_counts() -> None:
    # 1 byte, then 64: at offset 64, so 128 in all
    assert offsets(plan_buckets(uint8(1, 64), 128)) == [[(0, 0, 1), (1, 64, 64)]]
    assert offsets(plan_buckets(uint8(1, 64), 127)) == [[(0, 0, 1)], [(1, 0, 64)]]


def test_an_exact_fit_is_no_overflow() -> None:
    assert offsets(plan_buckets(uint8(64, 64, 64), 192)) == [
        [(0, 0, 64), (1, 64, 64), (2, 128, 64)]
    ]


def test_a_large_tensor_travels_alone() -> None:
    assert offsets(plan_buckets(uint8(10, 1000, 10, 10), 100)) == [
        [(0, 0, 10)],
        [(1, 0, 1000)],
        [(2, 0, 10), (3, 64, 10)],
    ]


def test_empty_tensors_take_no_room() -> None:
    assert offsets(plan_buckets(uint8(0, 1000, 0, 7, 0), 10)) == [
        [(0, 0, 0), (1, 0, 1000), (2, 1000, 0)],
        [(3, 0, 7), (4, 7, 0)],
    ]
    plan = plan_buckets(uint8(0, 0), 1)
    assert offsets(plan) == [[(0, 0, 0), (1, 0, 0)]]
    assert plan.max_bucket_bytes == plan.num_bytes == 0


def test_a_bucket_of_one_byte_means_one_tensor_each() -> None:
    assert [len(b.pieces) for b in plan_buckets(uint8(1, 2, 3), 1).buckets] == [1, 1, 1]


@pytest.mark.parametrize("large", [(1 << 31) + 1, (1 << 32) + 1])
def test_offsets_past_31_and_32_bits_are_exact(large: int) -> None:
    tensors = {
        "before": torch.empty(3, dtype=torch.float32, device="meta"),
        "large": torch.empty(large, dtype=torch.uint8, device="meta"),
        "after": torch.empty((2, 5), dtype=torch.complex128, device="meta"),
        "last": torch.empty((), dtype=torch.bool, device="meta"),
    }
    metadata = [meta_of(name, tensor) for name, tensor in tensors.items()]
    start = 64 + -(-large // 64) * 64
    plan = plan_buckets(metadata, 1 << 33)
    assert offsets(plan) == [[(0, 0, 12), (1, 64, large), (2, start, 160), (3, start + 192, 1)]]
    assert plan.max_bucket_bytes == start + 193
    assert plan.num_bytes == 12 + large + 160 + 1
    # and the views of a buffer of that size lie where the plan says
    (bucket,) = plan.buckets
    buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device="meta")
    for piece, (name, found) in zip(bucket.pieces, unpack(bucket, metadata, buffer), strict=True):
        expected = tensors[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.storage_offset() * found.element_size() == piece.offset_bytes
    # smaller buckets: it travels alone
    assert offsets(plan_buckets(metadata, 1 << 20)) == [
        [(0, 0, 12)],
        [(1, 0, large)],
        [(2, 0, 160), (3, 192, 1)],
    ]


def test_many_elements_of_many_bytes() -> None:
    metadata = [ParamMeta(f"t{i}", torch.float64, ((1 << 31) + 1,)) for i in range(5)]
    each = 8 * ((1 << 31) + 1)
    step = align(each)
    assert offsets(plan_buckets(metadata, 1 << 40)) == [[(i, i * step, each) for i in range(5)]]


# --- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_bytes_of_any_tensor(
    dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = layout(random_base(dtype))
    before = raw_bytes(tensor)
    flat = as_bytes(plain(tensor))
    assert (flat.dtype, flat.dim()) == (torch.uint8, 1)
    assert flat.numpy().tobytes() == before
    assert raw_bytes(tensor) == before


def pack(
    bucket: Bucket,
    metadata: list[ParamMeta],
    tensors: list[torch.Tensor],
    size: int,
    buffer: torch.Tensor,
) -> None:
    """As the engines do it."""
    pairs = [(metadata[piece.tensor].name, tensors[piece.tensor]) for piece in bucket.pieces]
    fill(Layout(metadata, size), bucket, iter(pairs), buffer)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [1, 100, 1000, 1 << 20])
def test_pack_then_unpack_is_the_same_bytes(
    layout: Callable[[torch.Tensor], torch.Tensor], size: int
) -> None:
    tensors = [layout(random_base(dtype, seed)) for seed, dtype in enumerate(DTYPES)]
    expected = [raw_bytes(tensor) for tensor in tensors]
    metadata = [meta_of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    found: list[tuple[str, torch.Tensor]] = []
    for bucket in plan_buckets(metadata, size).buckets:
        buffer = torch.full((bucket.num_bytes,), POISON, dtype=torch.uint8)
        pack(bucket, metadata, tensors, size, buffer)
        found += unpack(bucket, metadata, buffer)
    assert [name for name, _ in found] == [meta.name for meta in metadata]
    for meta, (_, tensor), data in zip(metadata, found, expected, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
        assert raw_bytes(tensor) == data
    assert [raw_bytes(tensor) for tensor in tensors] == expected


@given(st.data(), st.integers(1, 700))
@settings(max_examples=60)
def test_any_mixture_arrives(data: st.DataObject, size: int) -> None:
    kinds = st.lists(
        st.tuples(st.sampled_from(DTYPES), st.sampled_from(sorted(LAYOUTS)), st.integers(0, 99)),
        max_size=12,
    )
    tensors = [LAYOUTS[layout](random_base(d, seed)) for d, layout, seed in data.draw(kinds)]
    metadata = [meta_of(f"t{i}", tensor) for i, tensor in enumerate(tensors)]
    plan = plan_buckets(metadata, size)
    check_plan(metadata, size, plan)
    position = 0
    for bucket in plan.buckets:
        buffer = torch.full((bucket.num_bytes,), POISON, dtype=torch.uint8)
        pack(bucket, metadata, tensors, size, buffer)
        for name, found in unpack(bucket, metadata, buffer):
            assert name == metadata[position].name
            assert raw_bytes(found) == raw_bytes(tensors[position])
            position += 1
    assert position == len(tensors)


def test_pack_writes_its_pieces_only() -> None:
    tensors = [torch.arange(3, dtype=torch.uint8), torch.arange(5, dtype=torch.uint8)]
    metadata = uint8(3, 5)
    (bucket,) = plan_buckets(metadata, 100).buckets
    buffer = torch.full((bucket.num_bytes + 4,), POISON, dtype=torch.uint8)
    pack(bucket, metadata, tensors, 100, buffer)
    padding = bytes([POISON])
    assert raw_bytes(buffer) == b"\0\1\2" + padding * 61 + b"\0\1\2\3\4" + padding * 4


def test_unpack_gives_views_not_copies() -> None:
    metadata = [ParamMeta("x", torch.float32, (2, 3))]
    (bucket,) = plan_buckets(metadata, 100).buckets
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    ((_, found),) = unpack(bucket, metadata, buffer)
    found[1, 2] = 1.0
    assert raw_bytes(buffer)[-4:] == struct.pack("=f", 1.0)


def test_a_layout_is_the_plan_and_remembers_its_views() -> None:
    metadata = [*uint8(3, 0, 5, 100), ParamMeta("x", torch.float32, (2, 3))]
    layout = Layout(metadata, 64)
    assert layout.metadata == tuple(metadata)
    assert layout.plan == plan_buckets(metadata, 64)
    buffers = [torch.arange(100, dtype=torch.uint8), torch.arange(100, 200, dtype=torch.uint8)]
    for buffer in (*buffers, *buffers):
        for bucket in layout.plan.buckets:
            found = layout.views(bucket, buffer[: bucket.num_bytes])
            expected = unpack(bucket, metadata, buffer[: bucket.num_bytes])
            assert [name for name, _ in found] == [name for name, _ in expected]
            for (_, view), (_, other) in zip(found, expected, strict=True):
                assert (view.dtype, view.shape) == (other.dtype, other.shape)
                assert view.data_ptr() == other.data_ptr()
                assert raw_bytes(view) == raw_bytes(other)
            assert layout.views(bucket, buffer[: bucket.num_bytes]) is found
        buffer.add_(7)  # views show what the buffer holds now


def test_an_empty_tensor_is_none_of_the_buffer() -> None:
    metadata = [ParamMeta("full", torch.int8, (7,)), ParamMeta("x", torch.int64, (0, 4))]
    (bucket,) = plan_buckets(metadata, 100).buckets
    buffer = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    found = view_piece(bucket.pieces[1], metadata[1], buffer)
    assert (found.dtype, found.shape) == (torch.int64, (0, 4))


def test_lazy_bits_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, -3 - 4j])
    assert as_bytes(plain(tensor.conj())).numpy().tobytes() == struct.pack("=4f", 1, -2, -3, 4)
    assert as_bytes(plain(tensor.conj().imag)).numpy().tobytes() == struct.pack("=2f", -2, 4)
    assert raw_bytes(tensor) == struct.pack("=4f", 1, 2, -3, -4)


def test_plain_is_itself_where_it_can_be() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert plain(tensor).data_ptr() == tensor.data_ptr()
    assert plain(tensor.t()).data_ptr() != tensor.data_ptr()


def test_a_leaf_that_requires_grad_is_read_and_left() -> None:
    leaf = torch.nn.Parameter(torch.arange(4.0))
    metadata = [meta_of("x", leaf)]
    (bucket,) = plan_buckets(metadata, 100).buckets
    buffer = torch.empty(16, dtype=torch.uint8)
    pack(bucket, metadata, [leaf], 100, buffer)
    assert raw_bytes(buffer) == struct.pack("=4f", 0, 1, 2, 3)
    assert leaf.requires_grad
    assert not plain(leaf).requires_grad


@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (2**40 + 1, 2**40 + 64)]
)
def test_align(value: int, expected: int) -> None:
    assert align(value) == expected
