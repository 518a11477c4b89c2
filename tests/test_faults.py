"""A round either happened or it didn't: real kills, real stops, on real Ray."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch

from actors import InferenceActor, TrainerActor
from rayxfer import (
    Controller,
    ControllerBusy,
    PartialUpdate,
    RayxferError,
    StateError,
    TransferError,
    TransferTimeout,
    WeightTransferConfig,
)
from rayxfer.testing import Fault, assert_same_bytes, faulty, poison

CPU_BACKENDS = ("shm", "gloo", "object_store")
WIDTH = 96


class Net(torch.nn.Module):
    """Twelve layers: several buckets at the size used here."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(12))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.one_hot(ids % WIDTH, WIDTH).float()
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def builder(seed: int) -> Callable[[], Net]:
    return lambda: Net(seed)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.apply.remote(lambda model: os.getpid())))


def settings(backend: str, **more: Any) -> WeightTransferConfig:
    defaults: dict[str, Any] = {"stall_timeout_s": 2.0, "bucket_size_bytes": 40_000}
    return WeightTransferConfig(backend=backend, **{**defaults, **more})


_pool: list[Any] = []


def workers(count: int) -> list[Any]:
    """Restartable workers, shared by the tests (a process is dear), poisoned. What an earlier test
    killed is back by then, at whatever version."""
    while len(_pool) < count:
        seed = 100 + len(_pool)
        _pool.append(InferenceActor.options(num_cpus=0, max_restarts=-1).remote(builder(seed)))
    fleet = _pool[:count]
    until(lambda: all(_alive(worker) for worker in fleet))
    if any(ray.get(w.state.remote()) != "READY" for w in fleet):
        with Controller(fleet, settings("shm")) as controller:
            controller.sync_weights(Net(0))
    ray.get([w.apply.remote(poison) for w in fleet])
    return fleet


def _alive(worker: Any) -> bool:
    try:
        return bool(ray.get(worker.ping.remote(), timeout=10))
    except ray.exceptions.RayError:
        return False


_open: list[Controller] = []


def control(*args: Any, **kwargs: Any) -> Controller:
    """A controller that ends with the test, also with one that fails."""
    _open.append(Controller(*args, **kwargs))
    return _open[-1]


@pytest.fixture(autouse=True)
def _end_of_controllers() -> Iterator[None]:
    yield
    while _open:
        _open.pop().shutdown()


@pytest.fixture(scope="module", autouse=True)
def _end_of_pool() -> Iterator[None]:
    yield
    while _pool:
        ray.kill(_pool.pop())


def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, "it did not come to pass in time"
        time.sleep(0.05)
    return time.monotonic() - start


def expect(actors: list[Any], model: torch.nn.Module) -> None:
    for actor in actors:
        assert_same_bytes(state(model), ray.get(actor.apply.remote(state)))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("action", ["kill", "stop"])
def test_worker_lost_mid_transfer(ray_session: None, backend: str, action: str) -> None:
    """Survivors commit in the same call; the lost one rejoins at that version without the trainer."""
    fleet = workers(3)
    pid = pid_of(fleet[1])
    model = Net(1)
    fault = Fault("worker", action, at=3, rank=1)  # type: ignore[arg-type]
    controller = control(fleet, settings(faulty(backend, fault)))
    base = controller.status().version
    start = time.monotonic()
    with pytest.raises(PartialUpdate) as caught:
        controller.sync_weights(model)
    assert time.monotonic() - start < 8.0
    report = caught.value.report
    assert [row.state for row in report.workers] == ["READY", "LOST", "READY"]
    assert report.version == base + 1
    assert report.attempts == 2
    assert report.workers[1].error is not None
    expect([fleet[0], fleet[2]], model)
    if action == "stop":
        os.kill(pid, signal.SIGCONT)
    until(lambda: all(w.state == "READY" for w in controller.status().workers))
    assert ray.get(fleet[1].weight_version.remote()) == base + 1
    expect(fleet, model)
    after = Net(2)
    assert controller.sync_weights(after).attempts == 1
    expect(fleet, after)


