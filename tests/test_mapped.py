"""`load_mode="mapped"`: the workers of a host use one copy of the weights, the sender's memory file."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import time
import tracemalloc
from typing import Any

import pytest
import torch

from rayxfer import (
    ConfigError,
    ContractError,
    ModuleSource,
    PartialUpdate,
    TransferError,
    WeightTransferConfig,
    copying,
)
from rayxfer.binding import Binding
from rayxfer.engines import frames
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.engines.versions import Versions
from rayxfer.mapped import MappedLoader
from rayxfer.memfile import ForeignFile, MemoryFile, _own_pages
from rayxfer.testing.local import LocalController
from rayxfer.testing.processes import ProcessWorker
from rayxfer.topology import local_facts
from tests.helpers import assert_same_bytes, mapping_of, poison, raw_bytes
from tests.test_placement import Zoo

MAPPED = WeightTransferConfig(backend="shm", load_mode="mapped")


def _bytes(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in module.state_dict().items()}


def _where(module: torch.nn.Module, name: str) -> str:
    """The mapping in which a parameter lies: its permissions and the file's name and inode."""
    return mapping_of(module.get_parameter(name))


def _write(module: torch.nn.Module, value: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)


def _change(model: torch.nn.Module, by: float) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(by)


class _Dense(torch.nn.Module):
    """Nothing that has to be looked at one by one; of any size."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        sizes = [300_000, 17, 1, 90_001, *[64] * 200, 700_000, 0, 2_000]
        self.parts = torch.nn.ParameterList(torch.randn(size) for size in sizes)
        self.tied = self.parts[0]


@pytest.mark.parametrize("stands", [True, False])
def test_readers_of_a_version_are_told_of_many_buckets_at_once(
    stands: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Made(ModuleSource):
        """One whose tensors come only when they are asked for."""

        def __iter__(self) -> Any:
            for name, tensor in super().__iter__():
                yield name, tensor.clone()

    told: list[int] = []
    tell, keep = frames._tell, MappedLoader.keep
    monkeypatch.setattr(frames, "_tell", lambda *args: (told.append(1), tell(*args)))

    def counted(self: MappedLoader, items: Any, file: Any, claim: Any) -> None:
        told.append(len(items))
        keep(self, items, file, claim)

    monkeypatch.setattr(MappedLoader, "keep", counted)
    model, worker = _Dense(0), _Dense(1)
    config = WeightTransferConfig(backend="shm", load_mode="mapped", bucket_size_bytes=1 << 18)
    with LocalController([worker], config) as controller:
        for _ in range(3):
            told.clear()
            controller.sync_weights((ModuleSource if stands else Made)(model))
            assert_same_bytes(model.state_dict(), worker.state_dict())
            assert told == [1, len(model.parts)]


@pytest.mark.parametrize("verify_", ["digest", "off"])
@pytest.mark.parametrize("window", [1 << 30, 1 << 20])
def test_a_version_is_written_by_several_threads(
    verify_: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(targets: Any, sources: Any, sizes: Any, *rest: Any, **options: Any) -> None:
        calls.append(sum(sizes))
        copying.copy_spread(targets, sources, sizes, *rest, **options)

    for name, value in (("_WORTH_BYTES", 0), ("THREADED_BYTES", 0), ("_SHARE_BYTES", 100_000)):
        monkeypatch.setattr(copying, name, value)
    monkeypatch.setattr(copying, "cores", lambda: 3)
    monkeypatch.setattr(frames, "copy_spread", counted)
    monkeypatch.setattr(frames, "_VERSION_BYTES", window)
    model, workers = _Dense(0), [_Dense(1), _Dense(2)]
    config = WeightTransferConfig(
        backend="shm", load_mode="mapped", verify=verify_, bucket_size_bytes=1 << 18
    )
    with LocalController(workers, config) as controller:
        for _ in range(4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            calls.clear()
            report = controller.sync_weights(model)
            assert {row.verified for row in report.workers} == {
                "loaded" if verify_ == "digest" else "off"
            }
            for worker in workers:
                assert_same_bytes(model.state_dict(), worker.state_dict())
            assert sum(calls) == sum(p.nbytes for p in model.parameters())
            assert len([size for size in calls if size]) > 2 or window > 1 << 20


@pytest.mark.parametrize("verify", ["digest", "off"])
def test_all_workers_of_a_host_use_one_file_and_two_take_turns(verify: str) -> None:
    model = Zoo()
    with ProcessWorker(Zoo, 1) as one, ProcessWorker(Zoo, 2) as two, ProcessWorker(Zoo, 3) as three:
        workers = [one, two, three]
        config = WeightTransferConfig(backend="shm", load_mode="mapped", verify=verify)  # type: ignore[arg-type]
        with LocalController(workers, config) as controller:
            files: list[str] = []
            for step in range(5):
                _change(model, step + 1)
                for worker in workers:
                    worker.run(poison)  # into what is served now: private to that worker
                report = controller.sync_weights(model)
                expected = _bytes(model)
                _change(model, 100)  # the trainer's tensors are its own again
                for row, worker in zip(report.workers, workers, strict=True):
                    assert worker.run(_bytes) == expected
                    assert row.verified == ("loaded" if verify == "digest" else "off")
                    assert row.complete is True
                places = {worker.run(_where, "large") for worker in workers}
                assert len(places) == 1
                assert "rayxfer-version" in next(iter(places))
                assert next(iter(places)).startswith("rw-p"), "private: a write is the worker's own"
                files.append(next(iter(places)))
                _change(model, -100)
            assert files[0] == files[2] == files[4] != files[1] == files[3]
        assert all(worker.run(_bytes) == expected for worker in workers), "they keep it"


def test_what_a_worker_writes_is_its_own_and_gone_with_the_next_version() -> None:
    model = Zoo()
    with (
        ProcessWorker(Zoo, 1) as one,
        ProcessWorker(Zoo, 2) as two,
        LocalController([one, two], MAPPED) as controller,
    ):
        for step in range(4):
            controller.sync_weights(model)
            one.run(_write, float(step))
            assert two.run(_bytes) == _bytes(model)
            assert one.run(_bytes) != _bytes(model)
        controller.sync_weights(model)
        assert one.run(_bytes) == two.run(_bytes) == _bytes(model)


def test_ties_casts_and_strides_in_one_process() -> None:
    model, receiver = Zoo(), Zoo(1)
    receiver.large.data = receiver.large.data.float()
    with LocalController([receiver], MAPPED) as controller:
        for step in range(3):
            _change(model, 0.5)
            poison(receiver)
            report = controller.sync_weights(model)
            expected = {**model.state_dict(), "large": model.large.float()}
            assert_same_bytes(expected, receiver.state_dict())
            assert report.workers[0].casts == {"large": "bfloat16 -> float32"}
            assert receiver.tied.weight is receiver.first.weight
            assert "rayxfer-version" in _where(receiver, "first.weight")
            assert "rayxfer-version" not in _where(receiver, "large"), "a cast is its own"
            assert "rayxfer-version" not in _where(receiver, "turned"), "so is what is strided"
            assert receiver.right.data_ptr() == receiver.left.data_ptr() + 20, "and what is shared"
            assert report.version == step + 1


def test_a_tie_of_two_objects_goes_over_as_one() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            memory = torch.randn(300)
            self.a, self.b = torch.nn.Parameter(memory), torch.nn.Parameter(memory)

    model, receiver = Tied(), Tied()
    with LocalController([receiver], MAPPED) as controller:
        controller.sync_weights(model)
        assert "rayxfer-version" in _where(receiver, "a")
        assert receiver.a.data_ptr() == receiver.b.data_ptr()
        assert torch.equal(receiver.b, model.b)


def test_one_tensor_offered_for_several_parameters_stays_several() -> None:
    """And what was mapped before and is staged now leaves the file, which is about to be written again."""
    receiver = torch.nn.ParameterDict({f"p{i}": torch.randn(300) for i in range(4)})
    with LocalController([receiver], MAPPED) as controller:
        for step in range(12):
            if step % 3 == 1:
                one = torch.tensor(float(step))
                offer = {f"p{i}": one.expand(300) for i in range(4)}
            elif step % 3 == 2:  # some of them tied
                one = torch.randn(300)
                offer = {f"p{i}": one if i < 2 else torch.randn(300) for i in range(4)}
            else:
                offer = {f"p{i}": torch.randn(300) for i in range(4)}
            controller.sync_weights(offer)
            assert_same_bytes(offer, dict(receiver.named_parameters()))
            assert len({p.data_ptr() for p in receiver.values()}) == 4
            mapped = ["rayxfer-version" in _where(receiver, f"p{i}") for i in range(4)]
            # where none goes over to the new file, all stay where they are, with pages of their own
            assert mapped == ([False, False, True, True] if step % 3 == 2 else [True] * 4)
            with torch.no_grad():
                receiver["p0"].fill_(-7)  # its own
            assert receiver["p1"][0] != -7


def test_a_parameter_that_is_replaced_before_the_commit_is_noticed() -> None:
    model, receiver = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    replaced = torch.nn.Parameter(torch.zeros(8, 8))

    def pause(_: str) -> None:  # between the vote and the commit
        receiver.weight = replaced

    with LocalController([Binding(receiver, pause=pause)], MAPPED) as controller:
        with pytest.raises(PartialUpdate, match="did not go over"):
            controller.sync_weights(model)
        assert str(controller.status().workers[0].state) == "TORN"


def test_a_part_of_the_model_is_staged_and_the_next_whole_is_mapped() -> None:
    model, receiver = Zoo(), Zoo(1)
    with LocalController([receiver], MAPPED) as controller:
        controller.sync_weights(model)
        bias = torch.full((17,), 3.0)
        controller.sync_weights({"first.bias": bias}, partial=True)
        assert torch.equal(receiver.first.bias, bias)
        expected = {**model.state_dict(), "first.bias": bias}
        assert_same_bytes(expected, receiver.state_dict())
        for _ in range(3):
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), receiver.state_dict())


def test_a_loader_that_is_not_ours_is_refused_before_anything_changes() -> None:
    receiver = Zoo(1)
    binding = Binding(receiver, load_weights=lambda model, weights: None)
    before = _bytes(receiver)
    with LocalController([binding], MAPPED) as controller:
        with pytest.raises(ConfigError, match="needs the default loader"):
            controller.sync_weights(Zoo())
        assert str(controller.status().workers[0].state) == "READY"
    assert _bytes(receiver) == before


def test_what_comes_through_the_object_store_is_staged(ray_session: None) -> None:
    model, receiver = Zoo(), Zoo(1)
    config = WeightTransferConfig(backend="object_store", load_mode="mapped")
    with LocalController([receiver], config) as controller:
        for _ in range(2):
            poison(receiver)
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), receiver.state_dict())
            assert "rayxfer-version" not in _where(receiver, "large")


def test_a_round_that_fails_leaves_the_old_version_served() -> None:
    model, receiver = Zoo(), Zoo(1)
    with LocalController([receiver], MAPPED) as controller:
        controller.sync_weights(model)
        before = _bytes(model)
        _change(model, 5)

        class Stops(ModuleSource):
            def __iter__(self):  # type: ignore[no-untyped-def]
                for index, item in enumerate(super().__iter__()):
                    if index == 5:
                        raise ValueError("no more")
                    yield item

        with pytest.raises(Exception, match="no more"):
            controller.sync_weights(Stops(model))
        assert _bytes(receiver) == before
        assert str(controller.status().workers[0].state) == "READY"
        controller.sync_weights(model)
        assert _bytes(receiver) == _bytes(model)


def test_a_worker_that_did_not_go_over_keeps_its_file_from_being_written() -> None:
    """Its version stands although the others left it; nothing of it may change under it."""
    model = Zoo()
    one, two = Zoo(1), Zoo(2)
    refuse: list[bool] = []

    def stuck_pause(_: str) -> None:
        if refuse:
            raise RuntimeError("cannot pause")

    bindings = [Binding(one), Binding(two, pause=stuck_pause)]
    with LocalController(bindings, MAPPED) as controller:
        controller.sync_weights(model)
        old = _bytes(two)
        where = _where(two, "large")
        refuse.append(True)
        for _ in range(3):
            _change(model, 1)
            with pytest.raises(PartialUpdate):
                controller.sync_weights(model)
            assert _bytes(one) == _bytes(model)
            assert _bytes(two) == old
            assert _where(two, "large") == where
        refuse.clear()
        controller.sync_weights(model)
        assert _bytes(one) == _bytes(two) == _bytes(model)


def test_the_prover_may_fail_and_the_others_prove_for_themselves() -> None:
    """Worker 0 casts everything, so what it digests is its own memory, not the others' file."""
    model = torch.nn.Linear(64, 64)
    casting, other = torch.nn.Linear(64, 64).double(), torch.nn.Linear(64, 64)
    poison(casting)
    poison(other)
    with LocalController([casting, other], MAPPED) as controller:
        report = controller.sync_weights(model)
        assert [row.verified for row in report.workers] == ["loaded", "loaded"]
        assert report.attempts == 2
        assert_same_bytes(model.state_dict(), other.state_dict())
        assert torch.equal(casting.weight, model.weight.double())


