"""Which stores fill a ring's slots: what is chosen, by the time that copies take; and that every choice
brings the right bytes."""

from __future__ import annotations

import itertools

import pytest
import torch

from rayxfer import WeightTransferConfig, copying
from rayxfer.engines import stores as module
from rayxfer.engines.stores import Stores
from rayxfer.testing import check_engine
from rayxfer.testing.local import LocalController
from tests.helpers import assert_same_bytes, poison

SLOT = 2 << 20
NEAR, FAR = (0.15, 0.12), (0.75, 0.12)
"""Milliseconds for a slot with usual stores and streamed: where caches are shared, and where not."""


class World:
    """A clock that only copies move."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, can: bool = True, slot_bytes: int = SLOT
    ) -> None:
        monkeypatch.setattr(module, "can_stream", lambda: can)
        self.now, self.asked = 0.0, 0
        self.stores = Stores(slot_bytes, self.clock)

    def clock(self) -> float:
        self.asked += 1
        return self.now

    def fill(self, costs: tuple[float, float], num_bytes: int = SLOT, parts: int = 1) -> bool:
        """One slot; whether it was streamed."""
        streamed = self.stores.begin()

        def copy(share: float) -> str:
            self.now += costs[streamed] * share
            return "done"

        self.now += 5  # waiting for the slot, and for the source
        for _ in range(parts):
            assert self.stores.timed(copy, num_bytes / SLOT / parts) == "done"
            self.stores.count(num_bytes // parts)
            self.now += 3
        self.stores.end()
        return streamed

    def run(self, costs: tuple[float, float], slots: int) -> int:
        """How many of them were streamed."""
        return sum(self.fill(costs) for _ in range(slots))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_where_caches_are_shared_the_bytes_stay_in_them(world: World) -> None:
    """Though streamed stores are a little faster for the writer."""
    assert world.run(NEAR, 100) == 2, "tried, to know"
    assert world.run(NEAR, 5000) <= 50


def test_where_they_are_not_nearly_every_slot_is_streamed(world: World) -> None:
    assert world.run(FAR, 10) >= 7
    assert world.run(FAR, 5000) >= 0.99 * 5000


def test_it_follows_where_cores_move(world: World) -> None:
    for _ in range(3):
        world.run(NEAR, 300)
        assert not world.stores.streamed
        assert world.run(FAR, 10) >= 7
        world.run(FAR, 300)
        assert world.stores.streamed
        assert world.run(NEAR, 600) <= 300, (
            "at the latest after so many, usual ones are tried again"
        )


def test_a_disturbed_copy_changes_nothing(world: World) -> None:
    world.run(NEAR, 10)
    for _ in range(20):
        assert not world.fill((5.0, 5.0))
        assert world.run(NEAR, 5) == 0
    assert not world.stores.streamed


def test_a_machine_that_is_slow_in_all_ways_changes_nothing(world: World) -> None:
    world.run(NEAR, 10)
    assert world.run((1.5, 1.2), 1000) <= 10
    assert not world.stores.streamed
    assert world.run(FAR, 1000) >= 700


@pytest.mark.parametrize("disturbed", range(4))
def test_a_trial_that_is_disturbed_decides_nothing(world: World, disturbed: int) -> None:
    for slot in range(4):
        world.fill((3.0, 3.0) if slot == disturbed else FAR)
    assert world.run(FAR, 100) >= 97
    for slot in range(600):
        world.fill((3.0, 3.0) if slot % 3 == disturbed else NEAR)
    assert not world.stores.streamed


def test_small_copies_say_nothing(world: World) -> None:
    assert not any(world.fill(FAR, 1000) for _ in range(100))
    world.run(FAR, 10)
    assert world.stores.streamed
    assert all(world.fill(FAR, 1000) for _ in range(300))


def test_slots_of_a_small_ring_are_judged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, slot_bytes=64 << 10)
    for _ in range(10):
        world.fill(FAR, 40 << 10)
    assert world.stores.streamed


def test_a_slot_of_many_copies_counts_as_one(world: World) -> None:
    found = [world.fill(FAR, parts=64) for _ in range(10)]
    assert sum(found) >= 7


def test_nothing_is_timed_where_nothing_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, can=False)
    assert world.run(FAR, 100) == 0
    assert not world.asked


@pytest.mark.parametrize("how", ["streamed", "usual", "in turns"])
def test_every_choice_brings_the_bytes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = itertools.count()
    chosen: list[bool] = []
    if copying._native is None:
        pytest.skip("copies.c was not built")
    (one_copy, many), streamed = copying._native, list[int]()

    def counted(to: int, source: int, size: int) -> None:
        streamed.append(size)
        one_copy(to, source, size)

    def counted_many(*args: int) -> None:
        streamed.extend([1] * args[-1])
        many(*args)

    monkeypatch.setattr(copying, "_native", (counted, counted_many))

    def begin(self: Stores) -> bool:
        chosen.append({"streamed": True, "usual": False}.get(how, next(turns) % 2 == 0))
        return chosen[-1]

    monkeypatch.setattr(Stores, "begin", begin)
    assert not check_engine("shm").failed
    assert chosen
    assert bool(streamed) == (how != "usual"), "what was chosen is what copied"
    streamed.clear()
    model, one, two = (torch.nn.ModuleDict() for _ in range(3))
    for index, module_ in enumerate((model, one, two)):
        torch.manual_seed(index)
        for number, size in enumerate((3_000_000, 17, 900_001, 5, 2_000_000, 400_000)):
            module_[f"m{number}"] = torch.nn.Linear(size, 1)
    for workers in ([one], [one, two]):
        with LocalController(workers, WeightTransferConfig(backend="shm")) as controller:
            for _ in range(3):
                for worker in workers:
                    poison(worker)
                report = controller.sync_weights(model)
                assert report.workers[0].verified == "loaded"
                for worker in workers:
                    assert_same_bytes(model.state_dict(), worker.state_dict())
    large = sum(size >= 1 << 18 for size in streamed)  # parts of tensors that no slot holds
    assert large == 0 if how == "usual" else large > 3


def test_copies_into_a_ring_are_timed_whatever_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors in parts, small ones packed, and what has to be looked at one by one."""
    seen: list[int] = []
    original = Stores.end

    def end(self: Stores) -> None:
        seen.append(self._num_bytes)
        original(self)

    monkeypatch.setattr(Stores, "end", end)
    for sizes in ((2_500_000,), (300,) * 4000, (300_000,) * 8):
        model = torch.nn.ParameterList(torch.randn(size) for size in sizes)
        worker = torch.nn.ParameterList(torch.randn(size) for size in sizes)
        for source in (model, dict(model.state_dict())):
            with LocalController([worker], WeightTransferConfig(backend="shm")) as controller:
                seen.clear()
                poison(worker)
                controller.sync_weights(source)
                assert_same_bytes(model.state_dict(), worker.state_dict())
            assert sum(seen) == 4 * sum(sizes)
