"""`share_memory`: the trainer's weights in a memory file, sent over shm without a copy at the sender."""

from __future__ import annotations

import copy
import gc
import os
import time
from typing import Any

import pytest
import torch

import rayxfer.feed
from rayxfer import (
    BackendUnavailable,
    ConfigError,
    ContractError,
    MappingSource,
    ParamMeta,
    WeightTransferConfig,
    share_memory,
)
from rayxfer.copying import copy_bytes, copy_many
from rayxfer.engines import frames
from rayxfer.engines.frame_reader import FrameReader
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.feed import Feed
from rayxfer.memfile import ForeignFile, MemoryFile, find
from rayxfer.packing import Layout
from rayxfer.testing.local import LocalController
from rayxfer.testing.processes import ProcessWorker
from tests.helpers import assert_same_bytes, poison, raw_bytes


class Zoo(torch.nn.Module):
    """Ties, views of one storage, strides, sizes and dtypes that a layout may stumble over."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(33, 17)
        self.tied = torch.nn.Linear(33, 17, bias=False)
        self.tied.weight = self.first.weight
        self.turned = torch.nn.Parameter(torch.randn(5, 7).t())
        self.large = torch.nn.Parameter(torch.randn(3 << 20).to(torch.bfloat16))
        self.none = torch.nn.Parameter(torch.empty(0, 4))
        self.one = torch.nn.Parameter(torch.randn(()))
        both = torch.randn(10)
        self.left, self.right = torch.nn.Parameter(both[:5]), torch.nn.Parameter(both[5:])
        self.register_buffer("flags", torch.tensor([True, False, True]))
        self.register_buffer("wave", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("fp8", torch.randn(9).to(torch.float8_e4m3fn))


def _state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def _bytes(module: torch.nn.Module) -> dict[str, bytes]:
    return {name: raw_bytes(tensor) for name, tensor in module.state_dict().items()}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of what the sender copies."""
    seen: list[int] = []
    original = rayxfer.feed.copy_bytes

    def counted(target: int, source: int, num_bytes: int, *rest: Any, **options: Any) -> None:
        seen.append(num_bytes)
        original(target, source, num_bytes, *rest, **options)

    monkeypatch.setattr(rayxfer.feed, "copy_bytes", counted)
    return seen