def test_stopped_worker_that_wakes_up_writes_nothing_stale(ray_session: None) -> None:
    """It slept through two versions; what it holds afterwards is the last one, whole."""
    fleet = workers(2)
    pid = pid_of(fleet[1])
    controller = control(fleet, settings(faulty("gloo", Fault("worker", "stop", at=2, rank=1))))
    base = controller.status().version
    for seed in (1, 2):
        with pytest.raises(PartialUpdate):
            controller.sync_weights(Net(seed))
    os.kill(pid, signal.SIGCONT)
    until(lambda: controller.status().workers[1].state == "READY")
    expect(fleet, Net(2))
    assert ray.get(fleet[1].weight_version.remote()) == base + 2


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_killed_between_connect_and_first_sync(ray_session: None, backend: str) -> None:
    fleet = workers(2)
    pid = pid_of(fleet[0])
    controller = control(fleet, settings(backend))
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PartialUpdate) as caught:
        controller.sync_weights(Net(1))
    assert [row.state for row in caught.value.report.workers] == ["LOST", "READY"]
    expect([fleet[1]], Net(1))


def test_no_survivor_is_no_commit(ray_session: None) -> None:
    fleet = workers(1)
    controller = control(fleet, settings(faulty("shm", Fault("worker", "kill", at=1))))
    base = controller.status().version
    with pytest.raises(TransferError, match="was not committed"):
        controller.sync_weights(Net(1))
    assert controller.status().version == base


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_flipped_bit_is_found_and_named(ray_session: None, backend: str) -> None:
    """The worker that got it is TORN and holds; the other commits; the next sync repairs."""
    fleet = workers(2)
    model = Net(1)
    controller = control(fleet, settings(faulty(backend, Fault("worker", "flip", at=2, rank=0))))
    with pytest.raises(PartialUpdate, match="digest mismatch at 'layers") as caught:
        controller.sync_weights(model)
    row = caught.value.report.workers[0]
    assert row.state == "TORN"
    assert getattr(row.error, "name", "").startswith("layers.")
    assert getattr(row.error, "phase", "") == "verify"
    assert ray.get(fleet[0].state.remote()) == "TORN"
    expect([fleet[1]], model)
    controller.sync_weights(Net(2))
    expect(fleet, Net(2))


def test_torn_worker_holds_requests_until_repaired(ray_session: None) -> None:
    fleet = workers(2)
    controller = control(fleet, settings(faulty("shm", Fault("worker", "flip", at=2, rank=0))))
    with pytest.raises(PartialUpdate):
        controller.sync_weights(Net(1))
    with pytest.raises(TransferTimeout):
        ray.get(fleet[0].generate.remote([[1, 2]], max_new_tokens=1, timeout_s=0.5))
    held = fleet[0].generate.remote([[1, 2]], max_new_tokens=2, timeout_s=60.0)
    done, _ = ray.wait([held], timeout=0.5)
    assert not done, "a torn worker served"
    report = controller.sync_weights(Net(2))
    (completion,) = ray.get(held)
    assert completion.weight_version == report.version


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_staged_round_that_fails_changes_nothing(ray_session: None, backend: str) -> None:
    fleet = workers(2)
    faults = [Fault("worker", "flip", at=2)]
    controller = control(fleet, settings(faulty(backend, *faults), load_mode="staged"))
    base = controller.status().version
    before = [ray.get(w.apply.remote(state)) for w in fleet]
    with pytest.raises((PartialUpdate, TransferError)) as caught:
        controller.sync_weights(Net(1))
    report = getattr(caught.value, "report", None)
    assert report is not None
    for row, worker, old in zip(report.workers, fleet, before, strict=True):
        if row.error is not None:
            assert row.state == "READY"
            assert row.version == base
            assert_same_bytes(old, ray.get(worker.apply.remote(state)))
    controller.sync_weights(Net(2))
    expect(fleet, Net(2))


