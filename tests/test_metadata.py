from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from rayxfer import ContractError, ParamMeta
from rayxfer.metadata import (
    check_metadata,
    dtype_from_name,
    dtype_name,
    metadata_digest,
    metadata_from_wire,
    metadata_to_wire,
)

METADATA = (
    ParamMeta("embed.weight", torch.bfloat16, (8, 4), ("lm_head.weight", "head")),
    ParamMeta("scale", torch.float32, ()),
    ParamMeta("empty", torch.int64, (0, 3)),
    ParamMeta("mask", torch.bool, (5,)),
    ParamMeta("quantised", torch.float8_e4m3fn, (2, 3)),
)


def wire(**changes: Any) -> dict[str, Any]:
    """Two good tensors, with fields replaced."""
    good = {"names": ["a", "b"], "dtype_names": ["bfloat16", "int8"], "shapes": [[2, 3], []]}
    return {**good, **changes}


# --- dtypes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "name", "item_bytes"),
    [
        (torch.float64, "float64", 8),
        (torch.float32, "float32", 4),
        (torch.float16, "float16", 2),
        (torch.bfloat16, "bfloat16", 2),
        (torch.float8_e4m3fn, "float8_e4m3fn", 1),
        (torch.float8_e5m2, "float8_e5m2", 1),
        (torch.complex64, "complex64", 8),
        (torch.complex128, "complex128", 16),
        (torch.bool, "bool", 1),
        (torch.uint8, "uint8", 1),
        (torch.int8, "int8", 1),
        (torch.int16, "int16", 2),
        (torch.int32, "int32", 4),
        (torch.int64, "int64", 8),
        (torch.uint16, "uint16", 2),
        (torch.uint32, "uint32", 4),
        (torch.uint64, "uint64", 8),
    ],
    ids=str,
)
def test_dtype_names_are_bare_and_reversible(
    dtype: torch.dtype, name: str, item_bytes: int
) -> None:
    assert dtype_name(dtype) == name
    assert dtype_from_name(name) is dtype
    assert ParamMeta("x", dtype, (3, 5)).num_bytes == 15 * item_bytes


@pytest.mark.parametrize("name", ["torch.bfloat16", "bf16", "Tensor", "", "float", 3, None, b"x"])
def test_other_names_are_no_dtypes(name: Any) -> None:
    if name == "float":  # torch's own short name of float32
        assert dtype_from_name(name) is torch.float32
        return
    with pytest.raises(ContractError, match="unknown dtype name"):
        dtype_from_name(name)


# --- sizes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "numel"), [((), 1), ((0,), 0), ((3, 0, 7), 0), ((2, 3, 5), 30), ((1 << 33,), 1 << 33)]
)
def test_sizes(shape: tuple[int, ...], numel: int) -> None:
    meta = ParamMeta("x", torch.float32, shape)
    assert (meta.numel, meta.num_bytes) == (numel, 4 * numel)


def test_sizes_are_exact_beyond_64_bits() -> None:
    assert ParamMeta("x", torch.complex128, (1 << 40, 1 << 40)).num_bytes == 1 << 84


def test_text_shows_dtype_and_shape() -> None:
    assert str(METADATA[0]) == "bfloat16[8, 4]"
    assert str(METADATA[1]) == "float32[]"


# --- there and back -------------------------------------------------------------------------


def test_wire_is_plain_data_and_comes_back() -> None:
    sent = metadata_to_wire(METADATA)
    assert sent == {
        "names": ["embed.weight", "scale", "empty", "mask", "quantised"],
        "dtype_names": ["bfloat16", "float32", "int64", "bool", "float8_e4m3fn"],
        "shapes": [[8, 4], [], [0, 3], [5], [2, 3]],
        "aliases": {"embed.weight": ["lm_head.weight", "head"]},
    }
    assert metadata_from_wire(sent) == METADATA
    assert metadata_from_wire(json.loads(json.dumps(sent))) == METADATA
    assert metadata_from_wire({k: v for k, v in sent.items() if k != "aliases"}) == tuple(
        ParamMeta(m.name, m.dtype, m.shape) for m in METADATA
    )


def test_empty_metadata() -> None:
    assert metadata_from_wire(metadata_to_wire(())) == ()
    assert check_metadata([]) == ()


# --- hostile wires --------------------------------------------------------------------------

HUGE = 10**5000  # Python refuses to print it