def test_a_byte_that_changes_in_the_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[MemoryFile] = []
    pick, publish = Versions.pick, RingWriter.publish

    def seen(self: Versions, num_bytes: int) -> MemoryFile:
        files[:] = [pick(self, num_bytes)]
        return files[0]

    def overwrite(self: RingWriter, kind: int = 0) -> None:
        middle = files[0].num_bytes // 2  # of the large tensor, which is used where it lies
        files[0].bytes[middle : middle + 8] = 0x5A
        publish(self, kind)

    monkeypatch.setattr(Versions, "pick", seen)
    monkeypatch.setattr(RingWriter, "publish", overwrite)
    model, one, two = Zoo(), Zoo(1), Zoo(2)
    before = _bytes(one), _bytes(two)
    with LocalController([one, two], MAPPED) as controller:
        with pytest.raises(TransferError, match="digest mismatch at 'large'"):
            controller.sync_weights(model)
        assert (_bytes(one), _bytes(two)) == before


def _inode(file: MemoryFile) -> int:
    return int(file.about["inode"])


def test_versions_are_reused_only_when_nobody_uses_them() -> None:
    versions = Versions()
    me = local_facts()
    versions.prepare(4096)
    first = versions.pick(4096)
    versions.learn([me], [(_inode(first), _inode(first))])
    second = versions.pick(4096)
    assert second is not first
    assert versions.pick(4096) is second, "nobody said that it went over to it"
    versions.learn([me], [(_inode(second), _inode(second))])
    assert versions.pick(4096) is first
    stopped = dataclasses.replace(me, address="elsewhere")
    versions.learn([stopped], [(_inode(first), _inode(first))])
    third = versions.pick(4096)
    assert third not in (first, second)
    gone = dataclasses.replace(me, pid=1 << 22, address="gone")
    versions.learn([gone], [(_inode(third), _inode(third))])
    assert versions.pick(4096) is third, "whoever is gone uses nothing"
    assert versions.pick(8192).num_bytes == 8192


