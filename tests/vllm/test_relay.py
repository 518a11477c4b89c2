"""The relay in front of vLLM: order of pause, update, commit, cache and resume; several ranks as one.

vLLM itself is a stand-in here (a real session per rank, and controls that keep a log); the real one is
in `test_real_*.py`.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rayxfer import (
    ContractError,
    PartialUpdate,
    StateError,
    TransferError,
    TransferTimeout,
    WeightSource,
    WeightTransferConfig,
)
from rayxfer.binding import Binding
from rayxfer.client import WorkerClient, spawn
from rayxfer.coordinator import Coordinator
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.report import WorkerState
from rayxfer.sender import Sender
from rayxfer.session import WorkerSession
from rayxfer.source import as_source
from rayxfer.vllm.relay import Relay, merged
from rayxfer.vllm.wire import decode, encode
from tests.helpers import assert_same_bytes, poison


def tiny(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))


class StandIn:
    """One vLLM: some ranks, each with a model and a session, and controls that keep a log."""

    def __init__(self, ranks: int) -> None:
        self.models = [tiny(0) for _ in range(ranks)]
        self.sessions = [WorkerSession(Binding(model)) for model in self.models]
        for session in self.sessions:
            session._ops |= {
                "settings": lambda m, s=session: {
                    "load_mode": s._config.load_mode,
                    "pause_mode": s._config.pause_mode,
                    "cache_policy": s._config.cache_policy,
                },
                "hold": lambda m, s=session: (s._set_state(WorkerState.TORN), s.snapshot())[1],
            }
        self.log: list[str] = []
        self.refuse = 0
        self.hold_pause = threading.Event()
        self.hold_pause.set()
        self.states: list[str] = []
        self.relay = Relay(self.rpc, self, lambda state: self.states.append(str(state)))

    def rpc(self, op: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        if op in ("update", "commit") and self.log[-1:] != [op]:
            self.log.append(op)
        answers = []
        for rank, session in enumerate(self.sessions):
            asked = decode(encode(message))
            if "ranks" in asked:
                asked |= asked.pop("ranks")[rank]
            try:
                answers.append(decode(encode(session.handle(op, asked))))
            except Exception as error:
                answers.append({"raised": error})
        return answers

    def pause(self, mode: str) -> None:
        self.log.append(f"pause {mode}")
        self.hold_pause.wait(20)

    def resume(self) -> None:
        self.log.append("resume")
        self.hold_pause.set()

    def reset_cache(self) -> bool:
        self.refuse -= 1
        self.log.append("reset")
        return self.refuse < 0

    def set_version(self, version: int) -> None:
        self.log.append(f"version {version}")


class Client(WorkerClient):
    def __init__(self, stand_in: StandIn) -> None:
        self.stand_in = stand_in

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return spawn(lambda: self.stand_in.relay.handle(op, message), op)


def connected(stand_ins: list[StandIn], config: WeightTransferConfig) -> tuple[Coordinator, Sender]:
    coordinator = Coordinator("relay-test", [Client(one) for one in stand_ins], config)
    coordinator.open()
    entries = {name: WeightTransferEngineFactory.entry(name) for name in config.backends}
    return coordinator, Sender(coordinator, entries)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("ranks", [[1], [2], [3, 1, 2]])
def test_every_rank_of_every_engine_gets_every_byte(backend: str, ranks: list[int]) -> None:
    stand_ins = [StandIn(count) for count in ranks]
    coordinator, sender = connected(stand_ins, WeightTransferConfig(backend=backend))
    for version in (1, 2):
        for one in stand_ins:
            for model in one.models:
                poison(model)
        source = tiny(version)
        report = sender.sync(as_source(source), version=None, partial=False)
        assert [row.state for row in report.workers] == ["READY"] * len(ranks)
        for one in stand_ins:
            for model in one.models:
                assert_same_bytes(model.state_dict(), source.state_dict())
            assert one.relay.version == version
    sender.close()
    coordinator.close()


def test_in_place_pauses_first_and_resumes_last() -> None:
    one = StandIn(1)
    config = WeightTransferConfig(backend="shm", pause_mode="wait")
    coordinator, sender = connected([one], config)
    sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert one.log == ["pause wait", "update", "commit", "version 1", "reset", "resume"]
    sender.close()
    coordinator.close()


def test_staged_pauses_for_the_commit_only() -> None:
    one = StandIn(2)
    config = WeightTransferConfig(backend="shm", load_mode="staged", cache_policy="keep")
    coordinator, sender = connected([one], config)
    sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert one.log == ["update", "pause keep", "commit", "version 1", "resume"]
    sender.close()
    coordinator.close()


def test_a_cache_that_will_not_be_reset_holds_the_worker() -> None:
    one = StandIn(1)
    one.refuse = 99
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))
    with pytest.raises(Exception, match="prefix cache"):
        sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert one.relay.state == WorkerState.TORN
    assert "resume" not in one.log  # nothing is answered from a stale cache
    one.refuse = 2  # refused twice, then done: asked again
    report = sender.sync(as_source(tiny(2)), version=None, partial=False)
    assert report.workers[0].state == "READY"
    assert one.log[-1] == "resume"
    sender.close()
    coordinator.close()


def test_a_failed_source_resumes_what_was_not_touched() -> None:
    one = StandIn(1)
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))
    before = {name: t.clone() for name, t in one.models[0].state_dict().items()}

    class Broken(torch.nn.Module):
        pass

    class Source:
        def metadata(self) -> Any:
            return as_source(tiny(1)).metadata()

        def __iter__(self) -> Any:
            raise RuntimeError("nothing to read")
            yield

    from rayxfer import WeightSource

    class Failing(Source, WeightSource):
        pass

    with pytest.raises(Exception, match="nothing to read"):
        sender.sync(Failing(), version=None, partial=False)
    assert one.relay.state == WorkerState.READY
    # a question about the update may still have been on its way
    assert [entry for entry in one.log if entry != "update"][-1] == "resume"
    assert_same_bytes(one.models[0].state_dict(), before)
    sender.close()
    coordinator.close()


def test_an_abort_calls_a_long_pause_off() -> None:
    one = StandIn(1)
    one.hold_pause.clear()
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm", sync_timeout_s=1.5))
    started = time.monotonic()
    with pytest.raises(TransferError):
        sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert time.monotonic() - started < 15
    assert one.hold_pause.is_set()
    assert one.relay.state == WorkerState.READY
    sender.close()
    coordinator.close()


def test_asleep_no_round_begins() -> None:
    one = StandIn(1)
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))
    sender.sync(as_source(tiny(1)), version=None, partial=False)
    one.relay.asleep(True)
    with pytest.raises(Exception, match="sleeps"):
        sender.sync(as_source(tiny(2)), version=None, partial=False)
    assert "pause keep" not in one.log[6:]
    one.relay.asleep(False)
    assert sender.sync(as_source(tiny(2)), version=None, partial=False).workers[0].state == "READY"
    sender.close()
    coordinator.close()


def test_ranks_that_were_given_different_bytes_are_no_worker() -> None:
    with pytest.raises(ContractError, match="different bytes"):
        merged([{"done": True, "digests": b"1"}, {"done": True, "digests": b"2"}])


def test_the_worst_rank_speaks_for_all() -> None:
    answers = [
        {
            "done": True,
            "state": "READY",
            "version": 4,
            "num_bytes": 9,
            "busy": False,
            "failed": None,
        },
        {
            "done": False,
            "state": "TORN",
            "version": 3,
            "num_bytes": 5,
            "busy": True,
            "failed": None,
        },
    ]
    assert merged(answers) == {
        "done": False,
        "state": "TORN",
        "version": 3,
        "num_bytes": 5,
        "busy": True,
        "failed": None,
    }
    with pytest.raises(StateError, match="broken"):
        merged([{"done": True}, {"raised": StateError("broken")}])
    problems = merged([{"casts": {}}, {"problems": ["a"], "name": "x"}])
    assert problems == {"problems": ["a"], "name": "x"}


def prepared(one: StandIn, controller_id: str = "c", round_id: int = 1) -> dict[str, Any]:
    """A stand-in in an open round of a trainer that says nothing more; the base of its messages."""
    base = {"controller_id": controller_id, "round_id": round_id, "attempt": 0}
    owner = {"name": "n", "controller_id": controller_id, "epoch": 0, "roster": []}
    one.relay.handle("attach", {"owner": owner})
    for session in one.sessions:
        session._config = WeightTransferConfig(backend="shm")
        session._round = SimpleNamespace(  # type: ignore[assignment]
            round_id=round_id,
            attempt=0,
            version=1,
            previous=WorkerState.READY,
            pausing=False,
            aborted=threading.Event(),
            loader=SimpleNamespace(touched=False, discard=lambda: None),
        )
    one.relay._settings = None
    return base


def test_a_round_that_another_relay_began_is_resumed_at_its_abort() -> None:
    """The trainer paused through its own copy of the handle and died; the controller's frees it."""
    one = StandIn(1)
    base = prepared(one)
    assert one.log == []
    answer = Relay(one.rpc, one).handle("abort", {**base, "timeout_s": 1.0})
    assert answer["state"] == "READY"
    assert one.log == ["resume"]


