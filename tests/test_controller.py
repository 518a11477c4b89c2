"""`Controller` on real Ray: what it takes, versions, membership, sharing, and its ends."""

from __future__ import annotations

import asyncio
import os
import pickle
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import ray
import torch

import rayxfer.controller
from actors import TrainerActor
from rayxfer import (
    BackendUnavailable,
    ConfigError,
    Controller,
    ControllerBusy,
    ControllerClosed,
    MappingSource,
    StateError,
    UnknownBackend,
    WeightTransferConfig,
    WorkerLost,
    WorkerMixin,
)
from rayxfer.client import spawn
from tests.fleet import (
    Net,
    Plain,
    assert_exact,
    close_shared,
    controller_of,
    gated,
    held,
    joined,
    named_actors,
    net,
    plain_workers,
    poison_all,
    source_of,
)
from tests.helpers import assert_same_bytes


@pytest.fixture(scope="module", autouse=True)
def _ends(ray_session: None) -> Iterator[None]:
    yield
    close_shared()


def test_five_controllers_at_once() -> None:
    """vllm#51275: no port is fought over."""
    workers = plain_workers(5, net)
    config = WeightTransferConfig(backend="gloo", connect_timeout_s=60)
    futures = [spawn(lambda w=w: Controller([w], config), "make") for w in workers]
    controllers: list[Controller] = []
    try:
        for future in futures:
            controllers.append(future.result(timeout=90))
        syncs = [spawn(lambda c=c: c.sync_weights(Net(5)), "sync") for c in controllers]
        assert [sync.result(timeout=60).version for sync in syncs] == [1] * 5
        assert_exact(Net(5), workers)
    finally:
        for future in futures:
            if future.exception(timeout=90) is None:
                future.result().shutdown()


@pytest.fixture(scope="module")
def fleet(ray_session: None) -> Iterator[tuple[Controller, list[Any]]]:
    """Two workers under one controller, shared by the tests that break neither."""
    workers = plain_workers(2, net)
    with controller_of(workers, backend="shm", stall_timeout_s=10.0) as controller:
        yield controller, workers


@pytest.fixture
def spare(ray_session: None) -> list[Any]:
    """Two more workers, without a controller."""
    return plain_workers(2, net, first=2)


# ---- what sync_weights takes --------------------------------------------------------------------


SHAPES: dict[str, Callable[[Net], Any]] = {
    "module": lambda model: model,
    "dict": lambda model: held(model),
    "ordered dict": lambda model: OrderedDict(reversed(held(model).items())),
    "state dict": lambda model: model.state_dict(),
    "mapping source": lambda model: MappingSource(held(model)),
    "own source": source_of,
}


@pytest.mark.parametrize("offer", SHAPES.values(), ids=SHAPES)
def test_sync_from(offer: Callable[[Net], Any], fleet: tuple[Controller, list[Any]]) -> None:
    controller, workers = fleet
    model = Net(7)
    before = held(model)
    poison_all(workers)
    version = controller.status().version
    report = controller.sync_weights(offer(model))
    assert report.version == version + 1
    assert [(row.rank, row.state, row.version) for row in report.workers] == [
        (0, "READY", version + 1),
        (1, "READY", version + 1),
    ]
    assert_exact(before, workers)
    assert_exact(before, [])
    assert {n: t.tolist() for n, t in held(model).items()} == {
        n: t.tolist() for n, t in before.items()
    }
    assert ray.get([worker.weight_version.remote() for worker in workers]) == [version + 1] * 2


class Rank:
    """One of two data-parallel trainers: only the first sends."""

    def __init__(self, rank: int, seed: int) -> None:
        self.rank, self.model = rank, Net(seed)

    def sync_weights(
        self, controller: Controller, *, version: int | None = None, partial: bool = False
    ) -> Any:
        if self.rank == 0:
            return controller.sync_weights(self.model, version=version, partial=partial)
        return None


def test_sync_from_trainer_actors(fleet: tuple[Controller, list[Any]]) -> None:
    """A handle, a list of one, and two data-parallel ranks."""
    controller, workers = fleet
    ranks = [ray.remote(Rank).options(num_cpus=0).remote(r, 30 + r) for r in range(2)]
    try:
        for offer in (ranks[0], [ranks[0]], ranks):
            poison_all(workers)
            version = controller.status().version + 5
            report = controller.sync_weights(offer, version=version)
            assert report.version == controller.status().version == version
            assert_exact(Net(30), workers)
        with pytest.raises(StateError, match="not above"):  # raised there, our type here
            controller.sync_weights(ranks[0], version=version)
    finally:
        for actor in ranks:
            ray.kill(actor)


