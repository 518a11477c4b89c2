from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
import xxhash

from rayxfer.digest import digest, digest_many
from tests.helpers import raw_bytes
from tests.test_packing import DTYPES, LAYOUTS, random_base


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_xxh3_of_the_dense_bytes(
    dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = layout(random_base(dtype))
    assert digest(tensor) == xxhash.xxh3_64_intdigest(raw_bytes(tensor))


def test_known_values() -> None:
    assert digest(torch.empty(0)) == 0x2D06800538D394C2  # of no bytes at all
    assert digest(torch.tensor(list(b"rayxfer"), dtype=torch.uint8)) == xxhash.xxh3_64_intdigest(
        b"rayxfer"
    )


def test_strides_do_not_matter_and_values_do() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    assert digest(tensor.t()) != digest(tensor)
    changed = tensor.clone()
    changed[2, 3] = -11
    assert digest(changed) != digest(tensor)


def test_every_single_bit_counts() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    found = {digest(tensor)}
    for index in range(100):
        for bit in range(8):
            tensor[index] = 1 << bit
            found.add(digest(tensor))
        tensor[index] = 0
    assert len(found) == 801


def test_bits_that_compare_equal_differ() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    nans = struct.pack("=2I", 0x7FC00000, 0x7FC00001)
    a, b = torch.frombuffer(bytearray(nans), dtype=torch.float32).split(1)
    assert digest(a) != digest(b)


def test_lazy_bits_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j])
    assert digest(tensor.conj()) == digest(torch.tensor([1 - 2j]))


def test_a_parameter_and_an_inference_tensor_can_be_read() -> None:
    values = [1.0, 2.0]
    expected = digest(torch.tensor(values))
    assert digest(torch.nn.Parameter(torch.tensor(values))) == expected
    with torch.inference_mode():
        inferred = torch.tensor(values)
    assert digest(inferred) == expected


@pytest.mark.parametrize("count", [0, 1, 2, 5])
@pytest.mark.parametrize("num_bytes", [3, 5 << 20])
def test_many_are_in_order(count: int, num_bytes: int) -> None:
    # both ways: small ones in this thread, large ones on two
    tensors = [torch.full((num_bytes + i,), i, dtype=torch.uint8) for i in range(count)]
    assert digest_many(iter(tensors)) == [digest(tensor) for tensor in tensors]