@pytest.mark.parametrize("load_mode", ["in_place", "staged"])
def test_trainer_killed_mid_round_three_times(ray_session: None, load_mode: str) -> None:
    """Workers are freed at once, whole or TORN; a new trainer attaches by name and repairs them."""
    fleet = workers(2)
    truth = Net(0)
    first = control(fleet, settings("shm", load_mode=load_mode), name=f"trainers-{load_mode}")
    base = first.sync_weights(truth).version
    for attempt in range(3):
        slow = TrainerActor.options(num_cpus=0).remote(builder(10 + attempt))
        pid = pid_of(slow)
        ref = slow.apply.remote(_sync_slowly(first.name))
        until(lambda: first.status().busy)
        time.sleep(0.4)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(ref, timeout=30)
        until(lambda: not first.status().busy, timeout_s=6.0)
        states = {str(w.state) for w in first.status().workers}
        assert states <= ({"READY"} if load_mode == "staged" else {"READY", "TORN"})
        if load_mode == "staged":
            expect(fleet, truth)
        fresh = TrainerActor.options(num_cpus=0).remote(builder(20 + attempt))
        truth = Net(20 + attempt)
        report = ray.get(fresh.apply.remote(_sync_by_name(first.name)))
        assert report.version == base + 1 + attempt
        expect(fleet, truth)
        ray.kill(fresh)


def _sync_by_name(name: str) -> Callable[[torch.nn.Module], Any]:
    return lambda model: Controller(name=name).sync_weights(model)


def _sync_slowly(name: str) -> Callable[[torch.nn.Module], Any]:
    """Half-way through the model the source takes its time."""

    def run(model: torch.nn.Module) -> Any:
        from rayxfer import ModuleSource

        class Slow(ModuleSource):
            def __iter__(self) -> Any:
                for index, item in enumerate(super().__iter__()):
                    if index >= 12:
                        time.sleep(0.5)
                    yield item

        return Controller(name=name).sync_weights(Slow(model))

    return run


def controller_pid(controller: Controller) -> int:
    return int(ray.get(controller._actor.__ray_call__.remote(lambda self: os.getpid())))