@pytest.mark.parametrize("bad", [None, 7, "weights.pt", [1, 2], [torch.zeros(2)]], ids=repr)
def test_what_is_no_model_is_refused(bad: Any, fleet: tuple[Controller, list[Any]]) -> None:
    controller, _ = fleet
    version = controller.status().version
    with pytest.raises(ConfigError):
        controller.sync_weights(bad)
    assert controller.status().version == version


def test_an_actor_that_is_no_trainer_is_refused(fleet: tuple[Controller, list[Any]]) -> None:
    controller, workers = fleet
    with pytest.raises(ConfigError, match="sync_weights"):
        controller.sync_weights(workers[0])


# ---- versions -----------------------------------------------------------------------------------


def test_versions_go_up_only(fleet: tuple[Controller, list[Any]]) -> None:
    controller, workers = fleet
    start = controller.status().version
    model = Net(1)
    assert controller.sync_weights(model).version == start + 1
    assert controller.sync_weights(model, version=start + 40).version == start + 40
    poison_all(workers)
    poisoned = held(ray.get(workers[0].run.remote(lambda self: self.model)))
    for low in (start + 40, start, 0, -1):
        with pytest.raises(StateError, match=str(start + 40)):
            controller.sync_weights(model, version=low)
    for bad in (True, "7", 7.0):
        with pytest.raises(ConfigError):
            controller.sync_weights(model, version=bad)  # type: ignore[arg-type]
    assert controller.status().version == start + 40
    assert_exact(poisoned, workers)
    assert controller.sync_weights(model).version == start + 41
    assert_exact(model, workers)


# ---- one round at a time; answers meanwhile -----------------------------------------------------


def test_a_second_caller_is_told_busy_and_status_answers(
    fleet: tuple[Controller, list[Any]], spare: list[Any]
) -> None:
    controller, workers = fleet
    version = controller.status().version
    entered, go_on = threading.Event(), threading.Event()
    poison_all(workers)
    first = spawn(lambda: controller.sync_weights(gated(Net(3), entered, go_on)), "first")
    try:
        assert entered.wait(30)
        for _ in range(5):
            start = time.monotonic()
            status = controller.status()
            assert time.monotonic() - start < 1.0
            assert status.version == version
            assert status.busy
            time.sleep(0.2)
        assert [row.state for row in status.workers] == ["UPDATING", "UPDATING"]
        with pytest.raises(ControllerBusy):
            controller.sync_weights(Net(4))
        attached = Controller(name=controller.name)
        with pytest.raises(ControllerBusy):  # another handle, same process
            attached.sync_weights(Net(4))

        def elsewhere(worker: Plain) -> str:
            try:
                controller.sync_weights(Net(4))
            except ControllerBusy as error:
                return str(error)
            return "was not refused"

        said = ray.get(spare[0].run.remote(elsewhere), timeout=30)
        assert "busy" in said
    finally:
        go_on.set()
    report = first.result(timeout=60)
    assert report.version == version + 1
    assert_exact(Net(3), workers)
    status = controller.status()
    assert not status.busy
    assert [row.state for row in status.workers] == ["READY", "READY"]


def test_copies_in_other_processes_share_one_controller(
    fleet: tuple[Controller, list[Any]], spare: list[Any]
) -> None:
    controller, workers = fleet
    start = controller.status().version
    copy = pickle.loads(cloudpickle.dumps(controller))
    assert copy.name == controller.name
    assert copy.config == controller.config
    for step in range(1, 4):
        poison_all(workers)
        model = Net(60 + step)
        if step == 2:  # another process sends; then this one again
            report = ray.get(
                spare[0].run.remote(lambda self: controller.sync_weights(Net(62))), timeout=60
            )
        else:
            report = copy.sync_weights(model)
        assert report.version == start + step
        assert report.attempts == 1
        assert_exact(model, workers)
    assert controller.status().version == start + 3


def test_inside_a_running_event_loop(fleet: tuple[Controller, list[Any]]) -> None:
    controller, workers = fleet
    poison_all(workers)

    async def main() -> int:
        inside = controller.sync_weights(Net(8)).version
        assert controller.status().version == inside
        later = await asyncio.to_thread(controller.sync_weights, Net(9))
        return later.version - inside

    assert asyncio.run(main()) == 1
    assert_exact(Net(9), workers)


