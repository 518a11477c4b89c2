"""An offer that the workers know goes to them in one call with its bytes; none moves before all agree."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer import (
    ContractError,
    TransferError,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.binding import Binding
from rayxfer.engines.gloo import GlooEngine
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.source import named_tensors
from rayxfer.tasks import Task
from rayxfer.testing.local import LocalController
from rayxfer.testing.processes import ProcessWorker
from tests.helpers import assert_same_bytes, poison, raw_bytes

BOTH = pytest.mark.parametrize("backend", ["shm", "gloo"])
"""The ring's gate, and the rendezvous's."""


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator), requires_grad=False)

        self.large = weights(700_000)
        self.small = nn.ParameterList(weights(i + 1) for i in range(20))


class Hooked:
    """A worker's model with what happened to it."""

    def __init__(self, seed: int) -> None:
        self.model = Net(seed)
        self.paused = self.resumed = 0

    def binding(self) -> Binding:
        return Binding(self.model, pause=self._pause, resume=self._resume)

    def _pause(self, mode: str) -> None:
        self.paused += 1

    def _resume(self) -> None:
        self.resumed += 1


def _bytes(model: nn.Module) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in named_tensors(model).items()}


# ---- the ring's gate ------------------------------------------------------------------------------


def _ring(readers: int) -> tuple[RingWriter, list[RingReader]]:
    ring = RingWriter(slot_bytes=4096, slots=2, readers=readers, nonce="0b" * 16)
    return ring, [RingReader(reader=i, **ring.describe()) for i in range(readers)]  # type: ignore[arg-type]


def _eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_nothing_is_shown_before_every_reader_is_ready() -> None:
    ring, readers = _ring(3)
    readers[0].ready(6)  # of a round before
    ring.gate(7)
    ring.slot().fill_(9)
    publishing = threading.Thread(target=ring.publish, daemon=True)
    publishing.start()
    for reader in readers:
        time.sleep(0.05)
        assert publishing.is_alive()
        assert not any(one.published() for one in readers)
        reader.ready(7)
    publishing.join(20.0)
    assert not publishing.is_alive()
    for reader in readers:
        assert bool((reader.slot() == 9).all())
        reader.release()
    ring.slot().fill_(10)
    ring.publish()  # one gate, one frame: the next one passes
    assert all(reader.published() for reader in readers)
    ring.close()


def test_whoever_waits_at_the_gate_is_freed_by_an_abort() -> None:
    ring, readers = _ring(2)
    ring.gate(1)
    errors: list[BaseException] = []

    def publish() -> None:
        ring.slot()
        try:
            ring.publish()
        except TransferError as error:
            errors.append(error)

    readers[0].ready(1)
    publishing = threading.Thread(target=publish, daemon=True)
    publishing.start()
    _eventually(lambda: ring.lagging == 1)
    ring.abort()
    publishing.join(20.0)
    assert len(errors) == 1
    assert not readers[0].published()
    ring.close()


# ---- rounds ---------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("load_mode", ["in_place", "staged", "mapped"])
def test_from_the_second_round_on_it_is_one_call(load_mode: Any, backend: str) -> None:
    trainer, workers = Net(1), [Net(2), Net(3)]
    with LocalController(
        workers, WeightTransferConfig(backend=backend, load_mode=load_mode)
    ) as controller:
        for step in range(4):
            with torch.no_grad():
                trainer.large.add_(1)
            for worker in workers:
                poison(worker)
            for session in controller.sessions:
                session.calls.clear()
            report = controller.sync_weights(trainer)
            assert all(row.state == "READY" and row.complete for row in report.workers)
            assert report.attempts == 1
            for worker in workers:
                assert_same_bytes(named_tensors(trainer), named_tensors(worker))
            for session in controller.sessions:
                assert ("prepare" in session.calls) is (step == 0)
                assert session.calls["update"] == 1


@BOTH
def test_casts_and_what_is_kept_are_told_every_time(backend: str) -> None:
    trainer, worker = Net(1), Net(2)
    worker.large.data = worker.large.data.double()
    with LocalController([worker], WeightTransferConfig(backend=backend)) as controller:
        for _ in range(3):
            report = controller.sync_weights(trainer)
            assert report.workers[0].casts == {"large": "float32 -> float64"}
            assert torch.equal(worker.large, trainer.large.double())
        for _ in range(3):
            report = controller.sync_weights({"large": trainer.large}, partial=True)
            assert set(report.kept) == {f"small.{i}" for i in range(20)}
            assert report.workers[0].casts == {"large": "float32 -> float64"}


