from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer import ConfigError, ContractError, FuseRule, ParamMeta
from rayxfer.digest import digest
from rayxfer.loader import ModuleLoader, WeightLoader
from rayxfer.opaque import OpaqueLoader, StagedLoader
from tests.helpers import POISON, assert_same_bytes, poison, raw_bytes
from tests.test_packing import DTYPES, LAYOUTS, random_base

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [0.0, -0.0, 1.0, 1 / 3, -65519.0, 1e-8, 3e38, 1e300, float("inf"), float("-inf")]


class Tensors(nn.Module):
    """A module made of given tensors: floating-point ones as parameters, others as buffers."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point() or tensor.is_complex():
                setattr(self, name, nn.Parameter(tensor))
            else:
                self.register_buffer(name, tensor)


class Tied(nn.Module):
    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.lm_head = nn.Linear(3, 5, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3)


def offer(
    tensors: dict[str, torch.Tensor], aliases: dict[str, tuple[str, ...]] | None = None
) -> list[ParamMeta]:
    aliases = aliases or {}
    return [
        ParamMeta(name, tensor.dtype, tuple(tensor.shape), aliases.get(name, ()))
        for name, tensor in tensors.items()
    ]


def feed(
    loader: WeightLoader,
    tensors: Sequence[torch.Tensor],
    *,
    order: Iterable[int] | None = None,
    chunk: int = 2,
) -> None:
    """Hand over the tensors as buckets would: a few at a time, in memory that is used again."""
    indices = list(range(len(tensors)) if order is None else order)
    for start in range(0, len(indices), chunk):
        items = [(i, tensors[i].clone()) for i in indices[start : start + chunk]]
        loader.load(items)
        if loader.copies_only:
            poison(Buffers([tensor for _, tensor in items]))


class Buffers(nn.Module):
    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_buffer(f"b{i}", tensor)


def go(loader: WeightLoader, metadata: list[ParamMeta], *, partial: bool = False) -> Any:
    """A preflight without problems."""
    found = loader.preflight(metadata, partial=partial)
    assert found.problems == []
    return found


def sync(
    loader: ModuleLoader,
    tensors: dict[str, torch.Tensor],
    *,
    aliases: dict[str, tuple[str, ...]] | None = None,
    order: Iterable[int] | None = None,
    chunk: int = 2,
) -> None:
    """A whole round, with the proof that a session asks for."""
    go(loader, offer(tensors, aliases))
    feed(loader, list(tensors.values()), order=order, chunk=chunk)
    assert loader.loaded_digests() == [digest(tensor) for tensor in tensors.values()]
    assert loader.unproven() == []
    loader.commit()


def fresh(make: Callable[[], nn.Module], seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {name: tensor.clone() for name, tensor in make().state_dict().items()}


# --- strict: everything that is wrong, at once ----------------------------------------------


def test_all_problems_come_at_once_with_expected_and_offered() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    poison(model)
    loader = ModuleLoader(model)
    found = loader.preflight(
        offer(
            {
                "0.weight": torch.zeros(4, 3),
                "0.bias": torch.zeros(5),
                "1.weight": torch.zeros(4, dtype=torch.int32),
                "1.num_batches_tracked": torch.zeros((), dtype=torch.float32),
                "3.weight": torch.zeros(2),
                "2.bias": torch.zeros(1, 2, dtype=torch.float8_e5m2),
                "2.weight": torch.zeros(2, 4, dtype=torch.float64),
            }
        ),
        partial=False,
    )
    only = "(only fp64, fp32, fp16 and bf16 are cast)"
    assert found.problems == [
        "shape mismatch at '0.bias': expected [4], offered [5]",
        f"dtype mismatch at '1.weight': expected float32, offered int32 {only}",
        f"dtype mismatch at '1.num_batches_tracked': expected int64, offered float32 {only}",
        "unknown name '3.weight': this worker has no such tensor",
        "shape mismatch at '2.bias': expected [2], offered [1, 2]",
        f"dtype mismatch at '2.bias': expected float32, offered float8_e5m2 {only}",
        "missing name '1.bias': expected float32[4], nothing offered",
        "missing name '1.running_mean': expected float32[4], nothing offered",
        "missing name '1.running_var': expected float32[4], nothing offered",
    ]
    assert found.first_name == "0.bias"
    assert found.casts == {"2.weight": "float64 -> float32"}
    # and nothing has changed
    assert not loader.touched
    for tensor in model.state_dict().values():
        assert raw_bytes(tensor) == bytes([POISON]) * tensor.numel() * tensor.element_size()


def test_shapes_are_not_broadcast() -> None:
    model = Tensors(w=torch.zeros(3, 1), scalar=torch.zeros(()))
    problems = (
        ModuleLoader(model)
        .preflight(offer({"w": torch.zeros(1, 3), "scalar": torch.zeros(1)}), partial=False)
        .problems
    )
    assert problems == [
        "shape mismatch at 'w': expected [3, 1], offered [1, 3]",
        "shape mismatch at 'scalar': expected [], offered [1]",
    ]


def test_a_missing_tie_is_named_once() -> None:
    found = ModuleLoader(Tied()).preflight(
        offer({"norm.weight": torch.zeros(3), "norm.bias": torch.zeros(3)}), partial=False
    )
    assert found.problems == [
        "missing name 'embed.weight': expected float32[5, 3], nothing offered"
    ]


def test_an_unknown_alias_is_unknown() -> None:
    model = nn.Linear(2, 2, bias=False)
    found = ModuleLoader(model).preflight(
        offer({"weight": torch.zeros(2, 2)}, {"weight": ("head",)}), partial=False
    )
    assert found.problems == ["unknown name 'head': this worker has no such tensor"]


def test_an_empty_offer() -> None:
    full = ModuleLoader(nn.Linear(1, 1, bias=False)).preflight([], partial=False)
    assert full.problems == [
        "empty offer: a full sync has to offer every tensor of the worker",
        "missing name 'weight': expected float32[1, 1], nothing offered",
    ]
    partial = ModuleLoader(nn.Linear(1, 1, bias=False)).preflight([], partial=True)
    assert (partial.problems, partial.kept) == ([], ["weight"])


def test_non_persistent_buffers_are_neither_wanted_nor_known() -> None:
    model = nn.Linear(1, 1, bias=False)
    model.register_buffer("rope", torch.ones(3), persistent=False)
    sync(ModuleLoader(model), {"weight": torch.full((1, 1), 5.0)})
    assert raw_bytes(model.rope) == raw_bytes(torch.ones(3))
    found = ModuleLoader(model).preflight(offer({"rope": torch.zeros(3)}), partial=True)
    assert found.problems == ["unknown name 'rope': this worker has no such tensor"]


# --- names ----------------------------------------------------------------------------------


def test_renames_are_applied_to_what_is_offered() -> None:
    model = nn.Linear(2, 1)
    poison(model)
    given = {"model.fc.weight": torch.ones(1, 2), "model.fc.bias": torch.zeros(1)}
    sync(ModuleLoader(model, rename={"model.fc": ""}), given)
    assert_same_bytes(
        model.state_dict(), {k.removeprefix("model.fc."): v for k, v in given.items()}
    )


def test_a_name_that_is_unknown_after_its_rename_is_shown_with_both() -> None:
    found = ModuleLoader(nn.Linear(1, 1, bias=False), rename={"a": "b"}).preflight(
        offer({"a.x": torch.zeros(1), "weight": torch.zeros(1, 1)}), partial=False
    )
    assert found.problems == [
        "unknown name 'a.x' (renamed to 'b.x'): this worker has no such tensor"
    ]


def test_two_names_that_become_one_are_duplicates() -> None:
    found = ModuleLoader(nn.Linear(1, 1, bias=False), rename={"a": "", "b": ""}).preflight(
        offer({"a.weight": torch.zeros(1, 1), "b.weight": torch.zeros(1, 1)}), partial=False
    )
    assert found.problems == ["'b.weight' and 'a.weight' both become 'weight' here: duplicate name"]


# --- bytes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 100])
@pytest.mark.parametrize("staged", [False, True])
def test_every_dtype_and_shape_arrives_bit_for_bit(chunk: int, staged: bool) -> None:
    given = {}
    for seed, dtype in enumerate(DTYPES):
        base = random_base(dtype, seed)
        given[f"t{seed}"] = base
        given[f"scalar{seed}"] = base[0, 0, 0, 0].clone()
        given[f"empty{seed}"] = base[:, :0].clone()
    model = Tensors(**{name: tensor.clone() for name, tensor in given.items()})
    poison(model)
    before = [(id(t), t.data_ptr()) for t in model.state_dict(keep_vars=True).values()]
    sync(ModuleLoader(model, staged=staged), given, chunk=chunk)
    assert_same_bytes({name: model.state_dict()[name] for name in given}, given)
    # written in place: whoever holds the live tensors (optimisers, graphs) holds the new values
    assert before == [(id(t), t.data_ptr()) for t in model.state_dict(keep_vars=True).values()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("chunk", [1, 2, 3])
def test_the_order_of_arrival_does_not_matter(order: tuple[int, ...], chunk: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    given = fresh(lambda: nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False)), 5)
    poison(model)
    sync(ModuleLoader(model), given, order=order, chunk=chunk)
    assert_same_bytes(model.state_dict(), given)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("staged", [False, True])
def test_parameters_of_any_layout_are_written_and_nothing_around_them(
    layout: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, staged: bool
) -> None:
    base = random_base(dtype)
    model = Tensors(x=layout(base))
    storage = model.x.detach().untyped_storage()
    poison(model)
    before = bytes(storage)
    given = layout(random_base(dtype, seed=1)).contiguous()
    sync(ModuleLoader(model, staged=staged), {"x": given})
    assert_same_bytes({"x": model.x}, {"x": given})
    # the rest of the memory that it is a view of
    own = torch.zeros(len(before) // dtype.itemsize, dtype=torch.bool)
    own.as_strided(model.x.shape, model.x.stride(), model.x.storage_offset()).fill_(True)
    rest = own.logical_not().repeat_interleave(dtype.itemsize).tolist()
    after = bytes(storage)
    assert [b for b, keep in zip(after, rest, strict=True) if keep] == [
        b for b, keep in zip(before, rest, strict=True) if keep
    ]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("staged", [True, False])
def test_an_expanded_tensor_refuses_values_that_differ_where_it_cannot(
    verify: bool, staged: bool
) -> None:
    model = Tensors(x=torch.zeros(1, 2).expand(3, 2))
    loader = ModuleLoader(model, verify=verify, staged=staged)
    given = torch.zeros(3, 2)
    given[2, 1] = 1
    go(loader, offer({"x": given}))
    with pytest.raises(ContractError, match="'x' is an expanded tensor here"):
        loader.load([(0, given)])


def test_inference_tensors_are_written() -> None:
    with torch.inference_mode():
        model = Tensors(
            x=torch.zeros(2, 3), w=torch.zeros(4, 2), n=torch.zeros(2, dtype=torch.int8)
        )
    rules = [FuseRule("w", ("a", "b"))]
    given = {
        "x": torch.ones(2, 3),
        "a": torch.ones(1, 2),
        "b": torch.full((3, 2), 2.0, dtype=torch.float64),
        "n": torch.tensor([3, 4], dtype=torch.int8),
    }
    for staged in (False, True):
        with torch.inference_mode():
            poison(model)
        sync(ModuleLoader(model, fuse=rules, staged=staged), given)
        expected = torch.cat([given["a"], given["b"].float()])
        assert_same_bytes(model.state_dict(), {"x": given["x"], "w": expected, "n": given["n"]})


def test_gradients_and_flags_are_left() -> None:
    model = nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    sync(ModuleLoader(model), {"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    assert model.weight.grad is gradient
    assert raw_bytes(gradient) == raw_bytes(torch.ones(1, 2))
    assert model.weight.requires_grad
    assert model.weight.is_leaf


def test_the_live_tensors_are_looked_up_each_round() -> None:
    model = nn.Linear(2, 1, bias=False)
    sync(ModuleLoader(model), {"weight": torch.ones(1, 2)})
    model.weight = nn.Parameter(torch.zeros(1, 2))
    sync(ModuleLoader(model), {"weight": torch.full((1, 2), 2.0)})
    assert raw_bytes(model.weight) == raw_bytes(torch.full((1, 2), 2.0))


# --- casts ----------------------------------------------------------------------------------


def specials(dtype: torch.dtype) -> torch.Tensor:
    """Values that round, overflow and vanish, and NaNs of many payloads, in a length that no
    vector width divides."""
    item = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    nan = torch.tensor(float("nan"), dtype=dtype).view(item)
    nans = (nan + torch.arange(1, 30, dtype=item)).view(dtype)
    values = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    noise = torch.randn(84, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = torch.cat([values, nans, -nans, noise.to(dtype)])
    return torch.cat([found, found[:-1]]).view(3, -1)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "fused"])
@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(FLOATS, 2)), ids=str)
def test_casts_are_exactly_tensor_to(
    source: torch.dtype, target: torch.dtype, layout: str, staged: bool, verify: bool
) -> None:
    given = specials(source)
    rows, columns = given.shape
    place = {
        "contiguous": lambda: torch.zeros(rows, columns, dtype=target),
        "transposed": lambda: torch.zeros(columns, rows, dtype=target).t(),
        "strided": lambda: torch.zeros(rows, 2 * columns, dtype=target)[:, ::2],
        "fused": lambda: torch.zeros(rows, 2 * columns, dtype=target),
    }[layout]()
    model = Tensors(x=place)
    poison(model)
    fused = layout == "fused"
    loader = ModuleLoader(
        model,
        fuse=[FuseRule("x", ("a", "b"), dim=1)] if fused else [],
        verify=verify,
        staged=staged,
    )
    tensors = {"a": given, "b": given.flip(0).contiguous()} if fused else {"x": given}
    found = go(loader, offer(tensors))
    pair = f"{source} -> {target}".replace("torch.", "")
    assert found.casts == dict.fromkeys(tensors, pair)
    feed(loader, list(tensors.values()))
    if verify:
        assert loader.loaded_digests() == [digest(tensor) for tensor in tensors.values()]
    loader.commit()
    expected = torch.cat([tensor.to(target) for tensor in tensors.values()], dim=1)
    assert_same_bytes({"x": model.x}, {"x": expected})


REFUSED = [
    (a, b) for a, b in itertools.permutations(DTYPES, 2) if not (a in FLOATS and b in FLOATS)
]


def test_every_other_pair_of_dtypes_is_refused() -> None:
    assert len(REFUSED) == len(DTYPES) * (len(DTYPES) - 1) - 12
    model = nn.Module()
    for i, (_, target) in enumerate(REFUSED):
        model.register_buffer(f"t{i}", torch.empty(2, dtype=target))
    given = {f"t{i}": torch.empty(2, dtype=source) for i, (source, _) in enumerate(REFUSED)}
    found = ModuleLoader(model).preflight(offer(given), partial=False)
    assert found.casts == {}
    assert found.problems == [
        f"dtype mismatch at 't{i}': expected {target}, offered {source} ".replace("torch.", "")
        + "(only fp64, fp32, fp16 and bf16 are cast)"
        for i, (source, target) in enumerate(REFUSED)
    ]


# --- ties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_both_sides_tied(staged: bool, dtype: torch.dtype) -> None:
    model = Tied()
    poison(model)
    given = {name: t.to(dtype) for name, t in fresh(Tied, 3).items() if name != "lm_head.weight"}
    sync(ModuleLoader(model, staged=staged), given, aliases={"embed.weight": ("lm_head.weight",)})
    assert model.lm_head.weight is model.embed.weight
    expected = {name: t.float() for name, t in given.items()}
    expected["lm_head.weight"] = expected["embed.weight"]
    assert_same_bytes(model.state_dict(), expected)


@pytest.mark.parametrize("name", ["embed.weight", "lm_head.weight"])
def test_one_name_of_a_tie_is_enough(name: str) -> None:
    model = Tied()
    poison(model)
    given = {name: torch.ones(5, 3), "norm.weight": torch.zeros(3), "norm.bias": torch.zeros(3)}
    sync(ModuleLoader(model), given)
    assert model.lm_head.weight is model.embed.weight
    assert raw_bytes(model.embed.weight) == raw_bytes(torch.ones(5, 3))


@pytest.mark.parametrize("staged", [False, True])
def test_a_tied_trainer_fills_both_of_an_untied_worker(staged: bool) -> None:
    model = Tied(tied=False)
    model.lm_head.weight.data = model.lm_head.weight.data.double()
    poison(model)
    given = {name: t for name, t in fresh(Tied, 4).items() if name != "lm_head.weight"}
    loader = ModuleLoader(model, staged=staged)
    sync(loader, given, aliases={"embed.weight": ("lm_head.weight",)})
    assert raw_bytes(model.embed.weight) == raw_bytes(given["embed.weight"])
    assert raw_bytes(model.lm_head.weight) == raw_bytes(given["embed.weight"].double())


def test_an_untied_trainer_with_equal_values_fits_a_tied_worker() -> None:
    model = Tied()
    poison(model)
    given = fresh(Tied, 5)
    sync(ModuleLoader(model), given)
    assert_same_bytes(model.state_dict(), given)
    assert model.lm_head.weight is model.embed.weight


@pytest.mark.parametrize("staged", [False, True])
def test_an_untied_trainer_with_other_values_is_found_out(staged: bool) -> None:
    model = Tied()
    given = fresh(lambda: Tied(tied=False), 6)
    loader = ModuleLoader(model, staged=staged)
    go(loader, offer(given))
    feed(loader, list(given.values()))
    found = dict(zip(given, loader.loaded_digests() or [], strict=True))
    wrong = [name for name, tensor in given.items() if found[name] != digest(tensor)]
    assert wrong == ["embed.weight"]  # the later one won


# --- partial --------------------------------------------------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_partial_writes_what_is_offered_and_reports_the_rest(staged: bool) -> None:
    model = Tied()
    poison(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = ModuleLoader(model, staged=staged)
    given = {"norm.bias": torch.arange(3.0)}
    found = go(loader, offer(given), partial=True)
    assert found.kept == ["embed.weight", "norm.weight"]
    feed(loader, list(given.values()))
    loader.commit()
    assert_same_bytes(model.state_dict(), {**before, **given})


def test_partial_refuses_what_it_does_not_know() -> None:
    found = ModuleLoader(Tied()).preflight(
        offer({"norm.bias": torch.zeros(3), "nor.bias": torch.zeros(3)}), partial=True
    )
    assert found.problems == ["unknown name 'nor.bias': this worker has no such tensor"]
    assert found.kept == ["embed.weight", "norm.weight"]


# --- fusing ---------------------------------------------------------------------------------

QKV = FuseRule("*.qkv.weight", ("*.q.weight", "*.k.weight", "*.v.weight"))
QKV_BIAS = FuseRule("*.qkv.bias", ("*.q.bias", "*.k.bias", "*.v.bias"))
EXPERTS = FuseRule("*.experts", ("*.experts.{}.weight",), stack=True)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.ModuleDict({"qkv": nn.Linear(3, 8)})
        self.b = nn.ModuleDict({"qkv": nn.Linear(3, 8)})
        self.moe = nn.Module()
        self.moe.experts = nn.Parameter(torch.zeros(3, 2, 4))
        self.norm = nn.LayerNorm(2)


def parts(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    found = {}
    for block in "ab":
        for name, size in (("q", 4), ("k", 2), ("v", 2)):
            found[f"{block}.{name}.weight"] = torch.randn(size, 3)
            found[f"{block}.{name}.bias"] = torch.randn(size)
    for i in range(3):
        found[f"moe.experts.{i}.weight"] = torch.randn(2, 4)
    found["norm.weight"], found["norm.bias"] = torch.randn(2), torch.randn(2)
    return {name: tensor.to(dtype) for name, tensor in found.items()}


def fused(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {
        f"{block}.qkv.{kind}": torch.cat([given[f"{block}.{name}.{kind}"] for name in "qkv"])
        for block in "ab"
        for kind in ("weight", "bias")
    }
    found["moe.experts"] = torch.stack([given[f"moe.experts.{i}.weight"] for i in range(3)])
    return {**found, "norm.weight": given["norm.weight"], "norm.bias": given["norm.bias"]}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fused_parameters_whatever_the_order_and_the_buckets(
    seed: int, chunk: int, staged: bool, dtype: torch.dtype
) -> None:
    model = Fused()
    poison(model)
    given = parts(seed, dtype)
    shuffled = torch.randperm(len(given), generator=torch.Generator().manual_seed(seed)).tolist()
    names = list(given)
    given = {names[i]: given[names[i]] for i in shuffled}  # the offer's order differs too
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(99 + seed)).tolist()
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS], staged=staged)
    sync(loader, given, order=order, chunk=chunk)
    assert_same_bytes(
        model.state_dict(), {name: fused(given)[name].float() for name in model.state_dict()}
    )


@pytest.mark.parametrize("dim", [1, -1, 2, -2])
@pytest.mark.parametrize("staged", [False, True])
def test_parts_side_by_side_along_any_dim(dim: int, staged: bool) -> None:
    shape = [2, 3, 4]
    sizes = [[2, 3, 4], [2, 3, 4]]
    axis = dim % 3
    sizes[0][axis], sizes[1][axis] = 1, shape[axis] - 1
    given = {"a": torch.randn(sizes[0]), "b": torch.randn(sizes[1])}
    model = Tensors(w=torch.zeros(shape))
    poison(model)
    sync(ModuleLoader(model, fuse=[FuseRule("w", ("a", "b"), dim=dim)], staged=staged), given)
    assert raw_bytes(model.w) == raw_bytes(torch.cat(list(given.values()), dim=dim))


@pytest.mark.parametrize("layout", ["transposed", "strided", "offset", "channels last"])
@pytest.mark.parametrize("staged", [False, True])
def test_fused_parameters_of_any_layout(layout: str, staged: bool) -> None:
    model = Tensors(w=LAYOUTS[layout](random_base(torch.float32)))
    poison(model)
    whole = LAYOUTS[layout](random_base(torch.float32, seed=1)).contiguous()
    expected = raw_bytes(whole)
    size = whole.shape[3]
    given = {"a": whole[..., :1].contiguous(), "b": whole[..., 1:].contiguous()}
    assert size > 1
    sync(ModuleLoader(model, fuse=[FuseRule("w", ("a", "b"), dim=3)], staged=staged), given)
    assert raw_bytes(model.w) == expected


def test_a_fused_parameter_may_be_offered_whole() -> None:
    model = Fused()
    poison(model)
    given = fused(parts(1))
    sync(ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS]), given)
    assert_same_bytes({name: model.state_dict()[name] for name in given}, given)


def test_a_fused_parameter_that_is_tied_takes_its_parts_under_either_name() -> None:
    model = Fused()
    model.b = model.a
    poison(model)
    given = parts(2)
    one = {name: t for name, t in given.items() if not name.startswith("b.")}
    rules = [QKV, QKV_BIAS, EXPERTS]
    sync(ModuleLoader(model, fuse=rules), one)
    assert raw_bytes(model.b.qkv.weight) == raw_bytes(fused(given)["a.qkv.weight"])
    poison(model)
    aliases = {name: ("b" + name[1:],) for name in one if name.startswith("a.")}
    sync(ModuleLoader(model, fuse=rules), one, aliases=aliases)
    assert raw_bytes(model.b.qkv.weight) == raw_bytes(fused(given)["a.qkv.weight"])
    assert model.b.qkv.weight is model.a.qkv.weight


@pytest.mark.parametrize("partial", [False, True])
def test_what_is_wrong_with_parts(partial: bool) -> None:
    given = parts(0)
    del given["a.k.weight"]
    given["b.v.weight"] = torch.zeros(3, 3)
    given["a.v.bias"] = torch.zeros(1)
    given["b.q.bias"] = torch.zeros(4, dtype=torch.int8)
    given["moe.experts.1.weight"] = torch.zeros(4, 2)
    given["moe.experts.3.weight"] = torch.zeros(2, 4)
    found = ModuleLoader(Fused(), fuse=[QKV, QKV_BIAS, EXPERTS]).preflight(
        offer(given), partial=partial
    )
    assert found.problems == [
        "unknown name 'moe.experts.3.weight': this worker has no such tensor",
        "missing name 'a.k.weight': 'a.qkv.weight' is made of ['a.q.weight', 'a.k.weight', "
        "'a.v.weight'] and all its parts must be offered together",
        "shape mismatch at 'a.qkv.bias': its parts ['a.q.bias', 'a.k.bias', 'a.v.bias'] add up to "
        "7 along dim 0, expected 8",
        "shape mismatch at 'b.v.weight': the parts of 'b.qkv.weight' [8, 3] add up to more than it "
        "along dim 0",
        "dtype mismatch at 'b.q.bias': expected float32, offered int8 (only fp64, fp32, fp16 and "
        "bf16 are cast)",
        "shape mismatch at 'moe.experts.1.weight': expected [2, 4], offered [4, 2]",
    ]


def test_parts_with_other_dimensions_are_refused() -> None:
    model = Tensors(w=torch.zeros(4, 3))
    given = {"a": torch.zeros(()), "b": torch.zeros(4), "c": torch.zeros(1, 1, 3)}
    rule = FuseRule("w", ("a", "b", "c"))
    found = ModuleLoader(model, fuse=[rule]).preflight(offer(given), partial=False)
    assert found.problems == [
        "shape mismatch at 'a': expected [0, 3], offered []",
        "shape mismatch at 'b': expected [4, 3], offered [4]",
        "shape mismatch at 'c': the parts of 'w' [4, 3] add up to more than it along dim 0",
    ]


def test_partial_takes_all_parts_of_one_target() -> None:
    model = Fused()
    poison(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = {name: t for name, t in parts(4).items() if name.startswith("a.") and "bias" in name}
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS])
    assert go(loader, offer(given), partial=True).kept == [
        "a.qkv.weight",
        "b.qkv.weight",
        "b.qkv.bias",
        "moe.experts",
        "norm.weight",
        "norm.bias",
    ]
    feed(loader, list(given.values()))
    expected = torch.cat([given[f"a.{name}.bias"] for name in "qkv"])
    assert_same_bytes(model.state_dict(), {**before, "a.qkv.bias": expected})


def test_whole_and_in_parts_is_a_duplicate() -> None:
    given = {**parts(0), "a.qkv.weight": torch.zeros(8, 3)}
    found = ModuleLoader(Fused(), fuse=[QKV, QKV_BIAS, EXPERTS]).preflight(
        offer(given), partial=False
    )
    assert found.problems == [
        "duplicate name 'a.q.weight': 'a.qkv.weight' is offered both whole and in parts"
    ]


def test_a_rule_leaves_names_alone_that_the_worker_has() -> None:
    """One rule for all layers, some of which are not fused."""
    model = nn.ModuleDict(
        {
            "a": nn.ModuleDict({"qkv": nn.Linear(3, 8, bias=False)}),
            "b": nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "qkv"}),
        }
    )
    poison(model)
    given = {
        name: tensor
        for name, tensor in parts(6).items()
        if name in ("a.q.weight", "a.k.weight", "a.v.weight")
    }
    given |= {f"b.{name}.weight": torch.randn(2, 3) for name in "qkv"}
    sync(ModuleLoader(model, fuse=[QKV]), given)
    state = model.state_dict()
    assert raw_bytes(state["a.qkv.weight"]) == raw_bytes(
        torch.cat([given[f"a.{name}.weight"] for name in "qkv"])
    )
    for name in "qkv":
        assert raw_bytes(state[f"b.{name}.weight"]) == raw_bytes(given[f"b.{name}.weight"])


def test_patterns() -> None:
    weight = torch.zeros(8, 3)
    assert QKV.parts_of("x.y.qkv.weight", weight) == [
        "x.y.q.weight",
        "x.y.k.weight",
        "x.y.v.weight",
    ]
    for name in ("qkv.weight", "x.qkv.weights", "x.qkv.bias", ".weight"):
        assert QKV.parts_of(name, weight) is None
    assert FuseRule("w", ("a", "b")).parts_of("w", weight) == ["a", "b"]
    assert FuseRule("w", ("a", "b")).parts_of("ww", weight) is None
    assert FuseRule("w*w", ("a*",)).parts_of("w", weight) is None  # the ends may not overlap
    assert FuseRule("w*w", ("a*",)).parts_of("ww", weight) == ["a"]
    assert EXPERTS.parts_of("m.experts", torch.zeros(2, 1)) == [
        "m.experts.0.weight",
        "m.experts.1.weight",
    ]
    # a parameter that lacks the dimension is another one
    assert FuseRule("*.w", ("*.a",), dim=1).parts_of("x.w", torch.zeros(3)) is None
    assert FuseRule("*.w", ("*.{}",), stack=True).parts_of("x.w", torch.zeros(())) is None


@pytest.mark.parametrize(
    "rule",
    [
        {"parts": ()},
        {"parts": "a"},
        {"parts": ("a",), "stack": True},
        {"parts": ("a.{}", "b.{}"), "stack": True},
        {"parts": (), "stack": True},
    ],
)
def test_a_rule_without_sense_is_refused(rule: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="fuse rule for 'w'"):
        FuseRule("w", **rule)


# --- staged ---------------------------------------------------------------------------------


def test_staged_weights_are_live_at_commit_and_not_before() -> None:
    model = Tied()
    poison(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    given = fresh(Tied, 8)
    del given["lm_head.weight"]
    loader = ModuleLoader(model, staged=True)
    go(loader, offer(given, {"embed.weight": ("lm_head.weight",)}))
    feed(loader, list(given.values()))
    assert loader.loaded_digests() == [digest(tensor) for tensor in given.values()]
    assert_same_bytes(model.state_dict(), before)
    assert not loader.touched
    loader.commit()
    assert_same_bytes(model.state_dict(), {**given, "lm_head.weight": given["embed.weight"]})
    loader.commit()  # once more changes nothing
    assert_same_bytes(model.state_dict(), {**given, "lm_head.weight": given["embed.weight"]})


def test_staged_weights_that_are_discarded_leave_nothing() -> None:
    model = Fused()
    poison(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS], staged=True)
    given = parts(3)
    go(loader, offer(given))
    feed(loader, list(given.values())[:5])
    landing = loader.landing(6)
    assert landing is not None
    landing.fill_(1)
    assert not loader.touched
    loader.discard()
    loader.commit()
    assert_same_bytes(model.state_dict(), before)


def test_in_place_loads_say_that_they_have_begun() -> None:
    model = nn.Linear(2, 1)
    loader = ModuleLoader(model)
    given = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    go(loader, offer(given))
    assert not loader.touched
    loader.load([(1, given["bias"])])
    assert loader.touched


# --- landing: bytes written straight into the parameter -------------------------------------


@pytest.mark.parametrize("staged", [False, True])
def test_bytes_may_land_directly(staged: bool) -> None:
    model = Fused()
    poison(model)
    given = parts(11)
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS], staged=staged)
    go(loader, offer(given))
    for index, tensor in enumerate(given.values()):
        place = loader.landing(index)
        assert place is not None
        assert (place.dtype, place.shape) == (torch.uint8, (4 * tensor.numel(),))
        place.copy_(torch.frombuffer(bytearray(raw_bytes(tensor)), dtype=torch.uint8))
        loader.landed(index)
    assert loader.touched is not staged
    assert loader.loaded_digests() == [digest(tensor) for tensor in given.values()]
    assert loader.unproven() == []
    loader.commit()
    assert_same_bytes(model.state_dict(), {name: fused(given)[name] for name in model.state_dict()})


def test_where_bytes_may_not_land() -> None:
    with torch.inference_mode():
        inference = torch.zeros(2)
    model = Tensors(
        cast=torch.zeros(2),
        strided=torch.zeros(3, 2).t(),
        conj=torch.zeros(2, dtype=torch.complex64).conj(),
        one=torch.zeros(2),
        two=torch.zeros(2),
    )
    model.register_buffer("inference", inference)
    given = {
        "cast": torch.zeros(2, dtype=torch.float64),
        "strided": torch.zeros(2, 3),
        "conj": torch.zeros(2, dtype=torch.complex64),
        "inference": torch.zeros(2),
        "one": torch.zeros(2),
    }
    loader = ModuleLoader(model)
    go(loader, offer(given, {"one": ("two",)}))
    assert [loader.landing(index) for index in range(5)] == [None] * 5
    assert not loader.touched


def test_a_landing_that_was_never_completed_is_not_proven() -> None:
    model = nn.Linear(2, 1)
    loader = ModuleLoader(model)
    given = {"weight": torch.ones(1, 2), "bias": torch.ones(1)}
    go(loader, offer(given))
    assert loader.landing(0) is not None
    loader.load([(1, given["bias"])])
    assert loader.unproven() == ["weight"]


# --- proof ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.qkv.weight", "moe.experts", "norm.bias"])
def test_a_parameter_that_is_overwritten_later_is_found_out(name: str) -> None:
    model = Fused()
    given = parts(12)
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS])
    go(loader, offer(given))
    feed(loader, list(given.values()))
    with torch.no_grad():
        model.get_parameter(name).view(-1)[0] += 1
    found = loader.loaded_digests()
    assert found is not None
    wrong = [n for n, d in zip(given, found, strict=True) if d != digest(given[n])]
    first = {"a.qkv.weight": "a.q.weight", "moe.experts": "moe.experts.0.weight"}
    assert wrong == [first.get(name, name)]


def test_a_cast_parameter_that_is_overwritten_later_is_found_out() -> None:
    model = nn.Linear(3, 1, bias=False)
    loader = ModuleLoader(model)
    given = {"weight": torch.randn(1, 3, dtype=torch.float64)}
    go(loader, offer(given))
    feed(loader, list(given.values()))
    assert loader.loaded_digests() == [digest(given["weight"])]
    with torch.no_grad():
        model.weight[0, 2] += 1
    with pytest.raises(ContractError, match="digest mismatch at 'weight'") as caught:
        loader.loaded_digests()
    assert caught.value.name == "weight"


def test_a_cast_parameter_that_was_never_written_is_found_out() -> None:
    loader = ModuleLoader(nn.Linear(1, 1, bias=False))
    go(loader, offer({"weight": torch.zeros(1, 1, dtype=torch.float64)}))
    with pytest.raises(ContractError, match="digest mismatch at 'weight'"):
        loader.loaded_digests()


def test_untied_copies_that_differ_are_found_out() -> None:
    model = Tied(tied=False)
    given = {name: t for name, t in fresh(Tied, 4).items() if name != "lm_head.weight"}
    loader = ModuleLoader(model)
    go(loader, offer(given, {"embed.weight": ("lm_head.weight",)}))
    feed(loader, list(given.values()))
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    with pytest.raises(ContractError, match=r"'lm_head\.weight': it differs from its tied names"):
        loader.loaded_digests()


def test_what_was_not_written_is_named() -> None:
    model = Fused()
    given = parts(0)
    loader = ModuleLoader(model, fuse=[QKV, QKV_BIAS, EXPERTS])
    go(loader, offer(given))
    left = [list(given).index("a.k.weight"), list(given).index("norm.bias")]
    feed(loader, list(given.values()), order=[i for i in range(len(given)) if i not in left])
    assert loader.unproven() == ["a.qkv.weight", "norm.bias"]


# --- what one round remembers for the next --------------------------------------------------


class Rounds:
    """Loads of one model, each by a new loader, with the memory that a session keeps between."""

    def __init__(self, model: nn.Module, tensors: dict[str, torch.Tensor], **options: Any) -> None:
        self.model, self.options, self.memo = model, options, {}
        self.offer = tuple(offer(tensors))

    def load(self, tensors: dict[str, torch.Tensor], **options: Any) -> ModuleLoader:
        loader = ModuleLoader(self.model, **{**self.options, **options})
        found = loader.preflight(self.offer, partial=False, memo=self.memo)
        assert found.problems == []
        feed(loader, list(tensors.values()))
        if options.get("verify", True):
            assert loader.loaded_digests() == [digest(tensor) for tensor in tensors.values()]
        assert loader.unproven() == []
        loader.commit()
        return loader


RULES = [QKV, QKV_BIAS, EXPERTS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rounds_in_any_mode_follow_each_other(dtype: torch.dtype) -> None:
    """The modes share the memory: a staged round leaves nothing that misleads one in place."""
    model = Fused()
    rounds = Rounds(model, parts(0, dtype), fuse=RULES)
    modes = [
        {"staged": staged, "verify": verify} for staged in (True, False) for verify in (True, False)
    ]
    for seed, mode in enumerate([*modes, *modes[::-1], *modes]):
        poison(model)
        given = parts(seed, dtype)
        rounds.load(given, **mode)
        expected = {name: fused(given)[name].float() for name in model.state_dict()}
        assert_same_bytes(model.state_dict(), expected)


def test_the_answer_is_the_same_as_without_memory() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    metadata = tuple(offer({"0.weight": torch.zeros(2, 2, dtype=torch.float64)}))
    memo: dict[str, Any] = {}
    for _ in range(3):
        found = ModuleLoader(model).preflight(metadata, partial=True, memo=memo)
        assert found.problems == []
        assert found.casts == {"0.weight": "float64 -> float32"}
        assert found.kept == ["0.bias", "1.weight", "1.bias"]
        found.casts.clear()  # what a caller does with an answer does not change the next one
        found.kept.clear()
    assert len(ModuleLoader(model).preflight(metadata, partial=False, memo=memo).problems) == 3
    other = tuple(offer({"0.bias": torch.zeros(2)}))
    assert ModuleLoader(model).preflight(other, partial=True, memo=memo).kept == [
        "0.weight",
        "1.weight",
        "1.bias",
    ]


def test_a_cast_of_an_earlier_round_proves_nothing() -> None:
    given = {"weight": torch.ones(1, 1, dtype=torch.float64)}
    rounds = Rounds(nn.Linear(1, 1, bias=False), given)
    rounds.load(given)
    loader = ModuleLoader(rounds.model)
    loader.preflight(rounds.offer, partial=False, memo=rounds.memo)
    with pytest.raises(ContractError, match="digest mismatch at 'weight'"):
        loader.loaded_digests()


def replaced(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(2, 3))


def repointed(model: nn.Linear) -> None:
    model.weight.data = torch.zeros(2, 3)


def restrided(model: nn.Linear) -> None:
    """In the same memory, as loaders do that repack what they have loaded."""
    model.weight.data = model.weight.data.view(3, 2).t()


def widened(model: nn.Linear) -> None:
    model.weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.float64))


def tied(model: nn.Linear) -> None:
    model.register_parameter("other", model.weight)


@pytest.mark.parametrize("change", [replaced, repointed, restrided, widened, tied])
@pytest.mark.parametrize("staged", [False, True])
def test_a_model_that_changed_is_looked_at_anew(
    change: Callable[[nn.Linear], None], staged: bool
) -> None:
    model = nn.Linear(3, 2, bias=False)
    given = {"weight": torch.arange(6.0).view(2, 3)}
    rounds = Rounds(model, given, staged=staged)
    rounds.load(given)
    change(model)
    poison(model)
    rounds.load(given)
    assert raw_bytes(model.weight) == raw_bytes(given["weight"].to(model.weight.dtype))


@pytest.mark.parametrize("shape", [(3, 2), (6,), (1, 2, 3)])
def test_a_model_that_was_reshaped_in_its_memory_is_refused(shape: tuple[int, ...]) -> None:
    model = nn.Linear(3, 2, bias=False)
    given = {"weight": torch.arange(6.0).view(2, 3)}
    rounds = Rounds(model, given)
    rounds.load(given)
    model.weight.data = model.weight.data.view(shape)
    found = ModuleLoader(model).preflight(rounds.offer, partial=False, memo=rounds.memo)
    assert found.problems == [f"shape mismatch at 'weight': expected {list(shape)}, offered [2, 3]"]


def test_a_staged_round_keeps_no_copy_afterwards() -> None:
    model = nn.Linear(3, 2, bias=False)
    given = {"weight": torch.arange(6.0).view(2, 3)}
    rounds = Rounds(model, given, staged=True)
    for _ in range(2):
        loader = ModuleLoader(model, staged=True)
        loader.preflight(rounds.offer, partial=False, memo=rounds.memo)
        landing = loader.landing(0)
        assert landing is not None
        gone = weakref.ref(landing.untyped_storage())
        loader.commit()
        del loader, landing
        assert gone() is None


# --- OpaqueLoader ---------------------------------------------------------------------------

MADE_OF = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "o"}


class Opaque(nn.Module):
    """Fuses by itself, as vLLM's models do, and says what it wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3, 2))
        self.o = nn.Parameter(torch.zeros(2))
        self.tied = self.o
        self.calls: list[list[str]] = []

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        self.calls.append([name for name, _ in weights])
        written = set()
        for name, tensor in weights:
            with torch.no_grad():
                (self.o if name == "o" else self.qkv["qkv".index(name)]).copy_(tensor)
            written.add(MADE_OF[name])
        return written