# ---- names --------------------------------------------------------------------------------------


def test_a_name_attaches_and_is_not_mistaken_for_another(
    spare: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WeightTransferConfig(backend="shm")
    controller = Controller(spare[:1], config, name="test-names")
    try:
        attached = Controller(name="test-names")
        assert attached.config == config
        assert attached.sync_weights(Net(1)).version == 1
        assert Controller(spare[:1], config, name="test-names").status().version == 1
        assert_exact(Net(1), spare[:1])
        with pytest.raises(ConfigError, match="other workers"):
            Controller(spare, config, name="test-names")
        with pytest.raises(ConfigError, match="another config"):
            Controller(spare[:1], WeightTransferConfig(backend="gloo"), name="test-names")
        assert controller.sync_weights(Net(2)).version == 2  # and it lives on
        assert_exact(Net(2), spare[:1])
    finally:
        controller.shutdown()
    with pytest.raises(ControllerClosed, match="test-names"):
        Controller(name="test-names")


# ---- refusals -----------------------------------------------------------------------------------


def test_an_unknown_backend_is_refused_before_anything_is_touched() -> None:
    before = named_actors()
    with pytest.raises(UnknownBackend, match=r"carrier-pigeon.*gloo"):
        Controller([object()], WeightTransferConfig(backend="carrier-pigeon"))
    with pytest.raises(UnknownBackend, match="carrier-pigeon"):
        Controller([object(), object()], WeightTransferConfig(backend=["shm", "carrier-pigeon"]))
    assert named_actors() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a CUDA device")
def test_a_cuda_backend_on_a_cpu_says_what_is_missing(
    fleet: tuple[Controller, list[Any]], spare: list[Any]
) -> None:
    """vllm#57022."""
    controller, _ = fleet
    before = named_actors()
    start = time.monotonic()
    with pytest.raises(BackendUnavailable, match=r"(?i)cuda|gpu"):
        Controller(spare, WeightTransferConfig(backend="nccl"))
    assert time.monotonic() - start < 15
    assert named_actors() == before
    with pytest.raises(BackendUnavailable, match=r"(?i)cuda|gpu"):
        controller.add_workers(spare, backend="ipc")
    assert len(controller.status().workers) == 2


class NotAWorker:
    def ping(self) -> bool:
        return True


class Unbound(WorkerMixin):
    """Inherits the mixin and never calls rayxfer_bind."""


@pytest.mark.parametrize(
    ("kind", "says"),
    [(NotAWorker, "WorkerMixin"), (Unbound, "rayxfer_bind")],
    ids=["plain", "unbound"],
)
def test_what_is_no_worker_is_refused(
    kind: type, says: str, fleet: tuple[Controller, list[Any]], spare: list[Any]
) -> None:
    """By the constructor and by add_workers; then nobody has joined, or is left owned."""
    controller, _ = fleet
    before = named_actors()
    actor = ray.remote(kind).options(num_cpus=0).remote()
    try:
        ray.get(actor.ping.remote())
        start = time.monotonic()
        with pytest.raises(ConfigError, match=says):
            Controller([spare[0], actor], WeightTransferConfig(backend="shm"))
        assert time.monotonic() - start < 15
        assert named_actors() == before
        start = time.monotonic()
        with pytest.raises(ConfigError, match=says):
            controller.add_workers([spare[0], actor])
        assert time.monotonic() - start < 3
        assert len(controller.status().workers) == 2
        ranks = controller.add_workers(spare[:1])  # free: it can join
        controller.remove_workers(ranks)
    finally:
        ray.kill(actor)


def test_a_dead_worker_is_named(fleet: tuple[Controller, list[Any]]) -> None:
    controller, _ = fleet
    actor = ray.remote(Plain).options(num_cpus=0).remote()
    ray.get(actor.bind.remote(net))
    ray.kill(actor)
    start = time.monotonic()
    with pytest.raises(WorkerLost, match=r"worker \d") as caught:
        controller.add_workers([actor])
    assert time.monotonic() - start < 15
    assert caught.value.worker is not None
    assert len(controller.status().workers) == 2


def test_the_same_worker_twice_is_refused(spare: list[Any]) -> None:
    before = named_actors()
    with pytest.raises(ConfigError, match="same actor"):
        Controller([spare[0], spare[0]], WeightTransferConfig(backend="shm"))
    with pytest.raises(ConfigError, match="2 workers"):
        Controller(spare, WeightTransferConfig(backend=["shm"]))
    assert named_actors() == before


# ---- ownership and membership -------------------------------------------------------------------


def test_a_worker_has_one_controller(fleet: tuple[Controller, list[Any]], spare: list[Any]) -> None:
    """A live owner keeps its workers; those of a dead one can be taken over."""
    controller, workers = fleet
    with (
        pytest.raises(ConfigError, match=r"worker \d+ .*" + controller.name),
        joined([spare[0], workers[0]], "shm", bucket_size_bytes=1024),
    ):
        pass
    poison_all(workers)
    controller.sync_weights(Net(2))
    assert_exact(Net(2), workers)

    doomed = Controller(spare, WeightTransferConfig(backend="shm"))
    assert doomed.name != controller.name
    assert {doomed.name, controller.name} <= named_actors()
    doomed.sync_weights(Net(3), version=9)
    ray.kill(ray.get_actor(doomed.name, namespace="rayxfer"))
    poison_all(spare)
    with controller_of(spare, backend="gloo") as heir:
        assert heir.status().version == 9  # what the fleet serves
        assert heir.sync_weights(Net(4)).version == 10
        assert_exact(Net(4), spare)
    doomed.shutdown()  # the handle of a dead controller: harmless


def test_add_and_remove_workers(spare: list[Any]) -> None:
    more = plain_workers(1, net, first=4)
    with controller_of([], backend="shm") as controller:
        assert controller.status().workers == ()
        assert controller.add_workers(spare[:1]) == [0]
        controller.sync_weights(Net(1))
        assert controller.add_workers([spare[1]]) == [1]
        assert_exact(Net(1), spare)  # caught up from its peer
        assert controller.add_workers(more, backend="gloo") == [2]
        assert_exact(Net(1), more)
        status = controller.status()
        assert [(row.state, row.version) for row in status.workers] == [("READY", 1)] * 3
        report = controller.sync_weights(Net(2))
        assert [row.backend for row in report.workers] == ["shm", "shm", "gloo"]
        assert {row.version for row in report.workers} == {2}
        assert_exact(Net(2), [*spare, *more])

        controller.remove_workers([spare[0]])  # by handle
        controller.remove_workers([2])  # by rank
        assert [row.rank for row in controller.status().workers] == [1]
        controller.sync_weights(Net(3))
        assert_exact(Net(3), [spare[1]])
        assert_exact(Net(2), [spare[0], *more])
        for unknown in ([0], [spare[0]], [99]):
            with pytest.raises(ConfigError):
                controller.remove_workers(unknown)
        assert controller.add_workers([spare[0]]) == [3]  # ranks are never used twice
        with pytest.raises(ConfigError, match="already"):
            controller.add_workers([*more, spare[1]])  # one bad: none joins
        assert [row.rank for row in controller.status().workers] == [1, 3]
        with joined(more, "shm", bucket_size_bytes=1024) as other:  # so this one is free
            other.sync_weights(Net(5))
            assert_exact(Net(5), more)
        controller.sync_weights(Net(4))
        assert_exact(Net(4), spare)


def test_workers_come_and_go_while_a_round_is_under_way(spare: list[Any]) -> None:
    """Who joins waits for the round and catches up; who leaves finishes it first."""
    more = plain_workers(1, net, first=4)
    entered, go_on = threading.Event(), threading.Event()
    with joined(spare, "shm", bucket_size_bytes=1024) as controller:
        first, second = (row.rank for row in controller.status().workers)
        sync = spawn(lambda: controller.sync_weights(gated(Net(1), entered, go_on)), "sync")
        try:
            assert entered.wait(30)
            join = spawn(lambda: controller.add_workers(more, backend="shm"), "join")
            controller.remove_workers([first])
            time.sleep(0.5)
            assert not join.done()
        finally:
            go_on.set()
        assert len(sync.result(timeout=60).workers) == 2
        (third,) = join.result(timeout=60)
        assert_exact(Net(1), [*spare, *more])
        assert [row.rank for row in controller.status().workers] == [second, third]
        controller.sync_weights(Net(2))
        assert_exact(Net(2), [spare[1], *more])
        assert_exact(Net(1), spare[:1])


# ---- the end ------------------------------------------------------------------------------------


def test_shutdown_can_be_repeated_and_leaves_only_the_workers(spare: list[Any]) -> None:
    before = named_actors()
    controller = Controller(spare, WeightTransferConfig(backend="shm"))
    attached = Controller(name=controller.name)
    controller.sync_weights(Net(1))
    pids = ray.get([w.run.remote(lambda self: os.getpid()) for w in spare])
    for handle in (controller, controller, attached, controller):
        handle.shutdown()
    for call in (controller.status, lambda: controller.sync_weights(Net(2)), attached.status):
        with pytest.raises(ControllerClosed):
            call()
    deadline = time.monotonic() + 10
    while named_actors() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert named_actors() == before
    assert ray.get([w.run.remote(lambda self: os.getpid()) for w in spare]) == pids
    assert_exact(Net(1), spare)
    assert ray.get([w.state.remote() for w in spare]) == ["READY", "READY"]
    with joined(spare, "shm", bucket_size_bytes=1024) as again:
        again.sync_weights(Net(3))
        assert_exact(Net(3), spare)


# ---- field reports ------------------------------------------------------------------------------


class AsyncWorker(WorkerMixin):
    """An async actor: its methods share one event loop."""

    async def bind(self) -> None:
        self.model = net()
        self.rayxfer_bind(self.model)

    async def busy(self) -> str:
        await asyncio.sleep(0.2)
        return "done"

    async def held(self) -> dict[str, torch.Tensor]:
        return held(self.model)


def test_two_chained_syncs_into_an_async_actor() -> None:
    """ray#59610."""
    actor = ray.remote(AsyncWorker).options(num_cpus=0).remote()
    try:
        ray.get(actor.bind.remote())
        for backend in ("shm", "object_store"):
            with joined([actor], backend, bucket_size_bytes=1024) as controller:
                running = [actor.busy.remote() for _ in range(3)]
                version = controller.status().version
                for step in (1, 2):
                    model = Net(step + len(backend))
                    assert controller.sync_weights(model).version == version + step
                    assert_same_bytes(held(model), ray.get(actor.held.remote()))
                assert ray.get(running) == ["done"] * 3
    finally:
        ray.kill(actor)


def test_no_tensor_passes_through_the_controller(
    spare: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ray_lightning#86: 64 MiB of model, little to and from the controller actor."""
    sizes: list[int] = []
    original = rayxfer.controller._Remote.call

    def counting(self: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, method, *args, **kwargs)
        sizes.append(len(cloudpickle.dumps((args, answer))))
        return answer

    def big() -> torch.nn.Module:
        return torch.nn.Linear(4096, 4096, bias=False)

    ray.get([worker.bind.remote(big) for worker in spare])
    with joined(spare, "shm", bucket_size_bytes=1024) as controller:
        assert len(cloudpickle.dumps(controller)) < 1 << 20
        monkeypatch.setattr(rayxfer.controller._Remote, "call", counting)
        model = big()
        report = controller.sync_weights(model)
        assert report.num_bytes == 64 << 20
        assert len(cloudpickle.dumps(report)) < 1 << 20
        assert_exact(model, spare)
    assert sizes
    assert sum(sizes) < 1 << 20


def test_several_trainers_that_each_sync_are_found_out(ray_session: None) -> None:
    """One after the other, or one is told that it is busy: any of them may have won."""
    workers = plain_workers(1, lambda: torch.nn.Linear(2, 2), first=5)
    trainers = [
        TrainerActor.options(num_cpus=0).remote(lambda: torch.nn.Linear(2, 2)) for _ in "ab"
    ]
    controller = Controller(workers)
    with pytest.raises(ConfigError, match="more than one synced on its own"):
        controller.sync_weights(trainers)
    controller.shutdown()


class Silent:
    """Forgets to return the report."""

    def sync_weights(self, controller: Any, *, version: Any = None, partial: bool = False) -> None:
        controller.sync_weights(torch.nn.Linear(2, 2), version=version, partial=partial)


def test_a_trainer_has_to_return_the_report(ray_session: None) -> None:
    controller = Controller(plain_workers(1, lambda: torch.nn.Linear(2, 2), first=5))
    trainer = ray.remote(num_cpus=0)(Silent).remote()
    with pytest.raises(ConfigError, match="has to return it"):
        controller.sync_weights(trainer)
    controller.shutdown()