def test_the_tensors_stay_what_they_are() -> None:
    model = Zoo()
    before = _state(model)
    objects = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    strides = {name: p.stride() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    assert share_memory(model) is model
    assert {n: id(p) for n, p in model.named_parameters(remove_duplicate=False)} == objects
    assert {n: p.stride() for n, p in model.named_parameters()} == strides
    assert_same_bytes(before, model.state_dict())
    assert model.tied.weight is model.first.weight
    assert model.right.data_ptr() == model.left.data_ptr() + 20, "views of one storage stay so"
    for name, tensor in model.state_dict().items():
        assert not tensor.numel() or find(tensor.data_ptr(), tensor.nbytes) is not None, name
    model.first(torch.ones(33)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.first.weight, before["first.weight"])


@pytest.mark.parametrize("verify", ["digest", "off"])
@pytest.mark.parametrize("bucket", [1, 64 << 10, None])
def test_nothing_is_copied_at_the_sender(
    verify: str, bucket: int | None, copies: list[int]
) -> None:
    model, receiver = share_memory(Zoo()), Zoo(1)
    config = WeightTransferConfig(backend="shm", verify=verify, bucket_size_bytes=bucket)
    with LocalController([receiver], config) as controller:
        for _ in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            poison(receiver)
            report = controller.sync_weights(model)
            assert report.workers[0].verified == ("loaded" if verify == "digest" else "off")
            assert_same_bytes(model.state_dict(), receiver.state_dict())
            with torch.no_grad():  # the sender's tensors are its own again
                model.large.zero_()
            assert receiver.large.any()
    strided = model.turned.nbytes  # no dense bytes to point to: it goes the ordinary way
    assert sum(copies) <= 3 * (strided + 64 * 8), "only what shares a bucket with it"


def test_tensors_that_were_replaced_go_the_ordinary_way() -> None:
    model, receiver = share_memory(Zoo()), Zoo(1)
    with LocalController([receiver], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(model)
        model.large.data = torch.randn(3 << 20).to(torch.bfloat16)
        poison(receiver)
        controller.sync_weights(model)
        assert_same_bytes(model.state_dict(), receiver.state_dict())


def test_a_cast_makes_new_tensors_which_are_not_pointed_to() -> None:
    model = share_memory(torch.nn.Linear(64, 64))
    receiver = torch.nn.Linear(64, 64).to(torch.bfloat16)
    with LocalController([receiver], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(MappingSource(model.state_dict(), dtype=torch.bfloat16))
        assert torch.equal(receiver.weight, model.weight.to(torch.bfloat16))


def test_processes_and_a_loader_that_keeps_what_it_is_given() -> None:
    model = share_memory(Zoo())
    with ProcessWorker(Zoo, 1) as one, ProcessWorker(Zoo, 2) as two:
        config = WeightTransferConfig(backend="shm")
        with LocalController([one, two], config) as controller:
            for worker in (one, two):
                worker.run(poison)
            controller.sync_weights(model)
            for worker in (one, two):
                assert worker.run(_bytes) == _bytes(model)
    kept: dict[str, torch.Tensor] = {}

    def keep(_: object, weights: list[tuple[str, torch.Tensor]]) -> None:
        kept.update(weights)

    from rayxfer.binding import Binding

    binding = Binding(Zoo(3), load_weights=keep)
    with LocalController([binding], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(model)
        expected = copy.deepcopy(_state(model))
        with torch.no_grad():
            for tensor in kept.values():
                tensor.view(-1)[:1].zero_()
        assert_same_bytes(expected, model.state_dict())


def test_what_cannot_be_placed_is_named_and_nothing_is_moved() -> None:
    meta = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match=r"'weight' is a .* tensor on meta"):
        share_memory(meta)
    mixed = {"good": torch.zeros(4), "sparse": torch.zeros(4).to_sparse()}
    address = mixed["good"].data_ptr()
    with pytest.raises(ConfigError, match="'sparse'"):
        share_memory(mixed)
    assert mixed["good"].data_ptr() == address
    with pytest.raises(ConfigError, match="list"):
        share_memory([torch.zeros(1)])  # type: ignore[type-var]
    with pytest.raises(ConfigError, match="'lazy'"):
        share_memory({"lazy": torch.zeros(2, dtype=torch.complex64).conj()})


def test_the_file_goes_with_the_last_tensor() -> None:
    gc.collect()  # what other tests left to it
    before = len(os.listdir("/proc/self/fd"))
    model = share_memory(Zoo())
    assert len(os.listdir("/proc/self/fd")) > before
    large = model.large.detach()
    del model
    gc.collect()
    assert find(large.data_ptr(), large.nbytes) is not None
    assert len(os.listdir("/proc/self/fd")) > before
    del large
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_find_is_exact_at_both_ends() -> None:
    one, two = MemoryFile(100), MemoryFile(5000)
    for file in (one, two):
        assert find(file.address, file.num_bytes) == (file.about, 0)
        assert find(file.address + 7, 10) == (file.about, 7)
        assert find(file.address, file.num_bytes + 1) is None
        assert find(file.address - 1, 1) is None
        assert find(file.address + file.num_bytes, 1) is None
    assert find(torch.zeros(4).data_ptr(), 16) is None


def test_a_foreign_file_is_read_only_or_private() -> None:
    file = MemoryFile(3 * 4096)
    file.bytes.fill_(7)
    private = ForeignFile(**file.about, private=True)  # type: ignore[arg-type]
    private.bytes[5] = 9
    assert file.bytes[5] == 7
    file.bytes.fill_(8)
    assert private.bytes[5] == 9, "its own page"
    assert private.bytes[8192] == 8
    private.forget_writes()
    private.settle()
    assert private.bytes[5] == 8
    with pytest.raises(Exception, match="another session"):
        ForeignFile(**{**file.about, "nonce": "00" * 16})  # type: ignore[arg-type]


class _Large(torch.nn.Module):
    def __init__(self, seed: int, tensors: int, num_bytes: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = torch.nn.ParameterList(
            torch.randint(-(1 << 15), 1 << 15, (num_bytes // 2,), dtype=torch.int16).view(
                torch.bfloat16
            )
            for _ in range(tensors)
        )


@pytest.mark.parametrize(("tensors", "num_bytes"), [(3, 30 << 20), (40, 5 << 19), (4000, 20 << 10)])
@pytest.mark.parametrize("workers", [1, 2])
def test_the_sender_reads_beside_its_reader(
    tensors: int, num_bytes: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never further ahead of it than that what both read is still in a processor's cache: what was told is
    the whole model, and the reader is slow."""
    ahead: list[int] = []
    read, original = [0], frames._Passing._pace

    def pace(self: frames._Passing, part: int) -> None:
        read[0] += part
        original(self, part)
        ahead.append(read[0] - self._ring.copied())

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.002)
        copy_bytes(*args, **options)

    def slow_many(*args: Any, **options: Any) -> None:
        time.sleep(0.002)
        copy_many(*args, **options)

    monkeypatch.setattr(frames, "_TOGETHER_BYTES", 10 << 20)  # many frames
    monkeypatch.setattr(frames._Passing, "_pace", pace)
    monkeypatch.setattr("rayxfer.engines.frame_reader.copy_bytes", slow)
    monkeypatch.setattr("rayxfer.engines.collective.copy_many", slow_many)
    model = share_memory(_Large(0, tensors, num_bytes))
    receivers = [_Large(1, tensors, num_bytes) for _ in range(workers)]
    with LocalController(receivers, WeightTransferConfig(backend="shm")) as controller:
        for _ in range(2):
            for receiver in receivers:
                poison(receiver)
            report = controller.sync_weights(model)
            assert {row.verified for row in report.workers} == {"loaded"}
            for receiver in receivers:
                assert_same_bytes(model.state_dict(), receiver.state_dict())
    assert read[0] == 2 * tensors * num_bytes
    assert max(ahead) <= frames._BESIDE_BYTES


def test_what_was_told_and_then_changes_its_memory_fails_the_round() -> None:
    model = share_memory(_Large(0, 40, 5 << 19))
    receiver = _Large(1, 40, 5 << 19)
    with LocalController([receiver], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(model)
        original = Feed.skip

        def move(feed: Feed, *args: Any) -> None:
            if feed.handed > 20:
                model.parts[30].data = torch.zeros_like(model.parts[30])
            original(feed, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Feed, "skip", move)
            with pytest.raises(ContractError, match="was given other memory"):
                controller.sync_weights(model)
        poison(receiver)
        assert controller.sync_weights(model).workers[0].verified == "loaded"
        assert_same_bytes(model.state_dict(), receiver.state_dict())


@pytest.mark.parametrize("wrong", ["past the end", "too few", "another file"])
def test_a_frame_that_points_elsewhere_is_refused(wrong: str) -> None:
    file = MemoryFile(1 << 10)
    layout = Layout([ParamMeta("w", torch.float32, (16,)), ParamMeta("v", torch.uint8, (3,))], 4096)
    about = {**file.about, "inode": 1} if wrong == "another file" else file.about
    offsets = {"past the end": [0, 1022], "too few": [0], "another file": [0, 64]}[wrong]
    ring = RingWriter(slot_bytes=65536, slots=2, readers=1, nonce="ab" * 16)
    reader = FrameReader(RingReader(reader=0, **ring.describe()))  # type: ignore[arg-type]
    frame = frames._frame(about, frames.array("Q", offsets))
    ring.slot()[: frame.numel()] = frame
    ring.publish(frames.THERE)
    taken: list[object] = []
    expected = BackendUnavailable if wrong == "another file" else ContractError
    with pytest.raises(expected):
        reader.receive(layout, taken.append)
    assert not taken
    ring.close()


def test_memory_that_is_not_dense_is_copied_by_the_sender_and_kept_until_it_was_read() -> None:
    class Strided(torch.nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.parts = torch.nn.ParameterList(torch.randn(700, 900).t() for _ in range(6))

    model, one, two = Strided(0), Strided(1), Strided(2)
    with LocalController([one, two], WeightTransferConfig(backend="shm")) as controller:
        for _ in range(3):
            poison(one)
            poison(two)
            controller.sync_weights(model)
            for receiver in (one, two):
                assert_same_bytes(model.state_dict(), receiver.state_dict())