def test_what_was_said_before_a_channel_was_opened_anew_stands() -> None:
    versions = Versions()
    me, other = local_facts(), dataclasses.replace(local_facts(), address="elsewhere")
    versions.prepare(4096)
    first = versions.pick(4096)
    said = (_inode(first), _inode(first))
    versions.learn([me, other], [said, said])
    versions.learn([me, other], [(0, 0), (0, 0)])  # a new channel
    second = versions.pick(4096)
    assert second is not first
    # one is about to go over: both files are in use, or about to be
    versions.learn([me, other], [(0, _inode(second)), (0, 0)])
    assert versions.pick(4096) not in (first, second)
    versions.learn([me, other], [(_inode(second), _inode(second)), (0, 0)])
    assert versions.pick(4096) not in (first, second)


def test_two_workers_of_one_process_use_what_either_does() -> None:
    versions = Versions()
    me = local_facts()
    versions.prepare(4096)
    first, second = versions.pick(4096), versions.pick(4096)
    versions.learn([me, me], [(_inode(first),) * 2, (_inode(second),) * 2])
    assert versions.pick(4096) not in (first, second)


def test_nobody_goes_over_to_a_file_of_a_closed_channel() -> None:
    """Its sender has looked for the last time who uses what."""
    ring = RingWriter(slot_bytes=4096, slots=2, readers=2, nonce="00" * 16)
    about = ring.describe()
    readers = [RingReader(reader=i, **about) for i in range(2)]  # type: ignore[arg-type]
    readers[0].going(7)
    ring.close()
    with pytest.raises(TransferError, match="closed this channel"):
        readers[1].going(9)
    readers[0].hold(7)
    assert ring.held()[0] == (7, 7)
    ring.release()