def test_controller_killed_mid_round_and_between(ray_session: None) -> None:
    fleet = workers(2)
    slow = faulty("shm", Fault("sender", "delay", at=10, seconds=1.5))
    controller = control(fleet, settings(slow), name="phoenix")
    base = controller.status().version
    outcome: list[Any] = []

    def sync() -> None:
        try:
            outcome.append(controller.sync_weights(Net(1)))
        except RayxferError as error:
            outcome.append(error)

    thread = threading.Thread(target=sync)
    thread.start()
    until(lambda: controller.status().busy)
    os.kill(controller_pid(controller), signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert outcome[0].version == base + 1, outcome
    expect(fleet, Net(1))
    assert controller.status().version == base + 1
    os.kill(controller_pid(controller), signal.SIGKILL)
    assert controller.sync_weights(Net(2)).version == base + 2
    expect(fleet, Net(2))
    os.kill(controller_pid(controller), signal.SIGKILL)
    assert Controller(name="phoenix").status().version == base + 2, "the version went back"
    assert [w.state for w in controller.status().workers] == ["READY", "READY"]


def test_a_call_that_a_dying_controller_cuts_off_is_made_again_at_once(ray_session: None) -> None:
    """By Ray, as soon as the actor is back: our own retry would come up to two seconds later."""
    controller = control(workers(2), settings("shm"))
    for _ in range(3):
        pid = controller_pid(controller)
        os.kill(pid, signal.SIGKILL)
        assert ray.get(controller._actor.controller_id.remote(), timeout=60)
        assert controller_pid(controller) != pid


def test_a_restarted_controller_imports_no_class_of_its_workers(ray_session: None) -> None:
    """Nor torch with it: a sync may be waiting. It has all of its workers' methods nevertheless."""
    fleet = workers(2)
    controller = control(fleet, settings("shm", retain="host"))
    base = controller.sync_weights(Net(1)).version

    def imported() -> set[str]:
        loaded = controller._actor.__ray_call__.remote(lambda self: set(sys.modules))
        return set(ray.get(loaded)) & {"torch", "actors.inference", "rayxfer.keeper"}

    assert imported() == set()
    os.kill(controller_pid(controller), signal.SIGKILL)
    assert [(w.state, w.version) for w in controller.status().workers] == [("READY", base)] * 2
    assert imported() == set()
    assert controller.sync_weights(Net(2)).version == base + 1
    expect(fleet, Net(2))


def test_an_urgent_message_of_the_controller_waits_behind_nothing(ray_session: None) -> None:
    """The handle that knows no class of its worker still leads to that worker's threads."""
    (worker,) = workers(1)
    controller = control([worker], settings("shm"))

    def ask(self: Any) -> bool:
        (member,) = self._members.values()
        busy = member.client.handle.apply.remote(fn=lambda model: time.sleep(3))
        member.client.signal("snapshot", {}).result(timeout=20)
        done, _ = ray.wait([busy], timeout=0)
        ray.get(busy)
        return not done

    assert ray.get(controller._actor.__ray_call__.remote(ask), timeout=100)


@pytest.mark.parametrize("how", ["removed", "killed"])
def test_a_handle_tells_a_restarted_controller_of_its_later_workers(
    ray_session: None, how: str
) -> None:
    """Those that it was made with cannot: one knows no controller any more, the other is dead."""
    first = InferenceActor.options(num_cpus=0).remote(builder(1))
    (later,) = workers(1)
    controller = control([first], settings("shm"), name=f"later-{how}")
    base = controller.sync_weights(Net(1)).version
    controller.add_workers([later])
    assert controller.sync_weights(Net(2)).version == base + 1
    if how == "removed":
        controller.remove_workers([first])
    else:
        os.kill(pid_of(first), signal.SIGKILL)
    os.kill(controller_pid(controller), signal.SIGKILL)
    with pytest.raises(StateError, match="remembers its version"):
        Controller(name=controller.name).status()
    status = controller.status()
    assert status.version == base + 1
    gone = [] if how == "removed" else [(0, "LOST")]
    assert [(w.rank, w.state) for w in status.workers] == [*gone, (1, "READY")]
    assert status.workers[-1].version == base + 1
    assert Controller(name=controller.name).status().version == base + 1
    if how == "killed":
        controller.remove_workers([0])
    assert controller.sync_weights(Net(3)).version == base + 2
    expect([later], Net(3))
    ray.kill(first)


def test_the_version_stands_when_every_worker_and_the_controller_die(ray_session: None) -> None:
    """Only the handle knows it then. The workers come back, and wait for the next one."""
    fleet = workers(2)
    controller = control(fleet, settings("shm"))
    version = controller.status().version + 5
    controller.sync_weights(Net(1), version=version)
    for pid in [*map(pid_of, fleet), controller_pid(controller)]:
        os.kill(pid, signal.SIGKILL)
    assert controller.status().version == version
    until(lambda: all(w.state == "CONNECTING" for w in controller.status().workers))
    assert controller.sync_weights(Net(2)).version == version + 1
    expect(fleet, Net(2))


def test_the_handle_that_saw_most_is_believed(ray_session: None) -> None:
    """The creator's knows neither the later worker nor the version; it happens to come first."""
    first = InferenceActor.options(num_cpus=0).remote(builder(1))
    (later,) = workers(1)
    creator = control([first], settings("shm"), name="two-handles")
    other = Controller(name="two-handles")
    other.add_workers([later])
    version = creator.status().version + 3
    other.sync_weights(Net(1), version=version)
    os.kill(pid_of(first), signal.SIGKILL)
    os.kill(controller_pid(creator), signal.SIGKILL)
    assert creator.status().version < version
    status = other.status()
    assert [(w.rank, w.state, w.version) for w in status.workers][1:] == [(1, "READY", version)]
    assert creator.status().version == version
    creator.remove_workers([0])
    assert creator.sync_weights(Net(2)).version == version + 1
    expect([later], Net(2))


def test_joining_worker_catches_up_without_the_trainer(ray_session: None) -> None:
    fleet = workers(2)
    controller = control(fleet[:1], settings("auto"))
    version = controller.status().version + 7
    controller.sync_weights(Net(3), version=version)
    (rank,) = controller.add_workers([fleet[1]])
    status = controller.status().workers[rank]
    assert (status.state, status.version) == ("READY", version)
    expect(fleet, Net(3))


def test_joining_worker_that_no_peer_can_help_stays_connecting(ray_session: None) -> None:
    """fp32 came over the wire, the peer holds bf16: what it could give is not what was sent."""
    narrow = InferenceActor.options(num_cpus=0).remote(lambda: Net(5).to(torch.bfloat16))
    wide = InferenceActor.options(num_cpus=0).remote(builder(6))
    ray.get(wide.apply.remote(poison))
    controller = control([narrow], settings("auto"))
    controller.sync_weights(Net(1))
    (rank,) = controller.add_workers([wide])
    status = controller.status().workers[rank]
    assert status.state == "CONNECTING"
    assert "does not hold version 1" in str(status.error)
    controller.sync_weights(Net(2))
    assert controller.status().workers[rank].state == "READY"
    expect([wide], Net(2))


def test_members_come_and_go(ray_session: None) -> None:
    fleet = workers(3)
    controller = control(fleet[:1], settings("auto"))
    base = controller.status().version
    for turn in range(1, 51):
        model = Net(turn)
        (rank,) = controller.add_workers([fleet[1 + turn % 2]])
        assert controller.sync_weights(model).version == base + turn
        expect([fleet[0], fleet[1 + turn % 2]], model)
        controller.remove_workers([rank])
    assert [w.rank for w in controller.status().workers] == [0]


def test_removed_during_a_round(ray_session: None) -> None:
    fleet = workers(2)
    slow = faulty("shm", Fault("sender", "delay", at=10, seconds=1.0))
    controller = control(fleet, settings(slow))
    thread = threading.Thread(target=lambda: controller.sync_weights(Net(1)))
    thread.start()
    until(lambda: controller.status().busy)
    controller.remove_workers([1])
    thread.join(30)
    assert [w.rank for w in controller.status().workers] == [0]
    expect([fleet[0]], Net(1))


def test_busy_while_the_trainer_lives(ray_session: None) -> None:
    fleet = workers(1)
    slow = faulty("shm", Fault("sender", "delay", at=10, seconds=2.0))
    other = TrainerActor.options(num_cpus=0).remote(builder(2))
    ray.get(other.ping.remote())
    controller = control(fleet, settings(slow, stall_timeout_s=10.0), name="busy-one")
    thread = threading.Thread(target=lambda: controller.sync_weights(Net(1)))
    thread.start()
    until(lambda: controller.status().busy)
    with pytest.raises(ControllerBusy):
        try:
            ray.get(other.apply.remote(_sync_by_name("busy-one")))
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
    thread.join(30)
    expect(fleet, Net(1))


def test_stalled_source_is_a_timeout(ray_session: None) -> None:
    fleet = workers(2)
    controller = control(fleet, settings("shm", stall_timeout_s=1.0))

    from rayxfer import ModuleSource

    class Source(ModuleSource):
        def __iter__(self) -> Any:
            for index, item in enumerate(super().__iter__()):
                if index == 5:
                    time.sleep(8)
                yield item

    start = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"layers\.2"):
        controller.sync_weights(Source(Net(1)))
    assert time.monotonic() - start < 4.0
    controller.sync_weights(Net(2))
    expect(fleet, Net(2))