@BOTH
def test_a_refusal_touches_nobody_and_tells_everything(backend: str) -> None:
    trainer, hooked = Net(1), [Hooked(2), Hooked(3), Hooked(4)]
    with LocalController(
        [one.binding() for one in hooked], WeightTransferConfig(backend=backend)
    ) as controller:
        controller.sync_weights(trainer)
        controller.sync_weights(trainer)
        good = [named_tensors(one.model) for one in hooked]
        hooked[0].model.large = nn.Parameter(torch.zeros(7))
        hooked[2].model.extra = nn.Parameter(torch.zeros(3))
        for one in hooked:
            poison(one.model)
        before = [(_bytes(one.model), one.paused) for one in hooked]
        with pytest.raises(ContractError) as caught:
            controller.sync_weights(trainer)
        problems = "\n".join(caught.value.problems)
        assert "worker 0: shape mismatch at 'large'" in problems
        assert "worker 2: missing name 'extra'" in problems
        assert "worker 1" not in problems
        assert caught.value.phase == "prepare"
        assert [(_bytes(one.model), one.paused) for one in hooked] == before
        assert [row.state for row in controller.status().workers] == ["READY"] * 3
        hooked[0].model.large = good[0]["large"]  # type: ignore[assignment]
        del hooked[2].model.extra
        report = controller.sync_weights(trainer)
        assert report.attempts == 1
        for one in hooked:
            assert_same_bytes(named_tensors(trainer), named_tensors(one.model))
            assert one.resumed >= one.paused


@BOTH
def test_a_worker_that_forgot_the_offer_is_told_again(backend: str) -> None:
    trainer, hooked = Net(1), [Hooked(2), Hooked(3)]
    with LocalController(
        [one.binding() for one in hooked], WeightTransferConfig(backend=backend)
    ) as controller:
        controller.sync_weights(trainer)
        controller.sessions[1]._offer = None
        for one in hooked:
            poison(one.model)
        report = controller.sync_weights(trainer)
        assert report.attempts == 1, "nothing was sent in vain"
        assert [one.paused for one in hooked] == [2, 2]
        for one in hooked:
            assert_same_bytes(named_tensors(trainer), named_tensors(one.model))


@BOTH
def test_a_worker_that_fell_behind_sits_a_part_out(backend: str) -> None:
    trainer, workers = Net(1), [Net(2), Net(3)]
    config = WeightTransferConfig(backend=backend, on_worker_failure="continue")
    part = {"large": trainer.large}
    with LocalController(workers, config) as controller:
        controller.sync_weights(trainer)
        controller.sync_weights(part, partial=True)
        controller.sessions[1].version -= 1
        with torch.no_grad():
            trainer.large.add_(1)
        held = _bytes(workers[1])
        report = controller.sync_weights(part, partial=True)
        assert report.workers[0].state == "READY"
        assert report.workers[1].error is not None
        assert "a part of the model is no use to it" in str(report.workers[1].error)
        assert _bytes(workers[1]) == held
        assert_same_bytes(named_tensors(trainer), named_tensors(workers[0]))


class _Slow:
    """A worker whose model cannot be looked at for a while."""

    def __init__(self) -> None:
        self.model, self.go_on, self.looks = Net(5), threading.Event(), 0
        self.slow = False

    def __call__(self) -> nn.Module:
        if self.slow:
            self.looks += 1
            self.go_on.wait(60.0)
        return self.model


@BOTH
def test_nobody_pauses_for_one_that_never_answers(backend: str) -> None:
    trainer, hooked, slow = Net(1), Hooked(2), _Slow()
    config = WeightTransferConfig(
        backend=backend, stall_timeout_s=1.0, on_worker_failure="continue"
    )
    with LocalController([hooked.binding(), Binding(slow)], config) as controller:
        controller.sync_weights(trainer)
        slow.slow = True
        poison(hooked.model)
        before = hooked.paused
        report: list[Any] = []
        syncing = threading.Thread(
            target=lambda: report.append(controller.sync_weights(trainer)), daemon=True
        )
        syncing.start()
        _eventually(lambda: slow.looks > 0)
        assert hooked.paused == before, "it goes on serving until all have agreed"
        syncing.join(60.0)
        slow.go_on.set()
        assert [row.state for row in report[0].workers] == ["READY", "LOST"]
        assert hooked.paused == before + 1
        assert_same_bytes(named_tensors(trainer), named_tensors(hooked.model))


class _Dying:
    def __init__(self, strike: int) -> None:
        self.model, self.looks, self.strike = Net(6), 0, strike

    def __call__(self) -> nn.Module:
        self.looks += 1
        if self.looks == self.strike:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.model


def _dying(strike: int) -> Binding:
    return Binding(_Dying(strike))


