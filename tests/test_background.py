"""`sync_weights_async`: the trainer goes on, and the workers get what it had when it called."""

from __future__ import annotations

import asyncio
import gc
import logging
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer import (
    ConfigError,
    ContractError,
    Controller,
    ControllerBusy,
    ControllerClosed,
    MappingSource,
    ModuleSource,
    ParamMeta,
    PartialUpdate,
    SyncHandle,
    TransferError,
    TransferTimeout,
    WeightTransferConfig,
)
from rayxfer.background import Snapshots
from rayxfer.binding import Binding
from rayxfer.memfile import find
from rayxfer.source import named_tensors
from rayxfer.testing.faults import Fault, faulty
from rayxfer.testing.local import LocalController
from rayxfer.testing.processes import ProcessWorker
from tests.fleet import Net, Source, assert_exact, plain_workers, poison_all
from tests.helpers import assert_same_bytes, poison

BACKENDS = ["shm", "gloo", "object_store"]


class Zoo(nn.Module):
    """Ties, strides, lazy bits, sizes and dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(33, 17)
        self.tied = nn.Linear(33, 17, bias=False)
        self.tied.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(5, 7).t())
        self.large = nn.Parameter(torch.randn(3 << 20).to(torch.bfloat16))
        self.none = nn.Parameter(torch.empty(0, 4))
        self.one = nn.Parameter(torch.randn(()))
        self.register_buffer("nan", torch.tensor([0x7F81, -1, 0], dtype=torch.int16))
        self.nan = self.nan.view(torch.bfloat16)
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(4, 3, dtype=torch.complex64).conj())
        self.register_buffer("fp8", torch.randn(9).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.randn(3, 1).expand(3, 5))


def dense(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of what it holds now."""
    return {n: t.detach().resolve_conj().clone() for n, t in named_tensors(module).items()}


def receiver(seed: int = 1) -> Zoo:
    model = Zoo(seed)
    with torch.no_grad():  # as the trainer has them, but memory of their own
        model.wave = torch.empty(4, 3, dtype=torch.complex64)
        model.wide = torch.empty(3, 5)
    poison(model)
    return model