HOSTILE: dict[str, tuple[Any, str]] = {
    "no dict": ([("a", "int8", [])], "metadata is a list, not a dict"),
    "nothing": (None, "metadata is a NoneType, not a dict"),
    "no names": ({"dtype_names": [], "shapes": []}, "'names' is a NoneType, not a list"),
    "names a str": (wire(names="ab"), "'names' is a str, not a list"),
    "names a dict": (wire(names={"a": 1, "b": 2}), "'names' is a dict, not a list"),
    "dtypes a str": (wire(dtype_names="bf"), "'dtype_names' is a str, not a list"),
    "shapes a number": (wire(shapes=2), "'shapes' is a int, not a list"),
    "short names": (wire(names=["a"]), "1 names, 2 dtype_names, 2 shapes"),
    "long shapes": (wire(shapes=[[], [], []]), "2 names, 2 dtype_names, 3 shapes"),
    "name a number": (wire(names=["a", 7]), "entry 1: name is 7, not a string"),
    "name bytes": (wire(names=[b"a", "b"]), "entry 0: name is b'a', not a string"),
    "name a list": (wire(names=["a", ["b"]]), r"entry 1: name is \['b'\], not a string"),
    "name empty": (wire(names=["a", ""]), "entry 1: name is '', not a non-empty string"),
    "name twice": (wire(names=["a", "a"]), r"duplicate name 'a' .*entries 0 and 1"),
    "dtype unknown": (wire(dtype_names=["int8", "int9"]), "'b': unknown dtype name 'int9'"),
    "dtype a list": (wire(dtype_names=[["int8"], "int8"]), "'a': unknown dtype name"),
    "dtype qualified": (wire(dtype_names=["torch.int8", "int8"]), "'a': unknown dtype name 'torch"),
    "shape a str": (wire(shapes=["23", []]), "metadata of 'a': '23' is not a list"),
    "shape a number": (wire(shapes=[[], 6]), "metadata of 'b': 6 is not a list"),
    "shape nothing": (wire(shapes=[[], None]), "metadata of 'b': None is not a list"),
    "size negative": (wire(shapes=[[2, -3], []]), r"'a': shape \[2, -3\] holds -3"),
    "size a float": (wire(shapes=[[2.0], []]), r"'a': shape \[2.0\] holds 2.0"),
    "size nan": (wire(shapes=[[float("nan")], []]), "holds nan"),
    "size a bool": (wire(shapes=[[True], []]), r"'a': shape \[True\] holds True"),
    "size a str": (wire(shapes=[["2"], []]), r"'a': shape \['2'\] holds '2'"),
    "size a list": (wire(shapes=[[[2]], []]), r"holds \[2\]"),
    "size nothing": (wire(shapes=[[None], []]), "holds None"),
    "too many bytes": (wire(shapes=[[1 << 62, 2], []]), r"more than 2\*\*62 bytes"),
    "product too large": (wire(shapes=[[1 << 31] * 3, []]), r"more than 2\*\*62 bytes"),
    "over a word": (wire(shapes=[[1 << 64], []]), r"more than 2\*\*62 bytes"),
    "over a word after 0": (wire(shapes=[[0, 1 << 64], []]), r"more than 2\*\*62 bytes"),
    "strides over a word": (wire(shapes=[[0, 1 << 61, 1 << 61], []]), r"more than 2\*\*62 bytes"),
    "over a word before 0": (wire(shapes=[[1 << 64, 0], []]), r"more than 2\*\*62 bytes"),
    "unprintable": (wire(shapes=[[HUGE], []]), r"more than 2\*\*62 bytes"),
    "unprintable negative": (wire(shapes=[[-HUGE], []]), "'a': shape .* sizes are ints >= 0"),
    "unprintable name": (wire(names=[HUGE, "b"]), "entry 0: name is <int"),
    "unprintable dtype": (wire(dtype_names=[HUGE, "int8"]), "'a': unknown dtype name <int"),
    "unprintable shape": (wire(shapes=[HUGE, []]), "'a': <int"),
    "aliases a list": (wire(aliases=["c"]), "'aliases' is a list, not a dict"),
    "aliases empty list": (wire(aliases=[]), "'aliases' is a list, not a dict"),
    "aliases nothing": (wire(aliases=None), "'aliases' is a NoneType, not a dict"),
    "alias a str": (wire(aliases={"a": "cd"}), "metadata of 'a': 'cd' is not a list"),
    "alias a number": (wire(aliases={"a": 5}), "metadata of 'a': 5 is not a list"),
    "alias of numbers": (wire(aliases={"a": [5]}), r"'a': aliases \(5,\) are no tuple of names"),
    "alias of lists": (wire(aliases={"a": [["c"]]}), "'a': aliases .* are no tuple of names"),
    "alias empty": (wire(aliases={"a": [""]}), "'a': aliases .* are no tuple of names"),
    "alias its own": (wire(aliases={"a": ["a"]}), "duplicate name 'a' .*entries 0 and 0"),
    "alias a name": (wire(aliases={"a": ["b"]}), "duplicate name 'b' .*entries 0 and 1"),
    "alias twice": (wire(aliases={"a": ["c"], "b": ["c"]}), "duplicate name 'c'"),
    "alias of nothing": (wire(aliases={"z": ["c"]}), "'aliases' has 'z', which is no name"),
}