def _dirty(controller: LocalController) -> None:
    """As after a failure: the next sync opens its channels anew."""
    for channel in controller._sender._channels:
        channel.dirty = True


def test_a_channel_that_is_opened_anew_does_not_write_over_what_is_served() -> None:
    model = Zoo()
    with ProcessWorker(Zoo, 1) as one, ProcessWorker(Zoo, 2) as two:
        workers = [one, two]
        with LocalController(workers, MAPPED) as controller:
            for step in range(8):
                if step % 3 == 2:
                    _dirty(controller)
                before = {worker.run(_where, "large") for worker in workers}
                _change(model, 1)
                controller.sync_weights(model)
                after = {worker.run(_where, "large") for worker in workers}
                assert len(before) == len(after) == 1 or not step
                assert before != after, f"round {step} wrote over the version that was served"


def test_a_worker_that_commits_late_refuses_what_it_was_to_go_over_to() -> None:
    """It sat in its commit while the channel was given up and opened anew: what it holds may be written."""
    model = Zoo()
    late, quick = Zoo(1), Zoo(2)
    wait, go_on = threading.Event(), threading.Event()

    def pause(_: str) -> None:
        if wait.is_set():
            assert go_on.wait(60)

    config = WeightTransferConfig(
        backend="shm",
        load_mode="mapped",
        stall_timeout_s=1.0,
        sync_timeout_s=4.0,
        connect_timeout_s=3.0,
    )
    with LocalController([Binding(late, pause=pause), Binding(quick)], config) as controller:
        for _ in range(2):
            _change(model, 1)
            controller.sync_weights(model)
        old, where = _bytes(late), _where(late, "large")
        wait.set()
        _change(model, 1)
        with pytest.raises(PartialUpdate):
            controller.sync_weights(model)
        for _ in range(2):
            _change(model, 1)
            with pytest.raises(PartialUpdate):
                controller.sync_weights(model)
            assert _bytes(quick) == _bytes(model)
            assert (_bytes(late), _where(late, "large")) == (old, where)
        wait.clear()
        go_on.set()
        deadline = time.monotonic() + 30
        while controller.sessions[0].state != "TORN" and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (_bytes(late), _where(late, "large")) == (old, where)
        _change(model, 1)
        controller.sync_weights(model)
        assert _bytes(late) == _bytes(quick) == _bytes(model)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_the_host_holds_two_versions_however_many_workers(backend: str) -> None:
    gc.collect()
    model = torch.nn.ParameterList(torch.randn(1 << 20) for _ in range(8))  # 32 MiB
    size = sum(p.nbytes for p in model)
    before = _own_bytes(model)  # files that what ran before in this process still holds
    workers = [ProcessWorker(_thirty_two) for _ in range(4)]
    try:
        config = WeightTransferConfig(backend=backend, load_mode="mapped")
        with LocalController(workers, config) as controller:
            for _ in range(3):
                controller.sync_weights(model)
            held = [worker.run(_own_bytes) for worker in workers]
            own = _own_bytes(model) - before
            # PSS divides what is shared among those that share it, so the sum is what the host holds
            assert own + sum(held) <= 2 * size + (1 << 20)
            if backend == "shm":  # they are the sender's
                assert max(held) < size
            else:
                assert own == 0
    finally:
        for worker in workers:
            worker.close()


