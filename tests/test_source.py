from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from rayxfer import ConfigError, ContractError, MappingSource, ModuleSource, ParamMeta, WeightSource
from rayxfer.source import apply_rename, as_source, checked_metadata
from tests.helpers import assert_same_bytes, raw_bytes


class Net(nn.Module):
    """Ties by parameter and by module, all sorts of buffers, an absent parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.block = nn.Linear(4, 4, bias=False)
        self.again = self.block
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_parameter("absent", None)
        self.register_buffer("scale", torch.tensor(float("nan"), dtype=torch.float64))
        self.register_buffer("rope", torch.arange(8.0), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("mask", torch.tensor([True, False]))
        self.frozen = nn.Parameter(torch.ones(2, 3).t(), requires_grad=False)


SENT = [
    ("frozen", "float32", (3, 2), ()),
    ("embed.weight", "float32", (6, 4), ("lm_head.weight",)),
    ("norm.weight", "float32", (4,), ()),
    ("norm.bias", "float32", (4,), ()),
    ("block.weight", "float32", (4, 4), ("again.weight",)),
    ("scale", "float64", (), ()),
    ("mask", "bool", (2,), ()),
    ("norm.running_mean", "float32", (4,), ()),
    ("norm.running_var", "float32", (4,), ()),
    ("norm.num_batches_tracked", "int64", (), ()),
]


def rows(source: WeightSource) -> list[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
    return [
        (m.name, str(m.dtype).removeprefix("torch."), m.shape, m.aliases)
        for m in checked_metadata(source)
    ]


def check_pass(source: WeightSource) -> dict[str, torch.Tensor]:
    """One pass, which must yield what the metadata says."""
    metadata = source.metadata()
    found = list(source)
    assert [name for name, _ in found] == [meta.name for meta in metadata]
    for meta, (_, tensor) in zip(metadata, found, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (meta.dtype, meta.shape)
        assert not tensor.requires_grad
    return dict(found)


# --- ModuleSource ---------------------------------------------------------------------------


def test_parameters_and_persistent_buffers_once_with_aliases() -> None:
    module = Net()
    source = ModuleSource(module)
    assert rows(source) == SENT
    found = check_pass(source)
    state = module.state_dict()
    assert_same_bytes(found, {name: state[name] for name in found})
    # between them, names and aliases are exactly the state dict's
    names = {name for row in SENT for name in (row[0], *row[3])}
    assert names == state.keys()


def test_non_persistent_buffers_are_never_sent() -> None:
    names = {name for row in rows(ModuleSource(Net())) for name in (row[0], *row[3])}
    assert "rope" not in names
    assert {"scale", "mask"} < names


def test_a_module_that_is_shared_under_two_names_is_sent_once() -> None:
    shared = nn.BatchNorm1d(2)
    source = ModuleSource(nn.ModuleDict({"a": shared, "b": shared}))
    assert [(m.name, m.aliases) for m in source.metadata()] == [
        (f"a.{name}", (f"b.{name}",))
        for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    ]


def test_a_tie_made_by_data_is_a_tie() -> None:
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight.data = module[0].weight.data
    assert [(m.name, m.aliases) for m in ModuleSource(module).metadata()] == [
        ("0.weight", ("1.weight",))
    ]


def test_views_of_one_memory_that_differ_are_no_tie() -> None:
    base = torch.arange(6.0)
    source = MappingSource(
        {"whole": base, "part": base[:3], "matrix": base.view(2, 3), "bits": base.view(torch.int32)}
    )
    assert [m.aliases for m in source.metadata()] == [()] * 4
    found = check_pass(source)
    assert raw_bytes(found["part"]) == struct.pack("=3f", 0, 1, 2)


def test_empty_tensors_are_no_tie_unless_they_are_one_object() -> None:
    one = torch.empty(0)
    source = MappingSource({"a": one, "b": torch.empty(0), "c": one, "d": torch.empty(0, 2)})
    assert [(m.name, m.aliases) for m in source.metadata()] == [("a", ("c",)), ("b", ()), ("d", ())]


def test_a_conjugate_view_is_no_tie() -> None:
    tensor = torch.tensor([1 + 2j])
    source = MappingSource({"a": tensor, "b": tensor.conj()})
    assert [m.aliases for m in source.metadata()] == [(), ()]


def test_the_trainer_is_unchanged() -> None:
    module = Net()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    identity = [
        (id(p), p.data_ptr(), p.requires_grad, p.dtype, p._version, p.stride())
        for p in module.parameters()
    ]
    for dtype in (None, torch.bfloat16):
        source = ModuleSource(module, dtype=dtype, rename={"": "model"})
        source.metadata()
        check_pass(source)
    assert_same_bytes(before, module.state_dict())
    assert identity == [
        (id(p), p.data_ptr(), p.requires_grad, p.dtype, p._version, p.stride())
        for p in module.parameters()
    ]
    assert module.lm_head.weight is module.embed.weight


def test_every_pass_is_fresh() -> None:
    module = nn.Linear(2, 1)
    source = ModuleSource(module)
    first = {name: tensor.clone() for name, tensor in source}
    iterator = iter(source)
    next(iterator)
    assert_same_bytes(dict(source), first)
    with torch.no_grad():
        module.weight.fill_(7)
    assert raw_bytes(dict(source)["weight"]) == struct.pack("=2f", 7, 7)


def test_parameters_that_were_replaced_are_seen() -> None:
    module = nn.Linear(2, 1, bias=False)
    source = ModuleSource(module)
    module.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float16))
    assert rows(source) == [("weight", "float16", (3, 3), ())]


# --- casts ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_casts_are_tensor_to_and_for_floats_only(dtype: torch.dtype) -> None:
    given = {
        "f64": torch.tensor([1.00390625001, 1e300, float("nan"), -0.0], dtype=torch.float64),
        "f32": torch.randn(5, 7, generator=torch.Generator().manual_seed(1)),
        "f16": torch.tensor([65504.0, 6e-8], dtype=torch.float16),
        "bf16": torch.tensor([3.0, -0.0], dtype=torch.bfloat16).expand(3, 2),
        "f8": torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
        "i64": torch.tensor([1 << 60]),
        "bool": torch.tensor(True),
        "c64": torch.tensor([1 + 2j]),
        "empty": torch.empty(0, 3),
    }
    before = {name: raw_bytes(tensor) for name, tensor in given.items()}
    found = check_pass(MappingSource(given, dtype=dtype))
    floats = {"f64", "f32", "f16", "bf16", "empty"}
    assert_same_bytes(
        found,
        {name: t.to(dtype) if name in floats else t for name, t in given.items()},
    )
    assert {name: raw_bytes(tensor) for name, tensor in given.items()} == before


def test_bfloat16_halves_the_bytes() -> None:
    module = nn.Linear(64, 64)
    full = sum(m.num_bytes for m in ModuleSource(module).metadata())
    half = sum(m.num_bytes for m in ModuleSource(module, dtype=torch.bfloat16).metadata())
    assert (full, half) == (4 * 64 * 65, 2 * 64 * 65)


def test_a_pass_without_cast_copies_nothing() -> None:
    module = nn.Linear(3, 2)
    found = dict(ModuleSource(module, dtype=torch.float32))
    assert found["weight"].data_ptr() == module.weight.data_ptr()


def test_only_what_keeps_its_memory_is_stable() -> None:
    assert ModuleSource(nn.Linear(1, 1)).stable
    assert not ModuleSource(nn.Linear(1, 1), dtype=torch.bfloat16).stable
    assert not Custom().stable


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, "bfloat16", float])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    for make in (MappingSource, lambda _, **kw: ModuleSource(nn.Linear(1, 1), **kw)):
        with pytest.raises(ConfigError, match=r"expected a floating-point torch\.dtype"):
            make({}, dtype=dtype)


# --- names ----------------------------------------------------------------------------------

RENAMES: list[tuple[dict[str, str], str, str]] = [
    ({"model": "net"}, "model.x", "net.x"),
    ({"model": "net"}, "model", "net"),
    ({"model": "net"}, "models.x", "models.x"),
    ({"model": "net"}, "my.model.x", "my.model.x"),
    ({"model.": "net."}, "model.x", "net.x"),
    ({"model.": "net"}, "model.x", "net.x"),
    ({"model": "net."}, "model.x", "net.x"),
    ({"model": ""}, "model.x", "x"),
    ({"model.": ""}, "model.x", "x"),
    ({"": "model"}, "x.y", "model.x.y"),
    ({"": "model."}, "x.y", "model.x.y"),
    ({"": "all", "a": "b"}, "a.x", "b.x"),
    ({"": "all", "a": "b"}, "ax", "all.ax"),
    ({"a": "1", "a.b": "2", "a.b.c": "3"}, "a.b.c.d", "3.d"),
    ({"a": "1", "a.b": "2", "a.b.c": "3"}, "a.b.d", "2.d"),
    ({"a": "1", "a.b": "2", "a.b.c": "3"}, "a.bc.d", "1.bc.d"),
    ({"a.b": "c.d.e"}, "a.b.weight", "c.d.e.weight"),
    ({"a": "b", "b": "c"}, "a.x", "b.x"),
    ({}, "x", "x"),
]


@pytest.mark.parametrize(("rules", "name", "expected"), RENAMES, ids=lambda x: str(x))
def test_prefix_rules(rules: dict[str, str], name: str, expected: str) -> None:
    assert apply_rename(name, rules) == expected
    # the order of the rules does not matter
    assert apply_rename(name, dict(reversed(rules.items()))) == expected


def test_a_function_renames() -> None:
    assert apply_rename("a.b", str.upper) == "A.B"
    assert apply_rename("a.b", None) == "a.b"


@pytest.mark.parametrize(
    "rename", [lambda name: None, lambda name: "", lambda name: 3, {"w": ""}, {"w": None}, {"w": 3}]
)
def test_a_new_name_must_be_one(rename: Any) -> None:
    with pytest.raises(ConfigError, match="rename of 'w' gave"):
        apply_rename("w", rename)


@pytest.mark.parametrize(
    "rename", [{"": "model", "lm_head": "head"}, lambda name: name.replace("embed", "tok")]
)
def test_sources_rename_names_and_aliases(rename: Any) -> None:
    module = Net()
    source = ModuleSource(module, rename=rename)
    assert rows(source) == [
        (apply_rename(n, rename), d, s, tuple(apply_rename(a, rename) for a in aliases))
        for n, d, s, aliases in SENT
    ]
    found = check_pass(source)
    state = {apply_rename(name, rename): t for name, t in module.state_dict().items()}
    assert_same_bytes(found, {name: state[name] for name in found})


def test_two_names_that_become_one_are_refused() -> None:
    source = MappingSource({"a.w": torch.zeros(1), "b.w": torch.ones(1)}, rename={"b": "a"})
    with pytest.raises(ContractError, match=r"duplicate name 'a\.w'"):
        checked_metadata(source)


# --- MappingSource --------------------------------------------------------------------------


def test_a_mapping_is_read_when_a_round_reads_it() -> None:
    given = {"b": torch.zeros(2), "a": torch.ones(1)}
    source = MappingSource(given)
    assert [name for name, _ in source] == ["b", "a"]
    given["c"] = torch.zeros(())
    given["b"].fill_(3)
    assert_same_bytes(check_pass(source), given)


def test_a_state_dict_keeps_its_ties() -> None:
    source = MappingSource(Net().state_dict())
    aliases = {m.name: m.aliases for m in source.metadata() if m.aliases}
    assert aliases == {"embed.weight": ("lm_head.weight",), "block.weight": ("again.weight",)}


def test_a_mapping_that_reads_a_file_is_asked_once_a_pass() -> None:
    class Lazy(Mapping[str, torch.Tensor]):
        reads: ClassVar[list[str]] = []

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads.append(name)
            return torch.ones(2)

        def __iter__(self) -> Iterator[str]:
            return iter(("a", "b"))

        def __len__(self) -> int:
            return 2

    source = MappingSource(Lazy())
    assert [m.aliases for m in source.metadata()] == [(), ()]
    assert_same_bytes(dict(source), {"a": torch.ones(2), "b": torch.ones(2)})
    assert Lazy.reads == ["a", "b"] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": 3}, "entry 'a' is a int: a source maps names to tensors"),
        ({"a": None}, "entry 'a' is a NoneType"),
        ({"a": torch.zeros(1), "b": [1.0]}, "entry 'b' is a list"),
        ({3: torch.zeros(1)}, "entry 3 is a Tensor"),
    ],
)
def test_a_mapping_of_other_things_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        MappingSource(given).metadata()
    with pytest.raises(ContractError, match=message):
        list(MappingSource(given))


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="takes a mapping of names to tensors, not a list"):
        MappingSource([("a", torch.zeros(1))])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"takes an nn\.Module, not a dict"):
        ModuleSource({})  # type: ignore[arg-type]


# --- as_source ------------------------------------------------------------------------------


class Custom(WeightSource):
    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta("x", torch.float32, ())]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "x", torch.tensor(1.0)


def test_as_source_takes_what_sync_weights_takes() -> None:
    custom = Custom()
    assert as_source(custom) is custom
    assert custom.held_names() is None
    assert type(as_source(nn.Linear(1, 1))) is ModuleSource
    assert type(as_source({"a": torch.zeros(1)})) is MappingSource
    assert rows(as_source(nn.ParameterDict({"a": torch.zeros(1)}))) == [("a", "float32", (1,), ())]


@pytest.mark.parametrize("given", [None, 3, "model", [torch.zeros(1)], torch.zeros(1), nn.Linear])
def test_as_source_says_what_it_takes(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"got a {type(given).__name__}: expected an nn.Module"):
        as_source(given)


def test_both_methods_of_a_source_are_required() -> None:
    with pytest.raises(TypeError, match="abstract"):
        WeightSource()  # type: ignore[abstract]


def test_metadata_that_was_asked_for_already_is_checked_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = Custom().metadata()
    monkeypatch.delattr(Custom, "metadata")
    assert checked_metadata(Custom, found) == tuple(found)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="gave a NoneType, not a list"):
        checked_metadata(Custom, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda: None, "metadata.. gave a NoneType, not a list"),
        (lambda: {"x": 1}, "metadata.. gave a dict, not a list"),
        (lambda: iter(()), "metadata.. gave a .*iterator, not a list"),
        (lambda: ["x"], "entry 0 is a str, not a ParamMeta"),
        (lambda: [ParamMeta("x", torch.int8, (1,))] * 2, "duplicate name 'x'"),
    ],
)
def test_a_source_with_bad_metadata_is_refused(
    result: Callable[[], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Custom, "metadata", lambda self: result())
    with pytest.raises(ContractError, match=message):
        checked_metadata(Custom())