@pytest.mark.parametrize(("sent", "message"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_wire_is_refused_by_name(sent: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        metadata_from_wire(sent)


def test_the_good_wire_is_accepted() -> None:
    assert metadata_from_wire(wire()) == (
        ParamMeta("a", torch.bfloat16, (2, 3)),
        ParamMeta("b", torch.int8, ()),
    )


def test_the_first_offender_is_named_as_a_field() -> None:
    with pytest.raises(ContractError) as caught:
        metadata_from_wire(wire(shapes=[[-1], [-1]]))
    assert caught.value.name == "a"


def test_messages_stay_short_whatever_was_sent() -> None:
    long = "x" * 10**6
    for sent in (
        wire(names=[long, long]),
        wire(dtype_names=[long, "int8"]),
        wire(shapes=[long, []]),
        wire(shapes=[[-1] * 10**6, []]),
        wire(names=[long, "b"], shapes=[[-1], []]),
        wire(aliases={"a": [long, long]}),
        wire(aliases={long: []}),
    ):
        with pytest.raises(ContractError) as caught:
            metadata_from_wire(sent)
        assert len(str(caught.value)) < 1000


def test_the_largest_allowed_claims_are_handled_as_numbers() -> None:
    (meta,) = metadata_from_wire(
        {"names": ["x"], "dtype_names": ["int8"], "shapes": [[1 << 31, 1 << 31]]}
    )
    assert meta.num_bytes == 1 << 62
    # whatever is accepted, torch can make a view of
    assert torch.empty(meta.shape, dtype=meta.dtype, device="meta").numel() == 1 << 62
    (meta,) = metadata_from_wire(
        {"names": ["x"], "dtype_names": ["int8"], "shapes": [[1 << 31, 0, 1 << 31]]}
    )
    assert torch.empty(meta.shape, dtype=meta.dtype).shape == (1 << 31, 0, 1 << 31)


def test_a_million_names_cost_seconds_not_minutes() -> None:
    count = 10**6
    sent = {
        "names": [f"layers.{i}" for i in range(count)],
        "dtype_names": ["bfloat16"] * count,
        "shapes": [[1 << 20, 1 << 20]] * count,
    }
    start = time.process_time()
    metadata = metadata_from_wire(sent)
    assert time.process_time() - start < 30
    assert len(metadata) == count
    assert metadata[-1].num_bytes == 1 << 41


def test_a_million_names_are_refused_at_the_first_offender() -> None:
    count = 10**6
    start = time.process_time()
    with pytest.raises(ContractError, match=r"duplicate name 'a' .*entries 0 and 1"):
        metadata_from_wire(
            {"names": ["a"] * count, "dtype_names": ["int8"] * count, "shapes": [[]] * count}
        )
    assert time.process_time() - start < 1


# --- a source's own -------------------------------------------------------------------------


def test_check_metadata_freezes() -> None:
    given = [ParamMeta("a", torch.int8, torch.Size([2, 3]), ["b"])]  # type: ignore[arg-type]
    (checked,) = check_metadata(given)
    assert type(checked.shape) is tuple
    assert checked.aliases == ("b",)
    assert checked == ParamMeta("a", torch.int8, (2, 3), ("b",))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("a", torch.int8, ()), "entry 0 is a tuple, not a ParamMeta"),
        (ParamMeta(3, torch.int8, ()), "entry 0: name is 3"),  # type: ignore[arg-type]
        (ParamMeta("", torch.int8, ()), "entry 0: name is ''"),
        (ParamMeta("a", "int8", ()), "'a': dtype is 'int8', not a"),  # type: ignore[arg-type]
        (ParamMeta("a", torch.int8, 3), "'a': shape is 3, not"),  # type: ignore[arg-type]
        (ParamMeta("a", torch.int8, (2.0,)), "'a': shape .* holds 2.0"),  # type: ignore[arg-type]
        (ParamMeta("a", torch.int8, (), "bc"), "'a': aliases 'bc' are"),  # type: ignore[arg-type]
        (ParamMeta("a", torch.int8, (), None), "'a': aliases None are"),  # type: ignore[arg-type]
        (ParamMeta("a", torch.int8, (), ("a",)), "duplicate name 'a'"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_check_metadata_names_what_is_wrong(entry: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        check_metadata([entry])


# --- digest ---------------------------------------------------------------------------------


def test_digest_depends_on_all_of_it_and_nothing_else() -> None:
    base = metadata_digest(METADATA)
    assert len(base) == 32
    assert int(base, 16) >= 0
    assert metadata_digest(metadata_from_wire(metadata_to_wire(METADATA))) == base
    a, b = ParamMeta("a", torch.int8, (2, 3)), ParamMeta("b", torch.int8, (6,), ("c", "d"))
    variants = [
        [],
        [a],
        [a, b],
        [b, a],
        [a, ParamMeta("b", torch.int8, (6,), ("d", "c"))],
        [a, ParamMeta("b", torch.int8, (6,), ("c",))],
        [a, ParamMeta("b", torch.int8, (6,))],
        [a, ParamMeta("b", torch.uint8, (6,), ("c", "d"))],
        [a, ParamMeta("b", torch.int8, (6, 1), ("c", "d"))],
        [a, ParamMeta("b', 'c", torch.int8, (6,), ("d",))],
    ]
    assert len({metadata_digest(v) for v in variants}) == len(variants)


def test_digest_takes_any_name() -> None:
    odd = ["\ud800", "naïve.重み", "a\x00b", "a\nb"]
    digests = {metadata_digest([ParamMeta(name, torch.int8, ())]) for name in odd}
    assert len(digests) == len(odd)
