"""`load_mode="mapped"` over gloo: the workers of each host use one copy of the weights, for real.

All are processes of this machine; where there are to be several hosts, the sender is made to believe it.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayxfer import PartialUpdate, TransferError, WeightTransferConfig, WeightTransferEngineFactory
from rayxfer.binding import Binding
from rayxfer.coordinator import Coordinator
from rayxfer.engines.gloo import GlooGroup
from rayxfer.engines.versions import Versions
from rayxfer.keeper import _KeeperLoader, _KeeperSource, _Store
from rayxfer.memfile import MemoryFile
from rayxfer.sender import Sender
from rayxfer.source import as_source
from rayxfer.testing import Fault, LocalController, ProcessWorker, faulty, poison
from tests.conformance.test_line import (
    COUNT,
    LAYOUTS,
    Net,
    as_hosts,
    expect,
    poisoned,
    pool,
    settings,
    state,
    workers,
)
from tests.helpers import mapping_of

__all__ = ["pool", "workers"]  # fixtures

FLAT = "large.0"


def mapped(backend: str = "gloo", **more: Any) -> WeightTransferConfig:
    return settings(backend, load_mode="mapped", **more)


def file_of(model: torch.nn.Module) -> str:
    """The mapping in which a parameter lies: its permissions and the file's inode and name."""
    return mapping_of(model.get_parameter(FLAT))


def files_of(fleet: list[ProcessWorker]) -> list[str]:
    return [worker.run(file_of) for worker in fleet]


@pytest.fixture
def fresh() -> Iterator[list[ProcessWorker]]:
    """Workers that no other test has had."""
    made = [ProcessWorker(poisoned) for _ in range(COUNT)]
    yield made
    for worker in made:
        worker.close()