OFFERED = {name: torch.full((2,), float(i)) for i, name in enumerate("qkvo", 1)}


def learn(model: Opaque) -> dict[str, frozenset[str]]:
    loader = OpaqueLoader(model.load_weights, module=model)
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()), chunk=3)
    assert loader.unproven() == []
    return loader.seen


def test_the_first_full_sync_learns_one_by_one() -> None:
    model = Opaque()
    assert learn(model) == {name: frozenset({target}) for name, target in MADE_OF.items()}
    assert model.calls == [["q"], ["k"], ["v"], ["o"]]
    assert raw_bytes(model.qkv) == raw_bytes(torch.tensor([[1.0, 1], [2, 2], [3, 3]]))


def test_later_syncs_hand_over_whole_buckets() -> None:
    model = Opaque()
    learned = learn(model)
    model.calls.clear()
    loader = OpaqueLoader(model.load_weights, module=model, learned=learned)
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()), chunk=3)
    assert model.calls == [["q", "k", "v"], ["o"]]
    assert loader.unproven() == []
    assert loader.seen == {}
    assert loader.loaded_digests() is None
    assert not loader.copies_only
    assert not loader.one_to_one


def test_a_full_sync_offers_what_the_last_one_did() -> None:
    model = Opaque()
    loader = OpaqueLoader(model.load_weights, module=model, learned=learn(model))
    given = {"q": OFFERED["q"], "new": OFFERED["q"], "v": OFFERED["v"]}
    found = loader.preflight(offer(given), partial=False)
    assert found.problems == [
        "unknown name 'new': the last full sync did not offer it",
        "missing name 'k': the last full sync offered it",
        "missing name 'o': the last full sync offered it",
    ]
    assert found.first_name == "new"


