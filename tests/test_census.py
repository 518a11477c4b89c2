"""Whether a module changed: everything that could make an old answer wrong has to be noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer.census import Census
from rayxfer.loader import ModuleLoader
from rayxfer.source import ModuleSource, named_tensors
from tests.helpers import assert_same_bytes, poison


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("shown", torch.ones(2))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_parameter("missing", None)


def model() -> nn.Sequential:
    return nn.Sequential(Block(), nn.Sequential(Block(), nn.ReLU()))


def test_nothing_changed() -> None:
    one = model()
    census = Census(one)
    assert list(census.tensors) == list(named_tensors(one))
    assert census.holds(one)
    assert census.holds_memory(one)
    with torch.no_grad():
        one[0].square.weight.fill_(7)  # values are not its business
    assert census.holds(one)
    assert census.holds_memory(one)


def test_names_and_order_are_those_of_torch() -> None:
    one = model()
    one[0].square.weight = one[1][0].square.weight  # tied: both names
    parameters = dict(one.named_parameters(remove_duplicate=False))
    expected = [*parameters, *(k for k in one.state_dict() if k not in parameters)]
    assert list(named_tensors(one)) == expected
    assert named_tensors(one)["0.square.weight"] is one[1][0].square.weight


def parameter(one: Any) -> None:
    one[1][0].square.weight = nn.Parameter(one[1][0].square.weight.detach().clone())


def memory(one: Any) -> None:
    one[0].square.weight.data = one[0].square.weight.detach().clone()


def buffer(one: Any) -> None:
    one[0].shown = one[0].shown.clone()


def hidden_shown(one: Any) -> None:
    one[0]._non_persistent_buffers_set.discard("hidden")


def renamed(one: Any) -> None:
    tensor = one[0]._buffers.pop("shown")
    one[0].register_buffer("seen", tensor)


def swapped(one: Any) -> None:
    first, second = one[0].square, one[1][0].square
    one[0].square, one[1][0].square = second, first


def child(one: Any) -> None:
    one[1].append(nn.Linear(1, 1))


def given(one: Any) -> None:
    one[0].missing = nn.Parameter(torch.ones(1))


def gone(one: Any) -> None:
    one[0].square.bias = None


@pytest.mark.parametrize(
    "change",
    [parameter, memory, buffer, hidden_shown, renamed, swapped, child, given, gone],
    ids=lambda change: change.__name__,
)
def test_what_changed_is_noticed(change: Callable[[Any], None]) -> None:
    one = model()
    census = Census(one)
    change(one)
    assert not census.holds(one)
    assert not census.holds_memory(one)
    assert Census(one).holds(one)


def test_another_layout_of_the_same_memory_is_noticed() -> None:
    one = model()
    census = Census(one)
    weight = one[0].square.weight
    weight.data = weight.detach().t()
    assert not census.holds(one)
    census = Census(one)
    one[0].shown.data = one[0].shown.view(torch.int32)
    assert not census.holds(one)


def test_memory_that_moved_as_was_said_is_no_change() -> None:
    one = model()
    census, weight, other = Census(one), one[0].square.weight, one[0].shown
    weight.data = weight.detach().clone()
    census.moved({id(weight): weight.data_ptr()})
    assert census.holds(one)
    assert census.holds_memory(one)
    other.data = other.clone()  # but not another's
    assert not census.holds(one)
    assert not census.holds_memory(one)
    census.moved({id(other): other.data_ptr() + 8})
    assert not census.holds_memory(one)


def test_another_module_is_another() -> None:
    one = model()
    assert not Census(one).holds(model())


class Renames(nn.Module):
    """Names its parameters its own way, as wrappers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, one in super().named_parameters(*args, **kwargs):
            yield name.removeprefix("inner."), one


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "one",
    [
        Renames(),
        torch.jit.script(nn.Linear(2, 2)),
        nn.Linear(2, 2, device="meta"),
        nn.ParameterList([nn.Parameter(torch.ones(2).as_subclass(Strange))]),
    ],
    ids=["renames", "scripted", "meta", "subclass"],
)
def test_modules_of_other_kinds_are_looked_at_every_time(one: nn.Module) -> None:
    census = Census(one)
    assert not census.holds(one)
    assert not census.holds_memory(one)
    assert list(census.tensors) == list(named_tensors(one))


def test_names_of_a_module_with_its_own() -> None:
    assert list(named_tensors(Renames())) == ["weight", "bias"]


def test_digests_are_of_what_the_module_holds_now() -> None:
    """The memo of an earlier preflight must not be what is digested."""
    one, other = model(), model()
    metadata = tuple(ModuleSource(one).metadata())
    memo: dict[str, Any] = {}
    for _ in range(2):
        loader = ModuleLoader(one)
        assert not loader.preflight(metadata, partial=False, memo=memo).problems
        tensors = [tensor for _, tensor in ModuleSource(other)]
        loader.load(list(enumerate(tensors)))
        assert loader.loaded_digests() == digests_of(other)
    memory(one)
    with torch.no_grad():
        one[0].square.weight.zero_()
    assert loader.loaded_digests() != digests_of(other)
    assert loader.loaded_digests() == digests_of(one)


def digests_of(of: nn.Module) -> list[int]:
    from rayxfer.digest import digest

    return [digest(tensor) for _, tensor in ModuleSource(of)]


def test_loading_after_a_change_reaches_the_new_tensors() -> None:
    one, other = model(), model()
    metadata = tuple(ModuleSource(one).metadata())
    memo: dict[str, Any] = {}
    for change in (lambda x: None, parameter, memory, buffer):
        change(one)
        poison(one)
        loader = ModuleLoader(one)
        assert not loader.preflight(metadata, partial=False, memo=memo).problems
        loader.load(list(enumerate(tensor for _, tensor in ModuleSource(other))))
        assert_same_bytes(named_tensors(other), named_tensors(one))
        assert loader.unproven() == []