@pytest.mark.parametrize("op", ["attach", "detach"])
def test_a_round_that_ends_unaborted_is_resumed(op: str) -> None:
    one = StandIn(1)
    prepared(one)
    owner = {"name": "m", "controller_id": "d", "epoch": 0, "roster": []}
    one.relay.handle(op, {"owner": owner, "controller_id": "c", "replace": "c"})
    assert one.sessions[0]._round is None
    assert one.log == ["resume"]


def test_who_paused_by_hand_stays_paused() -> None:
    one = StandIn(1)
    owner = {"name": "n", "controller_id": "c", "epoch": 0, "roster": []}
    one.relay.handle("attach", {"owner": owner})
    one.relay.handle("abort", {"round_id": 3, "timeout_s": 1.0})
    one.relay.handle("detach", {"controller_id": "c"})
    assert one.log == []


def test_a_pause_that_fails_is_undone() -> None:
    one = StandIn(1)
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))

    def failing(mode: str) -> None:
        one.log.append("half paused")
        raise TransferTimeout("no answer")

    one.pause = failing  # type: ignore[method-assign]
    with pytest.raises(TransferError):
        sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert one.log.index("half paused") < one.log.index("resume")
    assert one.log[-1] == "resume"
    sender.close()
    coordinator.close()