def _looks_in_a_round() -> int:
    """How often a session asks for its model until the first sync is over."""
    dying = _Dying(0)
    with LocalController([Binding(dying)], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(Net(1))
        return dying.looks


@BOTH
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_the_others_get_the_version_when_one_is_gone_at_the_gate(action: str, backend: str) -> None:
    trainer = Net(1)
    config = WeightTransferConfig(
        backend=backend, stall_timeout_s=1.5, on_worker_failure="continue"
    )
    build: Any = (_dying, _looks_in_a_round() + 1) if action == "kill" else (Net, 6)
    with (
        ProcessWorker(*build) as doomed,
        ProcessWorker(Net, 2) as other,
        LocalController([doomed, other], config) as controller,
    ):
        controller.sync_weights(trainer)
        with torch.no_grad():
            trainer.large.add_(1)
        other.run(poison)
        if action == "stop":
            os.kill(doomed.pid, signal.SIGSTOP)
        try:
            report = controller.sync_weights(trainer)
        finally:
            if action == "stop":
                os.kill(doomed.pid, signal.SIGCONT)
        assert [row.state for row in report.workers] == ["LOST", "READY"]
        assert other.run(_bytes) == _bytes(trainer)


class _KnowsNoGates(GlooEngine):
    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: dict[str, Any]) -> None:
        assert "gate" not in trainer_args
        GlooEngine.trainer_send_weights(iterator, trainer_args)


def test_an_engine_that_sends_its_own_way_is_asked_in_two_steps() -> None:
    assert GlooEngine.gated
    assert not _KnowsNoGates.gated
    WeightTransferEngineFactory.register_engine("knows-no-gates", _KnowsNoGates)
    trainer, workers = Net(1), [Net(2), Net(3)]
    with LocalController(workers, WeightTransferConfig(backend="knows-no-gates")) as controller:
        for _ in range(3):
            for worker in workers:
                poison(worker)
            controller.sync_weights(trainer)
            for worker in workers:
                assert_same_bytes(named_tensors(trainer), named_tensors(worker))
        assert [session.calls["prepare"] for session in controller.sessions] == [3, 3]


@BOTH
def test_one_that_does_not_come_to_the_gate_is_lost_and_the_others_are_not(backend: str) -> None:
    trainer, hooked, busy = Net(1), [Hooked(2), Hooked(3)], threading.Event()
    config = WeightTransferConfig(
        backend=backend, stall_timeout_s=1.0, on_worker_failure="continue"
    )
    with LocalController([one.binding() for one in hooked], config) as controller:
        controller.sync_weights(trainer)
        poison(hooked[0].model)
        before = _bytes(hooked[1].model)

        def something_else() -> dict[str, Any]:
            busy.wait(120.0)
            return {}

        # it answers, but has to end something else before it can begin
        controller.sessions[1]._task = Task(("donate", 7), something_else)
        try:
            report = controller.sync_weights(trainer)
        finally:
            busy.set()
        assert [row.state for row in report.workers] == ["READY", "LOST"]
        assert_same_bytes(named_tensors(trainer), named_tensors(hooked[0].model))
        assert _bytes(hooked[1].model) == before
        assert hooked[1].paused == 1


@pytest.mark.parametrize("gate", [None, "7", -1, 1 << 64, True, 1.5])
def test_a_senseless_gate_opens_no_round(gate: Any) -> None:
    trainer, worker = Net(1), Net(2)
    with LocalController([worker], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(trainer)
        session = controller.sessions[0]
        owner = session._owner
        assert owner is not None
        message = {
            "controller_id": owner["controller_id"],
            "session_id": session._session_id,
            "round_id": 99,
            "attempt": 1,
            "version": 2,
            "metadata_digest": session._offer.digest,  # type: ignore[union-attr]
            "partial": False,
            "base": 1,
            "update_info": {},
        }
        with pytest.raises(ContractError, match="gate"):
            session.handle("update", message | {"gate": gate})
        for missing in ("partial", "update_info", "version", "round_id", "metadata_digest"):
            short = {key: value for key, value in message.items() if key != missing}
            with pytest.raises(ContractError, match=missing):
                session.handle("update", short | {"gate": 5})
        assert session.snapshot()["open"] is None
        poison(worker)
        assert controller.sync_weights(trainer).attempts == 1
        assert_same_bytes(named_tensors(trainer), named_tensors(worker))


@BOTH
def test_an_offer_that_comes_after_its_abort_opens_no_round(backend: str) -> None:
    trainer, hooked = Net(1), Hooked(2)
    with LocalController([hooked.binding()], WeightTransferConfig(backend=backend)) as controller:
        controller.sync_weights(trainer)
        session, late = controller.sessions[0], []
        update = session._ops["update"]

        def hold_back(message: dict[str, Any]) -> dict[str, Any]:
            late.append(message)
            raise TransferError("the worker was asleep", phase="update")

        session._ops["update"] = hold_back
        with pytest.raises(TransferError):
            controller.sync_weights(trainer)
        session._ops["update"] = update
        assert late
        assert all("gate" in message for message in late)
        poison(hooked.model)
        before, paused = _bytes(hooked.model), hooked.paused
        said = [session.handle("update", message)["refused"] for message in late]
        assert "is over" in said[-1]  # the channel of an earlier try is gone in any case
        assert session.snapshot()["open"] is None
        assert (_bytes(hooked.model), hooked.paused) == (before, paused)
        controller.sync_weights(trainer)
        assert_same_bytes(named_tensors(trainer), named_tensors(hooked.model))
