"""The trainer's side in one process: who is left out of a call, and what becomes of the others."""

from __future__ import annotations

import copy
import queue
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rayxfer import (
    PartialUpdate,
    TransferError,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from rayxfer.engines.shm import ShmEngine, ShmInitInfo
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.testing import LocalController, assert_same_bytes, poison

refusing: set[int] = set()


class Choosy(ShmEngine):
    """Does not connect on the ranks in `refusing`."""

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        if self.parallel_config.rank in refusing:
            raise OSError("the fabric is down")
        super().init_transfer_engine(init_info)


@pytest.fixture
def choosy() -> Iterator[str]:
    WeightTransferEngineFactory.register_engine("choosy", Choosy)
    refusing.clear()
    yield "choosy"
    del WeightTransferEngineFactory._direct["choosy"]


def fleet(model: torch.nn.Module, count: int) -> list[torch.nn.Module]:
    receivers = [copy.deepcopy(model) for _ in range(count)]
    for receiver in receivers:
        poison(receiver)
    return receivers


def expect(model: torch.nn.Module, receivers: list[torch.nn.Module]) -> None:
    for receiver in receivers:
        assert_same_bytes(model.state_dict(), receiver.state_dict())


def test_a_worker_that_cannot_connect_is_left_out(choosy: str) -> None:
    model = torch.nn.Linear(8, 8)
    receivers = fleet(model, 3)
    refusing.add(1)
    with LocalController(receivers, WeightTransferConfig(backend=choosy)) as controller:
        with pytest.raises(PartialUpdate, match="the fabric is down") as caught:
            # without rank 1 the others are ranks 0 and 1 of a new channel: it may connect now
            refusing_once(controller, model)
        report = caught.value.report
        assert [str(row.state) for row in report.workers] == ["READY", "LOST", "READY"]
        assert report.attempts == 1
        expect(model, [receivers[0], receivers[2]])
        controller.sync_weights(model)
        expect(model, receivers)


def refusing_once(controller: LocalController, model: torch.nn.Module) -> None:
    original = Choosy.init_transfer_engine

    def once(self: Choosy, init_info: ShmInitInfo) -> None:
        try:
            original(self, init_info)
        except OSError:
            refusing.clear()
            raise

    Choosy.init_transfer_engine = once  # type: ignore[method-assign]
    try:
        controller.sync_weights(model)
    finally:
        Choosy.init_transfer_engine = original  # type: ignore[method-assign]


def test_nobody_can_connect_is_an_error_with_the_reason(choosy: str) -> None:
    model = torch.nn.Linear(8, 8)
    receivers = fleet(model, 2)
    refusing.update({0, 1})
    with LocalController(receivers, WeightTransferConfig(backend=choosy)) as controller:
        with pytest.raises(TransferError, match="the fabric is down"):
            controller.sync_weights(model)
        assert controller.status().version == 0
        refusing.clear()
        assert controller.sync_weights(model).version == 1
        expect(model, receivers)


def test_unchanged_tensors_are_reported() -> None:
    """A trainer that forgot to train, an adapter that was filtered out."""
    model = torch.nn.Linear(4, 4)
    receivers = fleet(model, 1)
    with LocalController(receivers, WeightTransferConfig(backend="shm")) as controller:
        assert controller.sync_weights(model).unchanged == ()
        assert controller.sync_weights(model).unchanged == ("weight", "bias")
        with torch.no_grad():
            model.bias.add_(1.0)
        assert controller.sync_weights(model).unchanged == ("weight",)


@dataclass
class _QueueInitInfo(WeightTransferInitInfo):
    pass


@dataclass
class _QueueUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class Queued(WeightTransferEngine[_QueueInitInfo, _QueueUpdateInfo]):
    """Four methods and a queue; its worker notices at once when the sender breaks off."""

    init_info_cls, update_info_cls = _QueueInitInfo, _QueueUpdateInfo
    queues: dict[str, queue.Queue[torch.Tensor | None]] = {}  # noqa: RUF012 - of the class on purpose

    def init_transfer_engine(self, init_info: _QueueInitInfo) -> None:
        self.queues[type(self).__name__] = queue.Queue()

    def receive_weights(self, update_info: _QueueUpdateInfo, load_weights: Any) -> None:
        for name in update_info.names:
            tensor = self.queues[type(self).__name__].get(timeout=20)
            if tensor is None:
                raise EOFError(f"the sender left before {name!r}")
            self.hand_over(name, tensor, load_weights)

    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        load_weights([(name, tensor.clone())])

    def shutdown(self) -> None:
        pass

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any]) -> None:
        target = Queued.queues[trainer_args["who"]]
        try:
            for _, tensor in iterator:
                target.put(tensor)
        finally:
            target.put(None)


class Breaks(Queued):
    def hand_over(self, name: str, tensor: torch.Tensor, load_weights: Any) -> None:
        raise OSError("the wire is cut")

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any]) -> None:
        Queued.trainer_send_weights(iterator, {**trainer_args, "who": "Breaks"})


class Sound(Queued):
    @staticmethod
    def _slowly(iterator: Iterator[Any]) -> Iterator[Any]:
        for item in iterator:
            yield item
            time.sleep(0.05)

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any]) -> None:
        Queued.trainer_send_weights(Sound._slowly(iterator), {**trainer_args, "who": "Sound"})


def test_a_channel_that_was_broken_off_is_not_to_blame() -> None:
    """Its worker fails a moment after the one that is, and must not be left out with it."""
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    receivers = fleet(model, 2)

    for engine in (Breaks, Sound):
        WeightTransferEngineFactory.register_engine(engine.__name__, engine)
    try:
        config = WeightTransferConfig(backend=["Breaks", "Sound"], on_worker_failure="continue")
        with LocalController(receivers, config) as controller:
            report = controller.sync_weights(model)
        assert [row.version for row in report.workers] == [0, 1]
        assert "the wire is cut" in str(report.workers[0].error)
        assert report.workers[1].error is None
        expect(model, receivers[1:])
    finally:
        for engine in (Breaks, Sound):
            del WeightTransferEngineFactory._direct[engine.__name__]