def test_a_pause_that_outlives_its_round_is_undone_and_holds_nobody_up() -> None:
    """vLLM ends a pause in mode "wait" when it is idle, whatever was resumed meanwhile."""
    one = StandIn(1)
    idle = threading.Event()

    def deaf(mode: str) -> None:
        one.log.append(f"pause {mode}")
        idle.wait(20)

    base = prepared(one)
    one.pause = deaf  # type: ignore[method-assign]
    assert one.relay.handle("update", {**base, "wait_s": 0.1})["done"] is False
    started = time.monotonic()
    one.relay.handle("abort", {**base, "timeout_s": 5.0})
    assert time.monotonic() - started < 4
    del one.pause  # type: ignore[method-assign]
    log = len(one.log)
    idle.set()
    while "resume" not in one.log[log:]:
        assert time.monotonic() - started < 10
        time.sleep(0.01)
    assert one.relay._paused_for is None


def test_a_pause_still_under_way_does_not_refuse_the_next_round() -> None:
    one = StandIn(1)
    idle = threading.Event()
    base = prepared(one)
    one.pause = lambda mode: idle.wait(20)  # type: ignore[method-assign,assignment,return-value]
    assert one.relay.handle("update", {**base, "wait_s": 0.1})["done"] is False
    one.relay.handle("abort", {**base, "timeout_s": 5.0})
    one.relay.handle("detach", {"controller_id": "c"})
    del one.pause  # type: ignore[method-assign]
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))
    report = sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert report.workers[0].state == "READY"
    idle.set()
    sender.close()
    coordinator.close()


def test_a_late_abort_leaves_the_pause_of_a_newer_round_alone() -> None:
    one = StandIn(1)
    one.hold_pause.clear()
    base = prepared(one, round_id=2)
    assert one.relay.handle("update", {**base, "wait_s": 0.1})["done"] is False
    one.relay.handle("abort", {**base, "round_id": 1, "timeout_s": 0.5})
    assert "resume" not in one.log
    one.relay.handle("abort", {**base, "timeout_s": 5.0})
    assert "resume" in one.log


def test_awake_in_part_it_is_not_resumed() -> None:
    """Weights are back, the key-value cache is not: whoever generates now reads freed memory."""
    one = StandIn(1)
    coordinator, sender = connected([one], WeightTransferConfig(backend="shm"))
    one.relay.asleep(False, anything=True)
    sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert "resume" not in one.log
    one.relay.asleep(False)
    sender.sync(as_source(tiny(2)), version=None, partial=False)
    assert one.log[-1] == "resume"
    sender.close()
    coordinator.close()


def test_a_staged_commit_that_cannot_pause_is_torn() -> None:
    one = StandIn(1)
    config = WeightTransferConfig(backend="shm", load_mode="staged")
    coordinator, sender = connected([one], config)

    def failing(mode: str) -> None:
        raise TransferTimeout("no answer")

    one.pause = failing  # type: ignore[method-assign]
    with pytest.raises(PartialUpdate):
        sender.sync(as_source(tiny(1)), version=None, partial=False)
    assert one.relay.state == WorkerState.TORN
    del one.pause  # type: ignore[method-assign]
    report = sender.sync(as_source(tiny(2)), version=None, partial=False)
    assert report.workers[0].state == "READY"
    sender.close()
    coordinator.close()


@pytest.mark.parametrize("load_mode", ["in_place", "staged"])
def test_the_next_controller_counts_its_rounds_from_one_again(load_mode: str) -> None:
    """Neither its pause nor its commit is taken for done because another's of that number was."""
    one = StandIn(1)
    for seed in (1, 2):
        config = WeightTransferConfig(backend="shm", load_mode=load_mode)
        coordinator, sender = connected([one], config)
        with pytest.raises(TransferError, match="nothing to read"):
            sender.sync(_Unreadable(), version=None, partial=False)
        one.log.clear()
        sender.sync(as_source(tiny(seed)), version=None, partial=False)
        assert one.log.count("pause keep") == 1
        assert_same_bytes(one.models[0].state_dict(), tiny(seed).state_dict())
        assert one.sessions[0]._round is None
        sender.close()
        coordinator.close()


class _Unreadable(WeightSource):
    def metadata(self) -> Any:
        return as_source(tiny(1)).metadata()

    def __iter__(self) -> Any:
        raise RuntimeError("nothing to read")
        yield