def test_partial_needs_all_parts_of_what_it_touches() -> None:
    model = Opaque()
    learned = learn(model)
    loader = OpaqueLoader(model.load_weights, module=model, learned=learned)
    found = loader.preflight(offer({"q": OFFERED["q"], "v": OFFERED["v"]}), partial=True)
    assert found.problems == [
        "missing name 'k': 'qkv' is made of ['q', 'k', 'v'] and all its parts must be offered together"
    ]
    loader = OpaqueLoader(model.load_weights, module=model, learned=learned)
    assert go(loader, offer({"o": OFFERED["o"]}), partial=True).kept == ["q", "k", "v"]
    feed(loader, [OFFERED["o"]])
    assert loader.unproven() is None
    loader = OpaqueLoader(model.load_weights, module=model, learned=learned)
    assert go(loader, offer({n: OFFERED[n] for n in "qkv"}), partial=True).kept == ["o"]
    found = OpaqueLoader(model.load_weights, learned=learned).preflight(
        offer({"x": OFFERED["o"]}), partial=True
    )
    assert found.problems == ["unknown name 'x': the last full sync did not offer it"]


def test_a_partial_sync_before_any_full_one_learns_nothing() -> None:
    model = Opaque()
    loader = OpaqueLoader(model.load_weights, module=model)
    assert go(loader, offer({"q": OFFERED["q"], "k": OFFERED["k"]}), partial=True).kept == []
    feed(loader, [OFFERED["q"], OFFERED["k"]])
    assert model.calls == [["q", "k"]]
    assert loader.seen == {}
    assert loader.unproven() is None


