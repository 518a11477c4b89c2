from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.helpers import POISON, assert_same_bytes, poison, raw_bytes

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class OneBuffer(nn.Module):
    def __init__(self, tensor: torch.Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.register_buffer("b", tensor, persistent=persistent)


def poisoned_bytes(tensor: torch.Tensor) -> bytes:
    return bytes([POISON]) * (tensor.numel() * tensor.element_size())


# --- poison ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 4), (2, 3, 5)], ids=str)
def test_poison_fills_every_byte(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape, dtype=dtype)
    poison(OneBuffer(tensor))
    assert raw_bytes(tensor) == poisoned_bytes(tensor)


VIEWS = {
    "transposed": lambda t: t.t(),
    "strided": lambda t: t[:, ::2],
    "offset": lambda t: t[1:, 1:],
    "0-d": lambda t: t[1, 2],
    "expanded": lambda t: t[:1].expand(5, -1),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_poison_fills_a_view_and_nothing_around_it(
    dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    base = torch.zeros(4, 6, dtype=dtype)
    item_bytes = base.element_size()
    touched = view(torch.arange(24).reshape(4, 6)).unique().tolist()

    poison(OneBuffer(view(base)))

    assert raw_bytes(view(base)) == poisoned_bytes(view(base))
    expected = bytearray(24 * item_bytes)
    for element in touched:
        expected[element * item_bytes : (element + 1) * item_bytes] = [POISON] * item_bytes
    assert raw_bytes(base) == expected


def test_poison_reaches_parameters_and_persistent_buffers_of_every_submodule() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.BatchNorm1d(4)), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    poison(model)
    state = model.state_dict()
    assert len(state) == 9
    for name, tensor in state.items():
        assert raw_bytes(tensor) == poisoned_bytes(tensor), name


def test_poison_leaves_non_persistent_buffers_alone() -> None:
    kept = torch.arange(5)
    poison(OneBuffer(kept, persistent=False))
    assert kept.tolist() == [0, 1, 2, 3, 4]


def test_poison_keeps_tensors_ties_and_gradients_in_place() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    model[0].register_parameter("absent", None)
    before = [(p, p.data_ptr(), p.requires_grad) for p in model.parameters()]
    poison(model)
    after = list(model.parameters())
    assert [id(p) for p, _, _ in before] == [id(p) for p in after]
    assert [(p.data_ptr(), p.requires_grad) for p in after] == [(x, y) for _, x, y in before]
    assert model[1].weight is model[0].weight


# --- raw_bytes ------------------------------------------------------------------------------


def test_raw_bytes_keeps_nan_payloads_and_signed_zero() -> None:
    patterns = [0x7FC00001, 0xFFC12345, 0x7F800001, 0x80000000, 0x00000000, 0x00000001]
    data = struct.pack("=6I", *patterns)
    tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
    assert raw_bytes(tensor) == data
    assert raw_bytes(tensor.reshape(2, 3).t()) == struct.pack(
        "=6I", *(patterns[i] for i in (0, 3, 1, 4, 2, 5))
    )


def test_raw_bytes_keeps_bools_that_are_neither_0_nor_1() -> None:
    tensor = torch.zeros(2, dtype=torch.bool)
    poison(OneBuffer(tensor))
    assert raw_bytes(tensor) == b"\xa5\xa5"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_raw_bytes_is_row_major_whatever_the_strides(dtype: torch.dtype) -> None:
    item_bytes = torch.empty(0, dtype=dtype).element_size()
    data = bytes(i % 2 if dtype is torch.bool else i % 251 for i in range(12 * item_bytes))
    base = torch.frombuffer(bytearray(data), dtype=dtype).reshape(3, 4)
    items = [data[i * item_bytes : (i + 1) * item_bytes] for i in range(12)]
    assert raw_bytes(base) == data
    assert raw_bytes(base.t()) == b"".join(items[4 * (i % 3) + i // 3] for i in range(12))
    assert raw_bytes(base[1:, ::2]) == items[4] + items[6] + items[8] + items[10]
    assert raw_bytes(base[2, 3]) == items[11]
    assert raw_bytes(base[0, :1].expand(3)) == items[0] * 3
    assert raw_bytes(base[:0]) == b""


def test_raw_bytes_of_a_lazy_conjugate_are_those_of_its_values() -> None:
    tensor = torch.tensor([1 + 2j, -3 - 4j])
    assert raw_bytes(tensor.conj()) == struct.pack("=4f", 1, -2, -3, 4)
    assert raw_bytes(tensor.conj().imag) == struct.pack("=2f", -2, 4)


def test_raw_bytes_reads_a_parameter_that_requires_grad() -> None:
    assert raw_bytes(nn.Parameter(torch.tensor([1.0]))) == struct.pack("=f", 1.0)


# --- assert_same_bytes ----------------------------------------------------------------------


def test_same_bytes_pass_whatever_the_strides() -> None:
    tensor = torch.tensor([[float("nan"), -0.0], [1.0, 2.0]])
    a = {"x": tensor, "y": torch.tensor(True), "z": torch.zeros(0, 3)}
    b = {"z": torch.zeros(0, 3), "y": torch.tensor(True), "x": tensor.t().contiguous().t()}
    assert_same_bytes(a, b)
    assert_same_bytes({}, {})


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32), "'x': dtype torch.float32 != torch.in"),
        (torch.zeros(2), torch.zeros(2, 1), r"'x': shape \(2,\) != \(2, 1\)"),
        (torch.zeros(0, 2), torch.zeros(2, 0), r"'x': shape \(0, 2\) != \(2, 0\)"),
        (torch.tensor(0.0), torch.tensor(-0.0), "'x': 1 of 4 bytes differ, the first at 3: 0x00 !"),
    ],
    ids=["dtype", "shape", "zero-size shape", "signed zero"],
)
def test_a_difference_names_the_tensor_and_what_differs(
    left: torch.Tensor, right: torch.Tensor, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_bytes({"x": left}, {"x": right})


def test_the_first_offender_is_named() -> None:
    a = {name: torch.zeros(2) for name in ("ok", "first", "second")}
    b = {name: torch.zeros(2) for name in ("second", "first", "ok")}
    b["first"][1] = 1
    b["second"][0] = 1
    with pytest.raises(AssertionError, match="'first'"):
        assert_same_bytes(a, b)


def test_a_missing_name_is_named_on_either_side() -> None:
    tensor = torch.zeros(1)
    with pytest.raises(AssertionError, match="'y' is only in the first mapping"):
        assert_same_bytes({"x": tensor, "y": tensor}, {"x": tensor})
    with pytest.raises(AssertionError, match="'y' is only in the second mapping"):
        assert_same_bytes({"x": tensor}, {"x": tensor, "y": tensor})
