"""gloo with several workers on a host, and with several hosts: who gets what from whom, for real.

All are processes of this machine; where there are to be several hosts, the sender is made to believe it.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rayxfer import (
    BackendUnavailable,
    PartialUpdate,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.binding import Binding
from rayxfer.channel import Channel, Link
from rayxfer.engines import gloo, routes
from rayxfer.engines.gloo import GlooGroup
from rayxfer.testing import Fault, LocalController, ProcessWorker, assert_same_bytes, faulty, poison
from rayxfer.topology import Facts, start_time

SLOT_BYTES = 64 << 10
COUNT = 4


class Net(torch.nn.Module):
    """Small and large tensors, some larger than a slot or a bucket, an empty one, a scalar, odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def bits(*shape: int, dtype: torch.dtype) -> torch.nn.Parameter:
            size = torch.Size(shape).numel() * dtype.itemsize
            data = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)
            return torch.nn.Parameter(data.view(dtype).reshape(shape), requires_grad=False)

        self.small = torch.nn.ParameterList(bits(37, 11, dtype=torch.bfloat16) for _ in range(40))
        self.large = torch.nn.ParameterList(
            bits(n, dtype=torch.float32) for n in (SLOT_BYTES, 5 * SLOT_BYTES // 4 + 3, 9_999)
        )
        self.empty = torch.nn.Parameter(torch.empty(0, 3), requires_grad=False)
        self.tail = torch.nn.ParameterList(bits(7_001, dtype=torch.float16) for _ in range(9))
        self.scalar = bits(dtype=torch.float64)
        self.last = torch.nn.Parameter(torch.empty(0), requires_grad=False)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def poisoned(refuse: bool = False) -> torch.nn.Module:
    torch.set_num_threads(1)
    if refuse:
        gloo.RingReader = _Refused  # type: ignore[misc,assignment]
    model = Net()
    poison(model)
    return model


class _Refused:
    def __init__(self, **about: Any) -> None:
        raise BackendUnavailable("shm: cannot open the sender's memory file (Permission denied)")


class Greedy(torch.nn.Module):
    """A model with a loader that keeps what it gets, and spoils it once it has copied it."""

    def __init__(self) -> None:
        super().__init__()
        self.held = poisoned()
        self.kept: list[torch.Tensor] = []

    def load(self, weights: Sequence[tuple[str, torch.Tensor]]) -> set[str]:
        mine = self.held.state_dict()
        for name, tensor in weights:
            mine[name].copy_(tensor)
            tensor.view(-1).view(torch.uint8).fill_(0x5A) if tensor.numel() else None
            self.kept.append(tensor)
        return {name for name, _ in weights}


def greedy() -> Binding:
    model = Greedy()
    return Binding(model.held, load_weights=lambda _, weights: model.load(weights))


def groups_open(_: Any = None) -> int:
    gc.collect()
    return sum(type(x) is GlooGroup and x._group is not None for x in gc.get_objects())


@pytest.fixture(scope="module")
def pool() -> Iterator[list[ProcessWorker]]:
    made: list[ProcessWorker] = []
    yield made
    for worker in made:
        worker.close()


@pytest.fixture
def workers(pool: list[ProcessWorker]) -> list[ProcessWorker]:
    """Four, poisoned; those that an earlier test has lost are replaced."""
    for worker in [one for one in pool if not _alive(one.pid)]:
        pool.remove(worker)
    pool += [ProcessWorker(poisoned) for _ in range(COUNT - len(pool))]
    for worker in pool:
        worker.run(poison)
    return pool


def _alive(pid: int) -> bool:
    return start_time(pid) != ""


def as_hosts(patch: pytest.MonkeyPatch, layout: list[list[int]]) -> None:
    """Place the workers, by their first places in the channel; those who are gone are left out."""
    patch.setattr(routes, "hosts_of", lambda sender, all_: _present(layout, len(all_)))


def _present(layout: list[list[int]], count: int) -> list[list[int]]:
    hosts = [[rank for rank in host if rank <= count] for host in layout]
    return [host for host in hosts if host]


LAYOUTS = {
    "one host": [[1, 2, 3, 4]],
    "two hosts": [[1, 3], [2, 4]],
    "three hosts": [[4], [1, 2], [3]],
    "alone": [[1], [2], [3], [4]],
}


def settings(backend: str = "gloo", **more: Any) -> WeightTransferConfig:
    defaults: dict[str, Any] = {"bucket_size_bytes": 40_000, "stall_timeout_s": 5.0}
    return WeightTransferConfig(backend=backend, **{**defaults, **more})


def expect(model: torch.nn.Module, workers: Sequence[ProcessWorker]) -> None:
    for worker in workers:
        assert_same_bytes(state(model), worker.run(state))


@pytest.mark.parametrize("bucket_size_bytes", [1, 40_000, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_worker_gets_the_same_bytes(
    workers: list[ProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    bucket_size_bytes: int,
) -> None:
    hosts = LAYOUTS[layout]
    as_hosts(monkeypatch, hosts)
    with LocalController(workers, settings(bucket_size_bytes=bucket_size_bytes)) as controller:
        for seed in (1, 2):
            for worker in workers:
                worker.run(poison)
            report = controller.sync_weights(Net(seed))
            assert [row.verified for row in report.workers] == ["loaded"] * COUNT
            expect(Net(seed), workers)
        # bytes cross once per host: each group has two members, and nobody else is connected
        assert groups_open() + sum(w.run(groups_open) for w in workers) == 2 * len(hosts)
        leaders = {rank: host[0] for host in hosts for rank in host[1:]}
        for rank, row in enumerate(report.workers, 1):
            via = f"; through worker {leaders[rank] - 1}" if rank in leaders else ""
            assert row.reason == "as configured" + via


@pytest.mark.parametrize("layout", ["one host", "alone"])
def test_a_loader_may_keep_and_change_what_it_gets(
    monkeypatch: pytest.MonkeyPatch, workers: list[ProcessWorker], layout: str
) -> None:
    """It is its own, wherever in the line it stands."""
    as_hosts(monkeypatch, LAYOUTS[layout])
    with ProcessWorker(greedy) as first, ProcessWorker(greedy) as second:
        fleet = [first, workers[0], second, workers[1]]
        with LocalController(fleet, settings()) as controller:
            for seed in (3, 4):
                report = controller.sync_weights(Net(seed))
                assert report.workers[0].verified == "delivered"
                expect(Net(seed), fleet)


@pytest.mark.parametrize("refusing", [[1], [1, 3], [0, 1, 2, 3]])
def test_who_cannot_open_the_file_joins_the_line(
    workers: list[ProcessWorker], refusing: list[int]
) -> None:
    made = {i: ProcessWorker(poisoned, True) for i in refusing}
    fleet = [made.get(i, worker) for i, worker in enumerate(workers)]
    try:
        with LocalController(fleet, settings()) as controller:
            report = controller.sync_weights(Net(5))
            assert report.attempts == 1
            expect(Net(5), fleet)
            for rank, row in enumerate(report.workers[1:], 1):
                if rank in refusing:
                    assert "not through worker 0: " in row.reason
                    assert "Permission denied" in row.reason
                else:
                    assert row.reason.endswith("; through worker 0")
            crossings = 1 + sum(rank > 0 for rank in refusing)
            assert groups_open() + sum(w.run(groups_open) for w in fleet) == 2 * crossings
    finally:
        for worker in made.values():
            worker.close()


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("layout", "rank"),
    [
        ("one host", 0),
        ("one host", 2),
        ("two hosts", 1),
        ("two hosts", 3),
        ("alone", 1),
        ("alone", 3),
    ],
    ids=["leader", "follower", "second leader", "its follower", "in line", "last in line"],
)
def test_a_worker_lost_in_the_middle(
    workers: list[ProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    rank: int,
    action: Any,
) -> None:
    """The others commit in the same call, and hold the right bytes, through another leader if need be."""
    as_hosts(monkeypatch, LAYOUTS[layout])
    name = faulty("gloo", Fault("worker", action, at=5, rank=rank))
    lost = workers[rank]
    try:
        with LocalController(workers, settings(name, stall_timeout_s=1.5)) as controller:
            with pytest.raises(PartialUpdate) as caught:
                controller.sync_weights(Net(6))
            states = [row.state for row in caught.value.report.workers]
            assert states == ["LOST" if i == rank else "READY" for i in range(COUNT)]
            others = [worker for worker in workers if worker is not lost]
            expect(Net(6), others)
            with pytest.raises(PartialUpdate):
                controller.sync_weights(Net(7))
            expect(Net(7), others)
            if action == "stop":
                # what it still finds in the old memory and sockets goes nowhere
                os.kill(lost.pid, signal.SIGCONT)
                assert lost.run(groups_open) >= 0
                expect(Net(7), others)
    finally:
        del WeightTransferEngineFactory._direct[name]
        if action == "stop":
            os.kill(lost.pid, signal.SIGKILL)
        lost.close()


def test_nothing_is_left_after_shutdown(workers: list[ProcessWorker]) -> None:
    with LocalController(workers, settings()) as controller:
        controller.sync_weights(Net(8))
    assert [worker.run(ring_mappings) for worker in workers] == [0] * COUNT
    assert [worker.run(groups_open) for worker in workers] == [0] * COUNT


def ring_mappings(_: Any) -> int:
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as file:
        return sum("rayxfer-ring" in line for line in file)


def _link(rank: int) -> Link:
    facts = Facts(1, "boot", "host", "10.0.0.1", rank, 0)
    return Link(rank, None, "gloo", facts, "")  # type: ignore[arg-type]


class _Told:
    @classmethod
    def upstream(cls, handle: Any) -> list[int]:
        return handle  # type: ignore[no-any-return]


def test_who_waits_for_a_stalled_worker_is_not_stalled() -> None:
    links = [_link(rank) for rank in (10, 11, 12, 13)]
    # 10 leads 11; 12 comes after it and leads 13
    channel = Channel("gloo", _Told, links, None, [-1, 0, 0, 2], {})  # type: ignore[arg-type]

    def blamed(*ranks: int) -> list[int]:
        return [x.rank for x in channel.nearest([x for x in links if x.rank in ranks])]

    assert blamed(10, 11, 12, 13) == [10]
    assert blamed(12, 13) == [12]
    assert blamed(11, 13) == [11, 13]
    assert blamed(13) == [13]
    channel.handle = []
    assert blamed(10, 13) == [10, 13]


def test_whose_copy_is_used_is_asked_once_per_channel() -> None:
    """Going over all workers for each of them, round after round, is too much for a large fleet."""
    asked: list[Any] = []

    class Engine:
        @classmethod
        def provers(cls, handle: Any) -> list[int]:
            asked.append(handle)
            return handle  # type: ignore[no-any-return]

    links = [_link(rank) for rank in (10, 11, 12, 13)]
    channel = Channel("gloo", Engine, links, None, [0, 0, 2, 2], {})  # type: ignore[arg-type]
    for _ in range(3):
        found = [channel.prover(link) for link in links]
        assert [one.rank for one in found if one is not None] == [10, 10, 12, 12]
    assert len(asked) == 1
    ten, eleven, twelve, thirteen = links
    assert channel.comparable(links) == [ten, twelve]
    assert channel.comparable([eleven, thirteen]) == [eleven, thirteen]
    assert channel.comparable([ten, eleven, thirteen]) == [ten, thirteen]