def test_an_opaque_loader_refuses_an_empty_full_offer() -> None:
    loader = OpaqueLoader(lambda weights: None)
    assert loader.preflight([], partial=False).problems == [
        "empty offer: a full sync has to offer every tensor of the worker"
    ]
    assert loader.preflight([], partial=True).problems == []


def test_parameters_that_were_not_written_are_named_a_tie_once() -> None:
    model = Opaque()
    loader = OpaqueLoader(model.load_weights, module=model)
    go(loader, offer(OFFERED))
    loader.load([(0, OFFERED["q"])])
    assert loader.unproven() == ["o"]
    loader = OpaqueLoader(lambda weights: {"tied"}, module=model)
    go(loader, offer(OFFERED))
    loader.load([(0, OFFERED["q"])])
    assert loader.unproven() == ["qkv"]


@pytest.mark.parametrize("kind", [set, frozenset, list, tuple])
def test_names_may_come_in_any_collection(kind: type) -> None:
    model = Opaque()
    loader = OpaqueLoader(lambda w: kind(MADE_OF[name] for name, _ in w), module=model)
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()))
    assert loader.unproven() == []
    assert loader.seen["q"] == frozenset({"qkv"})


@pytest.mark.parametrize(
    "result",
    [None, True, 4, "qkv", nn.Linear(1, 1).load_state_dict({}, strict=False), [1, 2], object()],
    ids=lambda x: type(x).__name__,
)
def test_a_loader_that_does_not_say_is_believed(result: Any) -> None:
    model = Opaque()
    loader = OpaqueLoader(lambda weights: result, module=model)
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()))
    assert loader.unproven() is None
    # what was offered is known all the same
    assert loader.seen == dict.fromkeys(OFFERED, frozenset())


