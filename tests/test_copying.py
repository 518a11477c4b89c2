"""Batched copies are of bits, not of values."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from rayxfer.copying import _bits, copy_all, copy_bits
from rayxfer.testing import raw_bytes
from rayxfer.testing.conformance import _DTYPES


def _filled(dtype: torch.dtype, byte: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.full((6,), byte > 0x7F)
    return torch.full((6 * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    for copy in (copy_all, copy_bits):
        targets = [_filled(dtype, 0), _filled(dtype, 0)[2]]
        values = [_filled(dtype, 0xFD), _filled(dtype, 0x7D)[1]]  # NaNs with a payload
        for _ in range(2):
            copy(targets, values)
            assert [raw_bytes(t) for t in targets] == [raw_bytes(v) for v in values]


def test_floats_of_16_and_8_bits_are_copied_as_whole_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        tensor = torch.zeros(4, 3, dtype=dtype).t()
        bits = _bits(tensor)
        assert not bits.dtype.is_floating_point
        assert (bits.data_ptr(), bits.shape, bits.stride()) == (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
        )
        assert _bits(tensor) is bits  # kept
        tensor.data = torch.ones(4, 3, dtype=dtype)  # unless the tensor has other memory now
        assert _bits(tensor).data_ptr() == tensor.data_ptr()


def test_what_is_kept_goes_with_its_tensor() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    gone = weakref.ref(_bits(tensor))
    del tensor
    gc.collect()
    assert gone() is None