@pytest.mark.parametrize("verify", ["digest", "off"])
@pytest.mark.parametrize("bucket_size_bytes", [1, 40_000, 1 << 20])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_host_has_one_copy_and_two_versions_take_turns(
    workers: list[ProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    bucket_size_bytes: int,
    verify: str,
) -> None:
    hosts = LAYOUTS[layout]
    as_hosts(monkeypatch, hosts)
    config = mapped(bucket_size_bytes=bucket_size_bytes, verify=verify)
    with LocalController(workers, config) as controller:
        rounds: list[list[str]] = []
        for seed in (1, 2, 3, 4):
            for worker in workers:
                worker.run(poison)  # into what is served now: private to that worker
            report = controller.sync_weights(Net(seed))
            proof = "loaded" if verify == "digest" else "off"
            assert [row.verified for row in report.workers] == [proof] * COUNT
            assert report.attempts == 1
            expect(Net(seed), workers)
            rounds.append(files_of(workers))
        for found in rounds:
            for host in hosts:
                assert len({found[rank - 1] for rank in host}) == 1
            assert len(set(found)) == len(hosts)
            assert all("rayxfer-version" in one and one.startswith("rw-p") for one in found)
        assert rounds[0] == rounds[2] != rounds[1] == rounds[3]
    expect(Net(4), workers)


def test_a_channel_that_is_opened_anew_does_not_write_over_what_is_served(
    fresh: list[ProcessWorker],
) -> None:
    with LocalController(fresh, mapped()) as controller:
        for step in range(8):
            if step % 3 == 2:
                for channel in controller._sender._channels:
                    channel.dirty = True
            before = set(files_of(fresh))
            controller.sync_weights(Net(step))
            expect(Net(step), fresh)
            after = set(files_of(fresh))
            assert len(after) == 1
            assert not before & after, f"round {step} wrote over the version that was served"


def test_a_round_that_fails_leaves_what_is_served_alone(fresh: list[ProcessWorker]) -> None:
    name = faulty("gloo", Fault("worker", "raise", at=3, once=False))
    try:
        with LocalController(fresh, mapped()) as controller:
            controller.sync_weights(Net(1))
            controller.sync_weights(Net(2))
            files = files_of(fresh)
        with LocalController(fresh, mapped(name)) as controller:
            for _ in range(3):
                with pytest.raises(Exception, match="injected fault"):
                    controller.sync_weights(Net(9))
                expect(Net(2), fresh)
                assert files_of(fresh) == files
                assert {str(w.state) for w in controller.status().workers} == {"READY"}
    finally:
        del WeightTransferEngineFactory._direct[name]


def test_who_cannot_open_the_file_has_a_copy_of_its_own() -> None:
    """And proves it itself."""
    with (
        ProcessWorker(poisoned) as one,
        ProcessWorker(poisoned, True) as two,
        ProcessWorker(poisoned) as three,
    ):
        fleet = [one, two, three]
        with LocalController(fleet, mapped()) as controller:
            for seed in (1, 2, 3):
                report = controller.sync_weights(Net(seed))
                assert report.attempts == 1
                assert [row.verified for row in report.workers] == ["loaded"] * 3
                expect(Net(seed), fleet)
                first, second, third = files_of(fleet)
                assert first == third != second
                assert "rayxfer-version" in second


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_bit_that_flips_at_one_worker(fresh: list[ProcessWorker], rank: int) -> None:
    """In the leader's view it is found, and every other proves for itself. A follower's view is its own
    affair: it is the file that was proven."""
    name = faulty("gloo", Fault("worker", "flip", at=0, rank=rank))
    try:
        with LocalController(fresh, mapped(name)) as controller:
            if rank:
                controller.sync_weights(Net(1))
                expect(Net(1), [w for i, w in enumerate(fresh) if i != rank])
                return
            with pytest.raises(PartialUpdate, match="digest mismatch"):
                controller.sync_weights(Net(1))
            expect(Net(1), fresh[1:])
    finally:
        del WeightTransferEngineFactory._direct[name]


@pytest.mark.parametrize("verify", ["digest", "off"])
@pytest.mark.parametrize("layout", ["one host", "two hosts"])
def test_a_leader_that_votes_no_does_not_take_its_followers_along(
    fresh: list[ProcessWorker], monkeypatch: pytest.MonkeyPatch, layout: str, verify: str
) -> None:
    """Its files are closed with its channel: the others get the round once more, from another."""
    as_hosts(monkeypatch, LAYOUTS[layout])
    name = faulty("gloo", Fault("worker", "truncate", at=0, rank=0))
    try:
        with LocalController(fresh, mapped(name, verify=verify)) as controller:
            with pytest.raises(PartialUpdate) as caught:
                controller.sync_weights(Net(1))
            rows = caught.value.report.workers
            assert [row.error is None for row in rows] == [False, True, True, True]
            assert {str(row.state) for row in rows} == {"READY"}
            expect(Net(1), fresh[1:])
    finally:
        del WeightTransferEngineFactory._direct[name]


def stuck() -> torch.nn.Module:
    """A worker whose wire falls silent in the middle, while it goes on answering."""
    taken = itertools.count()
    usual = GlooGroup.wait

    def wait(self: GlooGroup, work: Any) -> None:
        if next(taken) >= 3:
            self._aborted.wait(60)
        usual(self, work)

    GlooGroup.wait = wait  # type: ignore[method-assign]
    return poisoned()


def test_followers_are_not_blamed_for_what_their_leader_has_not_got() -> None:
    with (
        ProcessWorker(stuck) as leader,
        ProcessWorker(poisoned) as one,
        ProcessWorker(poisoned) as two,
    ):
        fleet = [leader, one, two]
        with LocalController(fleet, mapped(bucket_size_bytes=1, stall_timeout_s=1.0)) as controller:
            with pytest.raises(PartialUpdate) as caught:
                controller.sync_weights(Net(1))
            states = [row.state for row in caught.value.report.workers]
            assert states == ["LOST", "READY", "READY"]
            expect(Net(1), [one, two])


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(
    ("layout", "rank"),
    [("one host", 0), ("one host", 2), ("two hosts", 1), ("two hosts", 3), ("alone", 2)],
    ids=["leader", "follower", "second leader", "its follower", "in line"],
)
def test_a_worker_lost_in_the_middle(
    fresh: list[ProcessWorker],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
    rank: int,
    action: Any,
) -> None:
    """The others commit in the same call, each host its one copy; nothing that is served is written to."""
    as_hosts(monkeypatch, LAYOUTS[layout])
    name = faulty("gloo", Fault("worker", action, at=0, rank=rank))
    lost = fresh[rank]
    others = [worker for worker in fresh if worker is not lost]
    try:
        with LocalController(fresh, mapped()) as controller:
            for seed in (3, 4):
                controller.sync_weights(Net(seed))
        served = files_of(fresh)
        with LocalController(fresh, mapped(name, stall_timeout_s=1.5)) as controller:
            with pytest.raises(PartialUpdate) as caught:
                controller.sync_weights(Net(6))
            states = [row.state for row in caught.value.report.workers]
            assert states == ["LOST" if i == rank else "READY" for i in range(COUNT)]
            expect(Net(6), others)
            assert not set(files_of(others)) & set(served)
            for seed in (7, 8):
                with pytest.raises(PartialUpdate):
                    controller.sync_weights(Net(seed))
                expect(Net(seed), others)
            if action == "stop":
                os.kill(lost.pid, signal.SIGCONT)
                assert lost.run(state).keys() == Net().state_dict().keys()
                assert lost.run(file_of) == served[rank]
                expect(Net(4), [lost])
                expect(Net(8), others)
    finally:
        del WeightTransferEngineFactory._direct[name]
        if action == "stop":
            os.kill(lost.pid, signal.SIGKILL)


PICKED: list[int] = []


def unsettled() -> torch.nn.Module:
    """A worker to whose memory bytes may still come when a round has failed."""
    usual = Versions.pick

    def pick(self: Versions, num_bytes: int) -> MemoryFile:
        file = usual(self, num_bytes)
        PICKED.append(int(file.about["inode"]))
        return file

    GlooGroup.settle = lambda self: False  # type: ignore[method-assign]
    Versions.pick = pick  # type: ignore[method-assign]
    return poisoned()


def picked(_: Any) -> list[int]:
    return PICKED


def test_a_file_to_which_bytes_may_still_come_is_not_used_again() -> None:
    name = faulty("gloo", *(Fault("sender", "raise", at=at) for at in (30, 31, 32)))
    try:
        with (
            ProcessWorker(unsettled) as leader,
            ProcessWorker(poisoned) as other,
            LocalController([leader, other], mapped(name, bucket_size_bytes=1)) as controller,
        ):
            with pytest.raises(TransferError):
                controller.sync_weights(Net(1))
            controller.sync_weights(Net(2))
            expect(Net(2), [leader, other])
            files = leader.run(picked)
            assert len(files) == len(set(files)) == 4
    finally:
        del WeightTransferEngineFactory._direct[name]


def keeper() -> Binding:
    store = _Store()
    return Binding(
        torch.nn.Module(),
        make_loader=lambda: _KeeperLoader(store),
        make_source=lambda: _KeeperSource(store),
    )


@pytest.mark.parametrize("layout", ["one host", "two hosts"])
def test_a_keeper_neither_leads_nor_has_versions(
    fresh: list[ProcessWorker], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """Though it may have been there before the workers. Alone on its host it needs no files to serve."""
    as_hosts(
        monkeypatch, [*LAYOUTS[layout], [COUNT + 1]] if layout == "two hosts" else [[1, 2, 3, 4, 5]]
    )
    monkeypatch.setattr(Coordinator, "_add", _over_gloo(Coordinator._add))
    with ProcessWorker(keeper) as hidden:
        coordinator = Coordinator("kept", [], mapped(), keeper=hidden)
        coordinator.open()
        coordinator.add_workers(list(fresh), ["gloo"] * COUNT)
        sender = Sender(coordinator)
        try:
            for seed in (1, 2, 3):
                report = sender.sync(as_source(Net(seed)), version=None, partial=False)
                assert report.attempts == 1
                expect(Net(seed), fresh)
                assert len(set(files_of(fresh))) == (1 if layout == "one host" else 2)
                assert all("rayxfer-version" in one for one in files_of(fresh))
            assert layout == "one host" or hidden.run(versions_mapped) == 0
        finally:
            sender.close()
            coordinator.close()


def _over_gloo(usual: Any) -> Any:
    return lambda self, rank, handle, backend: usual(self, rank, handle, "gloo")


def test_descriptors_and_memory_files_do_not_grow(fresh: list[ProcessWorker]) -> None:
    with LocalController(fresh, mapped()) as controller:
        counts = []
        for step in range(12):
            if step % 4 == 3:
                for channel in controller._sender._channels:
                    channel.dirty = True
            controller.sync_weights(Net(step))
            counts.append([worker.run(versions_mapped) for worker in fresh])
        assert max(counts[-1]) <= max(counts[3]) + 1, counts


def test_a_leader_that_gets_its_weights_another_way_lets_its_files_go(
    fresh: list[ProcessWorker],
) -> None:
    with LocalController(fresh, mapped()) as controller:
        controller.sync_weights(Net(1))
        for link in controller._sender._links.values():
            link.requested = "shm"  # as "auto" does, once the trainer is on this host
        for seed in (2, 3, 4):
            controller.sync_weights(Net(seed))
            expect(Net(seed), fresh)
        counts = [worker.run(versions_mapped) for worker in fresh]
        assert counts == [counts[-1]] * COUNT


def versions_mapped(_: Any) -> int:
    """Descriptors of memory files that this process has open."""
    found = 0
    for entry in os.listdir("/proc/self/fd"):
        try:
            found += "rayxfer-version" in os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue
    return found
