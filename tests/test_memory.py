"""What a handle remembers, and a coordinator that has forgotten: without Ray. Real kills: test_faults."""

from __future__ import annotations

import pickle
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from rayxfer import WeightTransferConfig
from rayxfer.binding import Binding
from rayxfer.client import InProcessClient
from rayxfer.coordinator import Coordinator, RosterNeeded
from rayxfer.memory import Memory
from rayxfer.session import WorkerSession
from rayxfer.topology import local_facts

CONFIG = WeightTransferConfig(backend="gloo")


def worker() -> InProcessClient:
    return InProcessClient(WorkerSession(Binding(torch.nn.Linear(2, 2))))


def coordinator(*workers: Any) -> Coordinator:
    """Always the same controller, as after a restart."""
    return Coordinator("it", list(workers), CONFIG, controller_id="id")


def commit(made: Coordinator, version: int) -> None:
    """A round that only the controller has heard of."""
    process = local_facts().to_wire()
    request = {"version": version, "process": process, "partial": False, "roster": None}
    claim = {**made.begin(request), "process": process}
    made.commit(claim)
    made.settle(claim, [])


def ranks(made: Coordinator) -> list[int]:
    return [row.rank for row in made.status().workers]


def test_the_highest_number_counts_and_copies_keep_no_worker() -> None:
    memory = Memory()
    memory.see(version=3, round=9)
    memory.see(version=2)
    first, second = worker(), worker()
    memory.add([0, 4], [first, second], ["gloo", "auto"])
    memory.remove([0])
    told = memory.told()
    assert (told["version"], told["round"], told["next_rank"]) == (3, 9, 5)
    assert [(e["rank"], e["handle"], e["backend"]) for e in told["roster"]] == [(4, second, "auto")]
    memory.remove([second])
    assert memory.told()["roster"] == []
    copy = pickle.loads(pickle.dumps(memory))
    assert copy.told() == {**memory.told(), "roster": None}
    copy.see(version=4)
    assert (copy.version, memory.version) == (4, 3)


def test_a_restarted_controller_without_memory_does_nothing() -> None:
    first = coordinator(worker())
    first.open()
    again = coordinator(worker())
    again.recover()
    for call in (
        again.status,
        lambda: again.add_workers([worker()], ["gloo"]),
        lambda: again.remove_workers([0], []),
        lambda: again.commit({"round_id": 1, "version": 1}),
        lambda: commit(again, 1),
    ):
        with pytest.raises(RosterNeeded, match="none of the workers that it was made with"):
            call()
    again.tick()
    with pytest.raises(RosterNeeded):
        again.status()
    again.present(Memory().told())  # knows no more
    with pytest.raises(RosterNeeded):
        again.status()
    again.close()


def test_a_worker_that_remembers_is_followed() -> None:
    """The handle knows of one of them; that one knows the rest, and a higher epoch than the handle."""
    first, second, third = worker(), worker(), worker()
    before = coordinator(first)
    before.open()
    before.add_workers([second, third], ["gloo", "gloo"])
    before.remove_workers([0], [])
    again = coordinator(first)
    again.recover()
    memory = Memory()
    memory.add([1], [second], ["gloo"])
    memory.see(version=7, round=20)
    again.present(memory.told())
    assert ranks(again) == [1, 2]
    assert again.status().version == 7
    commit(again, 8)
    assert again.add_workers([worker()], ["gloo"]) == [3]


def test_a_handle_that_knows_a_higher_version_is_believed_later_too() -> None:
    """Of its workers none remembers this controller, so the roster is that of those who do."""
    first = worker()
    made = coordinator(first)
    made.open()
    request = {"version": None, "process": {}, "partial": False, "roster": None}
    with pytest.raises(RosterNeeded):
        made.begin({**request, "seen_version": 5})
    memory = Memory()
    memory.see(version=5)
    memory.add([0], [worker()], ["gloo"])
    made.present(memory.told())
    assert made.status().version == 5
    assert made.status().workers[0].state == "CONNECTING"
    made.present({**memory.told(), "version": 4, "roster": []})  # older than what is known by now
    assert (made.status().version, ranks(made)) == (5, [0])


class _Silent(InProcessClient):
    """Does not answer, until it does."""

    silent = True

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return Future() if self.silent else super().call(op, message)


def test_a_worker_that_answers_late_ends_the_doubt() -> None:
    """It was only slow: no handle is needed."""
    first = _Silent(worker().session)
    first.silent = False
    before = coordinator(first)
    before.open()
    before.add_workers([worker()], ["gloo"])
    first.silent = True
    again = coordinator(first)
    again.recover()
    with pytest.raises(RosterNeeded):
        again.status()
    first.silent = False
    again.tick()
    assert ranks(again) == [0, 1]
