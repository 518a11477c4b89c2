"""The commit: one call records, tells the workers and settles, and may be cut short anywhere."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer import PartialUpdate, WeightTransferConfig
from rayxfer.binding import Binding
from rayxfer.client import InProcessClient
from rayxfer.coordinator import Coordinator
from rayxfer.errors import StateError
from rayxfer.report import WorkerState
from rayxfer.sender import Sender
from rayxfer.session import WorkerSession
from rayxfer.source import ModuleSource
from tests.helpers import assert_same_bytes, poison

CONFIG = WeightTransferConfig(backend="shm", stall_timeout_s=20.0)


class Fleet:
    """Two workers, a coordinator, and what stands between it and the sender."""

    def __init__(self, *hooks: Any) -> None:
        self.models = [nn.Linear(5, 3) for _ in (0, 1)]
        for model in self.models:
            poison(model)
        pairs = zip(self.models, [*hooks, None, None], strict=False)
        self.sessions = [WorkerSession(Binding(one, reset_cache=hook)) for one, hook in pairs]
        self.clients = [InProcessClient(session) for session in self.sessions]
        self.coordinator = self.make()
        self.coordinator.open()
        self.said: list[dict[str, Any]] = []

    def make(self) -> Coordinator:
        return Coordinator("it", list(self.clients), CONFIG, controller_id="id")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.coordinator, name)

    def commit(self, *args: Any) -> dict[str, Any]:
        self.said.append(self.coordinator.commit(*args))
        return self.said[-1]

    def sync(self) -> Any:
        torch.manual_seed(len(self.said))
        source = nn.Linear(5, 3)
        sender = Sender(self)
        try:
            return sender.sync(ModuleSource(source), version=None, partial=False)
        finally:
            sender.close()
            for model, session in zip(self.models, self.sessions, strict=True):
                if session.state == WorkerState.READY:
                    assert_same_bytes(source.state_dict(), model.state_dict())

    def check_ready(self, version: int) -> None:
        """What any process sees as soon as `sync` has returned."""
        status = self.coordinator.status()
        assert (status.version, status.busy) == (version, False)
        assert [(w.state, w.version) for w in status.workers] == [("READY", version)] * 2
        assert [(s.state, s.version) for s in self.sessions] == [("READY", version)] * 2


def test_one_call_does_all_of_it() -> None:
    fleet = Fleet()
    fleet.sync()
    assert [said["settled"] for said in fleet.said] == [True]
    fleet.check_ready(1)
    assert [session.calls["commit"] for session in fleet.sessions] == [1, 1]
    assert fleet.sync().control_calls == 4  # connect (a new sender), prepare, update, commit


def test_a_reply_that_was_lost_may_be_asked_for_again() -> None:
    class Forgetful(Fleet):
        def commit(self, *args: Any) -> dict[str, Any]:
            super().commit(*args)
            return super().commit(*args)

    fleet = Forgetful()
    report = fleet.sync()
    assert [row.state for row in report.workers] == ["READY", "READY"]
    assert [said["settled"] for said in fleet.said] == [True, True]
    assert [session.calls["commit"] for session in fleet.sessions] == [1, 1]
    fleet.check_ready(1)
    fleet.sync()
    fleet.check_ready(2)


@pytest.mark.parametrize("reached", [0, 1, 2])
def test_a_controller_that_dies_within_it_goes_on_after_its_restart(reached: int) -> None:
    class Dies(Fleet):
        def commit(self, claim: Any, rows: Any, message: Any) -> dict[str, Any]:
            if not self.said:
                for session in self.sessions[:reached]:  # as far as it came
                    assert session.handle("commit", message)["done"]
                self.coordinator = self.make()
                self.coordinator.recover()
            return super().commit(claim, rows, message)

    fleet = Dies()
    report = fleet.sync()
    assert [row.state for row in report.workers] == ["READY", "READY"]
    fleet.check_ready(1)
    fleet.sync()
    fleet.check_ready(2)


def test_a_restarted_controller_repeats_no_round_but_its_last() -> None:
    fleet = Fleet()
    claims: list[Any] = []
    original = fleet.coordinator.commit

    def commit(*args: Any) -> Any:
        claims.append(args)
        return original(*args)

    fleet.coordinator.commit = commit  # type: ignore[method-assign]
    fleet.sync()
    fleet.sync()
    fleet.coordinator = fleet.make()
    fleet.coordinator.recover()
    with pytest.raises(StateError, match="is over"):
        fleet.coordinator.commit(*claims[0])
    assert fleet.coordinator.commit(*claims[1])["settled"]
    fleet.check_ready(2)


def test_a_slow_worker_is_waited_for_by_the_sender() -> None:
    go_on = threading.Event()

    class Watches(Fleet):
        def commit(self, *args: Any) -> dict[str, Any]:
            said = super().commit(*args)
            status = self.coordinator.status()
            states.append((status.version, status.busy, status.workers[0].state))
            go_on.set()
            return said

    states: list[Any] = []
    fleet = Watches(lambda: go_on.wait(60))
    fleet.sync()
    assert fleet.said[0]["settled"] is False
    assert states == [(1, True, "UPDATING")]
    fleet.check_ready(1)


def test_a_hook_that_fails_then_leaves_its_worker_torn() -> None:
    def hook() -> None:
        raise RuntimeError("no cache")

    fleet = Fleet(hook)
    with pytest.raises(PartialUpdate, match="no cache") as caught:
        fleet.sync()
    assert [row.state for row in caught.value.report.workers] == ["TORN", "READY"]
    assert fleet.said[0]["settled"] is False
    status = fleet.coordinator.status()
    assert (status.version, status.busy) == (1, False)
    assert [row.state for row in status.workers] == ["TORN", "READY"]


def test_the_round_is_over_only_after_the_hook() -> None:
    """A commit that is asked for again meanwhile waits for the hook, too, and says how it ended."""
    entered, go_on = threading.Event(), threading.Event()

    def hook() -> None:
        entered.set()
        assert go_on.wait(60)
        raise RuntimeError("no cache")

    class Asks(Fleet):
        def commit(self, claim: Any, rows: Any, message: Any) -> dict[str, Any]:
            said = super().commit(claim, rows, message)
            assert entered.wait(60)
            again = self.sessions[0].handle("commit", {**message, "wait_s": 0.0})
            assert again["done"] is False
            go_on.set()
            return said

    fleet = Asks(hook)
    with pytest.raises(PartialUpdate, match="no cache"):
        fleet.sync()


@pytest.mark.parametrize("fails", [False, True])
def test_two_calls_at_once_commit_once_and_hear_the_same(fails: bool) -> None:
    """A commit that needs no thread of its own is still one operation, however often it is asked for."""
    answers: list[Any] = []
    times: list[int] = []

    class Twice(Fleet):
        def commit(self, claim: Any, rows: Any, message: Any) -> dict[str, Any]:
            session, entered, go = self.sessions[0], threading.Event(), threading.Event()
            original = session._make_live

            def make_live(current: Any) -> None:
                times.append(current.round_id)
                entered.set()
                assert go.wait(20)
                if fails:
                    raise RuntimeError("no")
                original(current)

            session._make_live = make_live  # type: ignore[method-assign]

            def ask() -> None:
                answers.append(session.handle("commit", {**message, "wait_s": 10.0}))

            calls = [threading.Thread(target=ask) for _ in range(2)]
            calls[0].start()
            assert entered.wait(20)
            calls[1].start()
            go.set()
            for call in calls:
                call.join(20)
            answers.append(session.handle("commit", message))  # and once more, later
            session._make_live = original  # type: ignore[method-assign]
            return super().commit(claim, rows, message)

    fleet = Twice()
    if fails:
        with pytest.raises(PartialUpdate) as raised:
            fleet.sync()
        assert [row.state for row in raised.value.report.workers] == ["TORN", "READY"]
        assert len({str(answer["error"]) for answer in answers}) == 1
        assert "RuntimeError: no" in str(answers[0]["error"])
    else:
        fleet.sync()
        fleet.check_ready(1)
    assert len(times) == 1
    assert [answer["done"] for answer in answers] == [True] * 3