def test_one_call_that_does_not_say_spoils_the_proof() -> None:
    results = iter([{"qkv"}, {"qkv"}, None, {"o"}])
    loader = OpaqueLoader(lambda weights: next(results), module=Opaque())
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()), chunk=1)
    assert loader.unproven() is None


def test_an_error_of_the_function_is_its_own() -> None:
    def fails(weights: list[tuple[str, torch.Tensor]]) -> None:
        raise KeyError(weights[0][0])

    loader = OpaqueLoader(fails)
    go(loader, offer(OFFERED))
    assert not loader.touched
    with pytest.raises(KeyError, match="'k'"):
        loader.load([(1, OFFERED["k"])])
    assert loader.touched


def test_lazy_bits_of_a_parameter_are_respected() -> None:
    base = torch.zeros(3, dtype=torch.complex64)
    model = Tensors(conj=base[:2].conj(), neg=base[2:].conj().imag)
    given = {"conj": torch.tensor([1 + 2j, -0.0 - 3j]), "neg": torch.tensor([4.0])}
    assert model.conj.is_conj()
    assert model.neg.is_neg()
    sync(ModuleLoader(model), given)
    assert_same_bytes({"conj": model.conj, "neg": model.neg}, given)


def test_without_a_module_nothing_is_proven() -> None:
    loader = OpaqueLoader(lambda weights: {"qkv", "o"})
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()))
    assert loader.unproven() is None