class Gate:
    """A pause hook that holds its worker until told."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def __call__(self, mode: str) -> None:
        self.entered.set()
        assert self.go_on.wait(100)


def held(model: nn.Module, **settings: Any) -> tuple[Gate, LocalController]:
    gate = Gate()
    config = WeightTransferConfig(**{"backend": "shm", **settings})
    return gate, LocalController([Binding(model, pause=gate)], config)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_workers_get_what_the_trainer_had(backend: str, request: Any) -> None:
    if backend == "object_store":
        request.getfixturevalue("ray_session")
    trainer, worker = Zoo(), receiver()
    gate, controller = held(worker, backend=backend)
    with controller:
        expected = dense(trainer)
        handle = controller.sync_weights_async(trainer)
        assert not handle.done()
        assert handle.report is None
        poison(trainer)  # at once
        gate.go_on.set()
        report = handle.wait(100)
        assert handle.done()
        assert handle.report is report
        assert (report.version, report.workers[0].verified) == (1, "loaded")
        assert_same_bytes(expected, dense(worker))
        assert worker.tied.weight is worker.first.weight


def test_a_cast_is_that_of_the_call() -> None:
    trainer, worker = nn.Linear(9, 4), nn.Linear(9, 4).to(torch.bfloat16)
    poison(worker)
    with LocalController([worker], WeightTransferConfig(backend="shm")) as controller:
        expected = {n: t.detach().to(torch.bfloat16) for n, t in trainer.named_parameters()}
        handle = controller.sync_weights_async(ModuleSource(trainer, dtype=torch.bfloat16))
        poison(trainer)
        assert handle.wait(100).workers[0].casts == {}
        assert_same_bytes(expected, dense(worker))


def test_the_memory_is_one_and_the_same_until_shutdown() -> None:
    trainer, worker = Zoo(), receiver()
    controller = LocalController([worker], WeightTransferConfig(backend="shm"))
    snapshots = controller._sender.snapshots
    addresses: list[int] = []
    for step in range(3):
        with torch.no_grad():
            trainer.large.fill_(step)
        controller.sync_weights_async(trainer).wait(100)
        assert worker.large[0].item() == step
        assert snapshots._host is not None
        addresses.append(snapshots._host.data_ptr())
    assert len(set(addresses)) == 1
    total = sum(m.num_bytes for m in ModuleSource(trainer).metadata())
    assert total <= snapshots.num_bytes < total + 64 * len(named_tensors(trainer))
    assert find(addresses[0], 1) is not None, "where shm workers read from"
    controller.sync_weights_async({"large": trainer.large}, partial=True).wait(100)
    assert snapshots._host.data_ptr() == addresses[0], "a smaller offer fits"
    memory = weakref.ref(snapshots._host.untyped_storage())
    controller.shutdown()
    gc.collect()
    assert snapshots.num_bytes == 0
    assert memory() is None
    assert find(addresses[0], 1) is None
    controller.shutdown()


def test_a_retry_reads_the_copy() -> None:
    name = faulty("shm", Fault(side="worker", action="kill", at=1, rank=0))
    passes: list[int] = []

    class Counted(MappingSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            passes.append(1)
            return super().__iter__()

    model = Net(7)
    with ProcessWorker(Net, 1) as doomed, ProcessWorker(Net, 2) as other:
        doomed.run(poison)
        other.run(poison)
        config = WeightTransferConfig(
            backend=[name, "shm"], bucket_size_bytes=512, on_worker_failure="continue"
        )
        with LocalController([doomed, other], config) as controller:
            expected = dense(model)
            handle = controller.sync_weights_async(Counted(model.state_dict()))
            poison(model)
            report = handle.wait(110)
            assert [row.state for row in report.workers] == ["LOST", "READY"]
            assert report.attempts == 2
            assert len(passes) == 1
            assert_same_bytes(expected, other.run(dense))


@pytest.mark.parametrize("background", [True, False])
def test_the_next_sync_waits_for_it(background: bool) -> None:
    first, second, worker = Net(1), Net(2), Net(3)
    poison(worker)
    gate, controller = held(worker)
    with controller:
        handle = controller.sync_weights_async(first)
        assert gate.entered.wait(100)
        versions: list[int] = []

        def then() -> None:
            sync = controller.sync_weights_async if background else controller.sync_weights
            done: Any = sync(second)
            versions.append((done.wait(100) if background else done).version)

        thread = threading.Thread(target=then)
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        assert not handle.done()
        gate.go_on.set()
        thread.join(100)
        assert (handle.wait(0).version, versions) == (1, [2])
        assert_same_bytes(dense(second), dense(worker))


def test_how_long_it_waits_is_bounded() -> None:
    gate, controller = held(Net(3), sync_timeout_s=0.5, stall_timeout_s=30.0)
    with controller:
        controller._sender.turns.take(background=True, timeout_s=0.0, who="it")
        for sync in (controller.sync_weights, controller.sync_weights_async):
            with pytest.raises(ControllerBusy, match=r"for more than 0\.5 s"):
                sync(Net(1))
        controller._sender.turns.give_back()
        gate.go_on.set()
        controller._sender.turns.take(background=False, timeout_s=0.0, who="it")
        with pytest.raises(ControllerBusy):  # at once: it is nobody's background
            controller.sync_weights_async(Net(1))
        controller._sender.turns.give_back()
        controller.sync_weights(Net(1))


def raising() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.zeros(2)
    raise RuntimeError("the disk is gone")


A, B = ParamMeta("a", torch.float32, (2,)), ParamMeta("b", torch.float32, (2,))


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        (7, ConfigError, "int"),
        (Source([A, A], lambda: iter(())), ContractError, "duplicate name 'a'"),
        (Source([A], lambda: iter(())), ContractError, "first missing is 'a'"),
        (Source([A], lambda: iter([("b", torch.zeros(2))])), ContractError, "yielded 'b' where"),
        (Source([A], lambda: iter([("a", torch.zeros(3))])), ContractError, r"float32\[3\]"),
        (
            Source([A], lambda: iter([("a", torch.zeros(2)), ("b", torch.zeros(2))])),
            ContractError,
            "after its last name",
        ),
        (Source([A, B], raising), TransferError, "after 'a': RuntimeError: the disk is gone"),
    ],
    ids=["none", "twice", "short", "other", "shape", "long", "raises"],
)
def test_what_is_wrong_with_the_source_is_said_at_once(source: Any, error: Any, text: str) -> None:
    worker = Net(1)
    before = dense(worker)
    with LocalController([worker], WeightTransferConfig(backend="shm")) as controller:
        with pytest.raises(error, match=text):
            controller.sync_weights_async(source)
        assert controller._coordinator._next_round == 1, "nothing was begun"
        assert_same_bytes(before, dense(worker))
        assert controller.sync_weights_async(Net(2)).wait(100).version == 1


def test_what_goes_wrong_later_is_said_by_the_handle() -> None:
    def load(model: nn.Module, weights: Any) -> None:
        raise RuntimeError("no")

    model = Net(1)
    config = WeightTransferConfig(backend="shm")
    with LocalController([model], config) as controller:
        handle = controller.sync_weights_async({"nobody": torch.zeros(1)})
        for _ in range(2):
            with pytest.raises(ContractError, match="unknown name 'nobody'"):
                handle.wait(100)
        assert handle.done()
        assert handle.report is None
        assert "ContractError" in repr(handle)
    with LocalController([Net(2), Binding(Net(3), load_weights=load)], config) as controller:
        handle = controller.sync_weights_async(model)
        with pytest.raises(PartialUpdate, match="the loader raised"):
            handle.wait(100)
        assert handle.report is not None
        assert [row.state for row in handle.report.workers] == ["READY", "TORN"]


def test_a_wait_of_its_own_ends_and_the_sync_goes_on() -> None:
    gate, controller = held(Net(3))
    with controller:
        handle = controller.sync_weights_async(Net(1))
        for timeout in (0, 0.05):
            with pytest.raises(TransferTimeout, match="goes on"):
                handle.wait(timeout)
        assert "under way" in repr(handle)
        gate.go_on.set()
        assert handle.wait().version == 1


def test_it_can_be_awaited() -> None:
    worker = Net(3)
    poison(worker)
    gate, controller = held(worker)

    async def main() -> tuple[int, int, int]:
        handle = controller.sync_weights_async(Net(1))
        beats = 0
        waiting = asyncio.ensure_future(handle_of(handle))
        while not gate.entered.is_set() or beats < 3:
            await asyncio.sleep(0.01)  # the loop goes on
            beats += 1
        assert not waiting.done()
        cancelled = asyncio.ensure_future(handle_of(handle))
        await asyncio.sleep(0)
        cancelled.cancel()  # the wait, not the sync
        gate.go_on.set()
        first = (await waiting).version
        again = (await handle).version
        return first, again, (await controller.sync_weights_async(Net(2))).version

    async def handle_of(handle: SyncHandle) -> Any:
        return await handle

    with controller:
        assert asyncio.run(main()) == (1, 1, 2)
        assert_same_bytes(dense(Net(2)), dense(worker))
        with pytest.raises(ContractError):
            asyncio.run(handle_of(controller.sync_weights_async({"nobody": torch.zeros(1)})))


@pytest.mark.parametrize("when", ["before", "after", "looked"])
def test_an_error_that_nobody_looks_at_is_logged(
    when: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, controller = held(Net(3))
    with caplog.at_level(logging.WARNING, "rayxfer"), controller:
        handle = controller.sync_weights_async({"nobody": torch.zeros(1)})
        if when == "before":
            del handle
        assert controller._sender.turns.wait_free(100)
        if when == "looked":
            with pytest.raises(ContractError):
                handle.wait(100)
        if when != "before":
            del handle
    said = [record.getMessage() for record in caplog.records if record.name == "rayxfer"]
    assert len(said) == (when != "looked"), said
    assert all("nobody waited" in text and "'nobody'" in text for text in said)


def test_shutdown_lets_it_end() -> None:
    worker = Net(3)
    poison(worker)
    gate, controller = held(worker)
    handle = controller.sync_weights_async(Net(1))
    assert gate.entered.wait(100)
    threading.Timer(0.2, gate.go_on.set).start()
    controller.shutdown()
    assert handle.wait(0).version == 1
    assert_same_bytes(dense(Net(1)), dense(worker))
    assert controller._sender.snapshots.num_bytes == 0


def test_shutdown_calls_off_what_does_not_end() -> None:
    worker = Net(3)
    before = dense(worker)
    gate = Gate()
    config = WeightTransferConfig(backend="shm", stall_timeout_s=1.0)
    controller = LocalController([Binding(worker, pause=gate, resume=gate.go_on.set)], config)
    handle = controller.sync_weights_async(Net(1))
    assert gate.entered.wait(100)
    controller.shutdown()
    with pytest.raises(ControllerClosed, match="called off"):
        handle.wait(0)
    assert_same_bytes(before, dense(worker))
    assert controller.sessions[0].state == "READY"
    assert controller._sender.snapshots.num_bytes == 0


def test_in_inference_mode_too() -> None:
    trainer, worker = Net(1), Net(2)
    with LocalController([worker], WeightTransferConfig(backend="gloo")) as controller:
        with torch.inference_mode():
            controller.sync_weights_async(trainer).wait(100)
        controller.sync_weights_async(trainer).wait(100)
        assert_same_bytes(dense(trainer), dense(worker))


def test_tensors_elsewhere_stay_there() -> None:
    """As on a GPU: memory on the same device, kept by name."""

    class Elsewhere(MappingSource):
        def weights_device(self) -> torch.device:
            return torch.device("cuda:0")

    snapshots = Snapshots()
    source = Elsewhere({"a": torch.arange(5), "b": torch.ones(2, 2)})
    first = list(snapshots.take(source))
    addresses = [tensor.data_ptr() for _, tensor in first]
    with torch.no_grad():
        source._mapping["a"].zero_()
    assert first[0][1].tolist() == [0, 1, 2, 3, 4]
    again = snapshots.take(source)
    assert again.weights_device() == torch.device("cuda:0")
    assert [tensor.data_ptr() for _, tensor in again] == addresses
    assert first[0][1].tolist() == [0] * 5
    assert snapshots.num_bytes == 5 * 8 + 4 * 4
    list(snapshots.take(Elsewhere({"a": torch.arange(6)})))
    assert snapshots.num_bytes == 6 * 8


# ---- with Ray -----------------------------------------------------------------------------------


def test_a_controller_and_its_actors(ray_session: None) -> None:
    workers = plain_workers(2, Net)
    controller = Controller(workers, WeightTransferConfig(backend="shm"))
    try:
        poison_all(workers)
        model = Net(1)
        handle = controller.sync_weights_async(model)
        poison(model)
        assert controller.sync_weights_async(Net(2)).wait(100).version == 2
        assert handle.wait(0).version == 1
        assert_exact(Net(2), workers)
        status = controller.status()
        assert (status.version, status.busy) == (2, False)

        async def main() -> int:
            return (await controller.sync_weights_async(Net(3))).version

        assert asyncio.run(main()) == 3
        assert_exact(Net(3), workers)
        with pytest.raises(ConfigError, match="call it in the trainer"):
            controller.sync_weights_async(trainer_of())
    finally:
        controller.shutdown()
    with pytest.raises((ControllerClosed, TransferError)):
        controller.sync_weights_async(Net(4)).wait(100)


def trainer_of() -> Any:
    import ray

    class Trainer:
        def sync_weights(self, controller: Any, **_: Any) -> None:
            raise AssertionError("not to be called")

    return ray.remote(Trainer).options(num_cpus=0).remote()


EXIT = """
    import torch
    from rayxfer import WeightTransferConfig
    from rayxfer.binding import Binding
    from rayxfer.testing.local import LocalController
    import threading
    entered = threading.Event()
    def pause(mode):
        entered.set()
        {hold}
    worker = torch.nn.Linear(64, 64)
    resume = threading.Event()
    controller = LocalController([Binding(worker, pause=pause, resume=resume.set)],
        WeightTransferConfig(backend="{backend}"))
    for _ in range({rounds}):
        handle = controller.sync_weights_async(torch.nn.Linear(64, 64))
    assert entered.wait(60)
    print("over")
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize(
    ("hold", "rounds"), [("resume.wait(60)", 1), ("pass", 20)], ids=["held", "moving"]
)
def test_the_interpreter_ends_with_one_under_way(hold: str, rounds: int, backend: str) -> None:
    code = textwrap.dedent(EXIT.format(hold=hold, rounds=rounds, backend=backend))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["over"]
    assert "Fatal" not in done.stderr
    assert "Exception ignored" not in done.stderr