def test_five_controllers_at_once(ray_session: None) -> None:
    """Ports and names do not collide; each fleet gets its own weights."""
    fleets = [[worker] for worker in workers(5)]
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            with Controller(fleets[index], settings("gloo")) as controller:
                controller.sync_weights(Net(index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors
    for index, fleet in enumerate(fleets):
        expect(fleet, Net(index))


def test_keeper_brings_a_worker_up_when_no_peer_can(ray_session: None) -> None:
    """retain="host": the peer holds a cast, the keeper what travelled; it shows up nowhere else."""
    narrow = InferenceActor.options(num_cpus=0).remote(lambda: Net(5).to(torch.bfloat16))
    (wide,) = workers(1)
    controller = control([narrow], settings("auto", retain="host"))
    version = controller.status().version + 40
    report = controller.sync_weights(Net(1), version=version)
    assert [row.rank for row in report.workers] == [0]
    part = {"layers.3.bias": torch.full((WIDTH,), 2.5)}
    controller.sync_weights(part, partial=True)
    (rank,) = controller.add_workers([wide])
    status = controller.status().workers
    assert [w.rank for w in status] == [0, rank]
    assert (status[rank].state, status[rank].version) == ("READY", version + 1)
    expected = Net(1)
    with torch.no_grad():
        expected.layers[3].bias.copy_(part["layers.3.bias"])
    expect([wide], expected)
    ray.kill(narrow)