def _thirty_two() -> torch.nn.Module:
    return torch.nn.ParameterList(torch.zeros(1 << 20) for _ in range(8))


def _own_bytes(module: torch.nn.Module) -> int:
    """PSS of this process's version files."""
    total, inside = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as smaps:
        for line in smaps:
            if "-" in line.split()[0] and ":" not in line.split()[0]:
                inside = "rayxfer-version" in line
            elif inside and line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def test_descriptors_do_not_grow() -> None:
    model, receiver = Zoo(), Zoo(1)
    with LocalController([receiver], MAPPED) as controller:
        for _ in range(3):
            controller.sync_weights(model)
        before = _descriptors()
        for _ in range(10):
            controller.sync_weights(model)
        assert _descriptors() == before


def _descriptors() -> int:
    """Of this process, once what a round leaves to the background is done: it reads a file of /proc."""
    for thread in threading.enumerate():
        if thread.name == "rayxfer-forget":
            thread.join(60)
    return len(os.listdir("/proc/self/fd"))


def test_looking_for_own_pages_takes_little_memory() -> None:
    """It is done in threads that come and go, whose allocator keeps what each has asked for once."""
    file = MemoryFile(64 << 20)
    mine = ForeignFile(**file.about, private=True)  # type: ignore[arg-type]
    tracemalloc.start()
    try:
        assert _own_pages(mine.address, file.num_bytes) is False
        assert tracemalloc.get_traced_memory()[1] < 256 << 10
    finally:
        tracemalloc.stop()
    mine.bytes[-1] = 1
    assert _own_pages(mine.address, file.num_bytes) is True