# --- StagedLoader: an opaque loader that is not called before commit ------------------------


def test_an_opaque_loader_may_be_kept_waiting_until_commit() -> None:
    model = Opaque()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loader = StagedLoader(OpaqueLoader(model.load_weights, module=model))
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()), chunk=3)
    assert model.calls == []
    assert not loader.touched
    assert_same_bytes(model.state_dict(), before)
    assert (loader.seen, loader.unproven(), loader.loaded_digests()) == ({}, None, None)
    assert not loader.copies_only
    loader.commit()
    assert model.calls == [["q"], ["k"], ["v"], ["o"]]
    assert loader.touched
    assert raw_bytes(model.qkv) == raw_bytes(torch.tensor([[1.0, 1], [2, 2], [3, 3]]))
    assert loader.seen == {name: frozenset({target}) for name, target in MADE_OF.items()}
    loader.commit()
    assert len(model.calls) == 4


def test_what_waits_can_be_discarded() -> None:
    model = Opaque()
    loader = StagedLoader(OpaqueLoader(model.load_weights, module=model, learned=learn(Opaque())))
    go(loader, offer(OFFERED))
    feed(loader, list(OFFERED.values()))
    loader.discard()
    with pytest.raises(ContractError, match="2 parameters were not written, the first is 'qkv'"):
        loader.commit()
    assert model.calls == []


def test_what_waits_has_the_same_preflight() -> None:
    loader = StagedLoader(OpaqueLoader(lambda w: None, learned=learn(Opaque())))
    found = loader.preflight(offer({"q": OFFERED["q"]}), partial=True)
    assert [p.partition(":")[0] for p in found.problems] == ["missing name 'k'"]