def test_what_the_worker_changes_between_rounds_is_seen_by_the_next() -> None:
    """A commit notes where the weights went without looking at all of them again."""
    model, receiver = Zoo(), Zoo(1)
    with LocalController([receiver], MAPPED) as controller:
        for _ in range(2):
            controller.sync_weights(model)
        receiver.large = torch.nn.Parameter(torch.zeros_like(receiver.large), requires_grad=False)
        for _ in range(2):
            _change(model, 1)
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), receiver.state_dict())
        right = receiver.large
        receiver.large = torch.nn.Parameter(torch.zeros(3, dtype=right.dtype), requires_grad=False)
        before = _bytes(receiver)
        with pytest.raises(ContractError, match="shape mismatch at 'large'"):
            controller.sync_weights(model)
        assert _bytes(receiver) == before
        receiver.large = right
        _change(model, 1)
        controller.sync_weights(model)
        assert_same_bytes(model.state_dict(), receiver.state_dict())


def test_a_pause_is_not_waited_for_in_the_commits_own_call() -> None:
    """Where a worker has nothing to pause a mapped commit needs no thread; where it has, it does."""
    model = Zoo()
    threads: list[str] = []
    for pause in (None, lambda mode: threads.append(threading.current_thread().name)):
        binding = Binding(Zoo(1), pause=pause, resume=None if pause is None else lambda: None)
        with LocalController([binding], MAPPED) as controller:
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), binding.model.state_dict())
    assert threads
    assert all("commit" in name for name in threads)
