"""`ipc` over its double: handles, lifetimes, devices, aborts. Nothing here says anything about CUDA."""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayxfer import (
    BackendUnavailable,
    ConfigError,
    ContractError,
    ModuleSource,
    PartialUpdate,
    TransferError,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer import WeightTransferEngineFactory as Factory
from rayxfer.base import SessionPlan
from rayxfer.engines.device import HANDLE_BYTES, expandable_segments
from rayxfer.engines.handles import (
    FRAME_BYTES,
    MAX_TENSORS,
    NOTHING,
    Export,
    Exports,
    Frame,
    Imports,
)
from rayxfer.metadata import ParamMeta, metadata_to_wire
from rayxfer.source import WeightSource
from rayxfer.testing import LocalController, ProcessWorker, assert_same_bytes, check_engine, doubles
from rayxfer.testing.doubles import DoubleDevice, DoubleIPCEngine
from rayxfer.topology import Facts, choose_backend, local_facts
from tests.helpers import poison


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleDevice]:
    """A fresh double per test; at the end nothing of it may be open or allocated."""
    monkeypatch.setattr(doubles, "_devices", {})
    WeightTransferEngineFactory.register_engine("ipc-double", DoubleIPCEngine)
    try:
        made = doubles.double_device("")
        yield made
        until = time.monotonic() + 10
        while made.counts.frees < made.counts.allocations and time.monotonic() < until:
            time.sleep(0.02)
        assert made.open_now == {}
        assert made.counts.opens == made.counts.closes
        assert made.counts.frees == made.counts.allocations
    finally:
        del WeightTransferEngineFactory._direct["ipc-double"]


def config(**settings: Any) -> WeightTransferConfig:
    return WeightTransferConfig(backend="ipc-double", **{"stall_timeout_s": 3.0, **settings})


def net(seed: int = 0, layers: int = 6) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(layers)))


def poisoned_net(layers: int = 6) -> torch.nn.Module:
    model = net(99, layers)
    poison(model)
    return model


def same(model: torch.nn.Module, receivers: list[torch.nn.Module]) -> None:
    for receiver in receivers:
        assert_same_bytes(model.state_dict(), receiver.state_dict())


class OneBuffer(WeightSource):
    """Makes every tensor in one buffer, on the fly."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.inner = ModuleSource(model)

    def metadata(self) -> list[ParamMeta]:
        return self.inner.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        scratch = torch.empty(1 << 16, dtype=torch.uint8)
        for name, tensor in self.inner:
            view = scratch[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            view.copy_(tensor)
            yield name, view
            scratch.fill_(0xEE)


# --- the whole ------------------------------------------------------------------------------


def test_the_double_conforms(device: DoubleDevice) -> None:
    assert not check_engine("ipc-double", workers=2, place=device.place).failed


def test_the_double_conforms_where_events_cannot_be_shared(device: DoubleDevice) -> None:
    device.shares_events = False
    report = check_engine("ipc-double", workers=1, place=device.place, only="every_tensor")
    assert report.passed


def test_staged_conforms(device: DoubleDevice) -> None:
    settings = WeightTransferConfig(stall_timeout_s=5.0, init_info={"form": "staged"})
    assert not check_engine("ipc-double", config=settings, place=device.place).failed


# --- handles --------------------------------------------------------------------------------


def test_direct_exports_each_block_once_and_stages_nothing(device: DoubleDevice) -> None:
    model = device.place(net())
    receivers = [poisoned_net() for _ in range(3)]
    with LocalController(receivers, config()) as controller:
        for version in range(1, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            for receiver in receivers:
                poison(receiver)
            assert controller.sync_weights(model).version == version
            same(model, receivers)
        assert device.counts.exports == 12  # weight and bias of six layers, over five rounds
        assert device.counts.opens == 12 * 3
        assert device.counts.closes == 0
        assert device.counts.allocations == 0
    assert device.counts.closes == 12 * 3


def test_staged_exports_two_buffers_once(device: DoubleDevice) -> None:
    model = net()
    receivers = [poisoned_net() for _ in range(2)]
    with LocalController(receivers, config(bucket_size_bytes=1500)) as controller:
        for _ in range(4):
            for receiver in receivers:
                poison(receiver)
            controller.sync_weights(OneBuffer(model))
            same(model, receivers)
        assert device.counts.exports == device.counts.allocations == 2
        assert device.counts.opens == 2 * 2


def test_memory_that_is_not_on_the_gpu_is_staged_beside_what_is(device: DoubleDevice) -> None:
    model = net()
    device.place(model[0])
    receiver = poisoned_net()
    with LocalController([receiver], config(bucket_size_bytes=3000)) as controller:
        controller.sync_weights(model)
        same(model, [receiver])
        assert device.counts.allocations == 2
        assert device.counts.exports == 2 + 2


def test_a_tensor_larger_than_a_bucket_is_staged_in_parts(device: DoubleDevice) -> None:
    model = torch.nn.Module()
    model.register_buffer("small", torch.arange(5))
    model.register_buffer("large", torch.randn(300, 70))
    model.register_buffer("empty", torch.empty(0, 3))
    receiver = torch.nn.Module()
    for name, tensor in model.named_buffers():
        receiver.register_buffer(name, torch.empty_like(tensor))
    poison(receiver)
    with LocalController([receiver], config(bucket_size_bytes=4096)) as controller:
        controller.sync_weights(model)
        same(model, [receiver])
    assert device.counts.allocations == 2


def test_memory_that_was_freed_is_closed_and_what_replaced_it_is_opened(
    device: DoubleDevice,
) -> None:
    model, receiver = device.place(net(layers=2)), poisoned_net(2)
    with LocalController([receiver], config()) as controller:
        controller.sync_weights(model)
        block = device.block_of(model[0].weight)
        assert block is not None
        model[0].weight.data = (
            device.hold(torch.zeros(24 * 24 * 4, dtype=torch.uint8))
            .view(torch.float32)
            .view(24, 24)
        )
        device.drop(block)
        poison(receiver)
        controller.sync_weights(model)
        same(model, [receiver])
        assert (device.counts.exports, device.counts.opens, device.counts.closes) == (5, 5, 1)


def test_keep_open_false_gives_the_trainers_memory_back_after_every_round(
    device: DoubleDevice,
) -> None:
    model, receivers = device.place(net()), [poisoned_net(), poisoned_net()]
    settings = config(init_info={"keep_open": False})
    with LocalController(receivers, settings) as controller:
        for _ in range(3):
            controller.sync_weights(model)
            assert device.open_now == {}
            same(model, receivers)
        assert device.counts.exports == 12
        assert device.counts.opens == device.counts.closes == 3 * 12 * 2


def test_more_blocks_than_fit_a_frame(device: DoubleDevice) -> None:
    count = MAX_TENSORS * 2 + 7
    model, receiver = torch.nn.Module(), torch.nn.Module()
    for index in range(count):
        model.register_buffer(f"b{index}", torch.full((2,), index, dtype=torch.int32))
        receiver.register_buffer(f"b{index}", torch.empty(2, dtype=torch.int32))
    device.place(model)
    poison(receiver)
    settings = config(init_info={"keep_open": False}, verify="off")
    with LocalController([receiver], settings) as controller:
        for _ in range(2):
            controller.sync_weights(model)
            same(model, [receiver])
            poison(receiver)


# --- lifetimes ------------------------------------------------------------------------------


def test_nothing_is_used_again_before_slow_copies_are_done(device: DoubleDevice) -> None:
    """Acknowledged means copied, not queued: the call lasts at least as long as its last copies."""
    device.delay_s = 0.05
    model, receiver = device.place(net()), poisoned_net()
    with LocalController([receiver], config(bucket_size_bytes=5000, verify="off")) as controller:
        controller.sync_weights(model)
        start = time.monotonic()
        report = controller.sync_weights(model)
        # 2 buckets may wait together: 6 of them are at least 3 delays
        assert time.monotonic() - start > 3 * device.delay_s
        assert report.version == 2
    same(model, [receiver])


def test_source_tensors_are_held_until_every_worker_has_acknowledged(
    device: DoubleDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayxfer.engines import ipc_round

    held: list[int] = []
    original = ipc_round.Reader.take

    def take(self: Any, frame: Frame) -> None:
        channel = channels[0]
        held.append(sum(len(one) for one in channel.held if one is not None))
        original(self, frame)

    channels: list[Any] = []
    init = ipc_round.Writer.__init__

    def remember(self: Any, channel: Any, *args: Any, **kwargs: Any) -> None:
        channels.append(channel)
        init(self, channel, *args, **kwargs)

    monkeypatch.setattr(ipc_round.Reader, "take", take)
    monkeypatch.setattr(ipc_round.Writer, "__init__", remember)
    model, receiver = device.place(net()), poisoned_net()
    with LocalController([receiver], config(bucket_size_bytes=5000)) as controller:
        controller.sync_weights(model)
        assert len(held) > 2
        assert min(held) >= 1
        assert channels[0].held == [None, None]
    same(model, [receiver])


def frames_of(monkeypatch: pytest.MonkeyPatch) -> list[Frame]:
    """Every frame that is published from now on."""
    from rayxfer.engines import ipc_round

    seen: list[Frame] = []
    original = ipc_round.Writer._publish

    def publish(self: Any, frame: Frame, slot: torch.Tensor, hold: Any) -> None:
        seen.append(frame)
        original(self, frame, slot, hold)

    monkeypatch.setattr(ipc_round.Writer, "_publish", publish)
    return seen


class Temporaries:
    """An iterator as `Feed` is one: everything in it was made for this pass."""

    def __init__(self, items: list[tuple[str, torch.Tensor]]) -> None:
        self._items = iter(items)
        self.temporary_bytes = 0

    def __iter__(self) -> Temporaries:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        name, tensor = next(self._items)
        self.temporary_bytes += tensor.nbytes
        return name, tensor


@pytest.mark.parametrize(("temporary", "frames"), [(False, 1), (True, 6)])
def test_a_direct_frame_gathers_buckets_but_only_one_of_temporaries(
    monkeypatch: pytest.MonkeyPatch, device: DoubleDevice, temporary: bool, frames: int
) -> None:
    """Held tensors cost nothing if they are the trainer's own, and memory if they are not."""
    seen = frames_of(monkeypatch)
    model = device.place(net())
    source = ModuleSource(model)
    wire = metadata_to_wire(source.metadata())
    info = {key: wire[key] for key in ("names", "dtype_names", "shapes")}
    spec = dataclasses.replace(plan(on("cpu")), bucket_size_bytes=2400)
    channel, infos = DoubleIPCEngine.trainer_open(spec)
    worker = DoubleIPCEngine(config())
    worker.init_transfer_engine(worker.parse_init_info(infos[0]))
    calls: list[int] = []
    thread = threading.Thread(
        target=lambda: worker.receive_weights(
            worker.parse_update_info(info),
            lambda pairs: calls.append(sum(t.nbytes for _, t in pairs)),
        )
    )
    thread.start()
    items = list(source)
    DoubleIPCEngine.trainer_send_weights(
        Temporaries(items) if temporary else iter(items),  # type: ignore[arg-type]
        {"channel": channel, "update_info": info, "stable": True},
    )
    thread.join(10)
    worker.shutdown()
    DoubleIPCEngine.trainer_close(channel)
    assert len(seen) == frames
    assert sum(calls) == sum(t.nbytes for _, t in items)
    assert max(calls) <= 2400  # a loader that keeps what it is given gets a bucket at a time


def test_ready_is_recorded_before_and_waited_for_after_each_frame(device: DoubleDevice) -> None:
    model, receiver = device.place(net()), poisoned_net()
    with LocalController([receiver], config(bucket_size_bytes=5000)) as controller:
        controller.sync_weights(model)
    calls = [call for call in device.log if call in ("record", "wait")]
    assert calls.count("record") == calls.count("wait") > 2
    for count in range(len(calls)):
        seen = calls[: count + 1]
        assert seen.count("wait") <= seen.count("record")


@pytest.mark.parametrize("form", ["auto", "staged"])
def test_nobody_waits_for_what_is_done_already(device: DoubleDevice, form: str) -> None:
    device.busy = False
    model, receiver = device.place(net()), poisoned_net()
    settings = config(bucket_size_bytes=5000, init_info={"form": form})
    with LocalController([receiver], settings) as controller:
        controller.sync_weights(model)
    assert_same_bytes(model.state_dict(), receiver.state_dict())
    assert device.log.count("record") > 2
    assert "wait" not in device.log


# --- devices and settings -------------------------------------------------------------------

GPU_A, GPU_B = "cuda:aaaa-1", "cuda:bbbb-2"


def plan(*workers: Facts, sender: Facts | None = None, **settings: Any) -> SessionPlan:
    return SessionPlan(
        session_id="s",
        token="00" * 16,
        config=config(**settings),
        bucket_size_bytes=1 << 20,
        sender=sender or local_facts(),
        workers=workers,
        deadline_s=5.0,
    )


def on(gpu: str, **changes: Any) -> Facts:
    return dataclasses.replace(local_facts(), device=gpu, **changes)


@pytest.mark.parametrize(
    ("workers", "error", "says"),
    [
        ([on(GPU_A), on(GPU_B)], ConfigError, "two GPUs.*aaaa-1.*bbbb-2"),
        ([on(GPU_A, num_ranks=2)], ConfigError, "2 ranks"),
        ([on(GPU_A), on(GPU_A, hostname="elsewhere")], BackendUnavailable, "1 is on elsewhere"),
    ],
    ids=["two GPUs", "ranks", "hosts"],
)
def test_fleets_that_cannot_be_served_are_named(
    workers: list[Facts], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        DoubleIPCEngine.trainer_open(plan(*workers))


def test_weights_on_the_cpu_are_refused_by_the_real_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    from rayxfer.engines.ipc import IPCEngine

    monkeypatch.setattr(IPCEngine, "check_available", classmethod(lambda cls: None))
    with pytest.raises(ConfigError, match="receiver 0 has its weights on 'cpu'"):
        IPCEngine.trainer_open(plan(on("cpu")))


def test_the_gpu_is_found_by_uuid_and_must_be_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doubles, "visible", ["bbbb-2", "aaaa-1"])
    channel, infos = DoubleIPCEngine.trainer_open(plan(on(GPU_A)))
    assert channel.device.uuid == infos[0]["device"] == "aaaa-1"
    worker = DoubleIPCEngine(config())
    worker.init_transfer_engine(worker.parse_init_info(infos[0]))
    assert worker._device.uuid == "aaaa-1"
    worker.shutdown()
    monkeypatch.setattr(doubles, "visible", ["bbbb-2"])
    other = DoubleIPCEngine(config())
    with pytest.raises(ConfigError, match=r"aaaa-1 is not visible.*bbbb-2"):
        other.init_transfer_engine(other.parse_init_info(infos[0]))
    other.shutdown()
    DoubleIPCEngine.trainer_close(channel)


def test_two_gpus_with_one_session_each_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trainer rank per GPU: each with its own controller, workers and handles."""
    uuids = {"a": "aaaa-1", "b": "bbbb-2"}
    for key, uuid in uuids.items():
        device = doubles.double_device(uuid)
        monkeypatch.setattr(DoubleIPCEngine, "_uuid_of", classmethod(lambda cls, f, u=uuid: u))
        model, receiver = device.place(net(ord(key))), poisoned_net()
        with LocalController([receiver], config()) as controller:
            controller.sync_weights(model)
            same(model, [receiver])
            assert device.counts.exports == device.counts.opens == 12
        assert device.open_now == {}
    assert doubles.double_device("").counts.opens == 0


SETTING = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def test_expandable_segments_are_named(
    monkeypatch: pytest.MonkeyPatch, device: DoubleDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenRLHF#957. Direct is refused at connect; otherwise what cannot be exported is staged."""
    monkeypatch.setattr(DoubleIPCEngine, "bad_setting", SETTING)
    device.exportable = False
    model, receiver = device.place(net()), poisoned_net()
    with (
        LocalController([receiver], config(init_info={"form": "direct"})) as controller,
        pytest.raises(ConfigError, match=SETTING),
    ):
        controller.sync_weights(model)
    with (
        caplog.at_level(logging.WARNING),
        LocalController([receiver], config(bucket_size_bytes=3000)) as controller,
    ):
        controller.sync_weights(model)
        assert SETTING in caplog.text
        same(model, [receiver])
        assert device.counts.exports == 2


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"}, SETTING),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:true"}, "PYTORCH_ALLOC_CONF"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_the_allocators_settings_are_read(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], found: str | None
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    setting = expandable_segments()
    assert (setting is None) == (found is None)
    assert found is None or found in str(setting)


def test_direct_refuses_what_it_cannot_read_in_place(device: DoubleDevice) -> None:
    model, receiver = net(), poisoned_net()
    settings = config(init_info={"form": "direct"})
    with LocalController([receiver], settings) as controller:
        with pytest.raises(ContractError, match=r"'0\.weight' cannot be read in place"):
            controller.sync_weights(model)
        with pytest.raises(ConfigError, match="makes them on the fly"):
            controller.sync_weights(OneBuffer(model))
        device.place(model)
        poison(receiver)
        controller.sync_weights(model)
        same(model, [receiver])


@pytest.mark.parametrize("bad", [{"form": "fast"}, {"keep_open": 1}, {"bucket_size_bytes": 5}])
def test_bad_settings_are_named(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        DoubleIPCEngine.trainer_open(plan(on(GPU_A), init_info=bad))


def test_auto_goes_another_way_where_ipc_is_refused(
    monkeypatch: pytest.MonkeyPatch, device: DoubleDevice
) -> None:
    """Found at connect, so nothing has moved yet; the reason is in the report."""
    from rayxfer import sender as sending

    def refuse(self: DoubleDevice, handle: bytes) -> None:
        raise TransferError("operation not supported")

    monkeypatch.setattr(DoubleDevice, "open_ready", refuse)
    monkeypatch.setattr(
        Factory, "_lazy", {**Factory._lazy, "ipc": (doubles.__name__, "DoubleIPCEngine")}
    )
    monkeypatch.setattr(sending, "choose_backend", _choose_as_on_one_gpu)
    model, receiver = device.place(net()), poisoned_net()
    with LocalController([receiver], WeightTransferConfig(backend="auto")) as controller:
        report = controller.sync_weights(model)
    assert report.workers[0].backend == "gloo"
    assert "operation not supported" in report.workers[0].reason
    same(model, [receiver])


def _choose_as_on_one_gpu(sender: Facts, worker: Facts, **rest: Any) -> Any:
    at = {"device": GPU_A}
    return choose_backend(
        dataclasses.replace(sender, **at), dataclasses.replace(worker, **at), **rest
    )


# --- hostile or broken frames ---------------------------------------------------------------


def test_frames_travel_as_plain_numbers() -> None:
    frame = Frame(
        7,
        1,
        [(0, 64), (NOTHING, 0), (3, 1 << 40)],
        None,
        [Export(3, 1 << 41, bytes(range(HANDLE_BYTES)))],
        [1, 2],
    )
    data = frame.encode()
    assert Frame.decode(memoryview(data + bytes(64))) == frame
    part = Frame(2, 0, [(1, 5)], (1 << 33, 99))
    assert Frame.decode(memoryview(part.encode())) == part
    full = Frame(
        0,
        0,
        [(i, 0) for i in range(MAX_TENSORS)],
        None,
        [Export(i, 1, bytes(HANDLE_BYTES)) for i in range(MAX_TENSORS)],
        list(range(2048)),
    )
    assert len(full.encode()) <= FRAME_BYTES


@pytest.mark.parametrize(
    "words",
    [[0] * 8, [9, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1 << 60, 0, 0, 0, 0, 0], [2, 0, 2, 0, 0, 0, 0, 8]],
)
def test_what_is_no_frame_is_refused(words: list[int]) -> None:
    import array

    data = array.array("Q", words).tobytes() + bytes(256)
    with pytest.raises(ContractError, match="makes no sense"):
        Frame.decode(memoryview(data))


def test_only_what_was_exported_can_be_rebuilt(device: DoubleDevice) -> None:
    imports = Imports(device)
    memory = device.hold(torch.arange(100, dtype=torch.uint8))
    exports = Exports(device)
    places = exports.checked([memory])
    assert places == [(0, 0)]
    (export,), _ = exports.take_news()
    with pytest.raises(ContractError, match="never announced"):
        imports.memory((0, 0), 10)
    imports.news(Frame(0, 0, [], None, [export]), lambda: None)
    assert imports.memory((0, 90), 10).tolist() == list(range(90, 100))
    with pytest.raises(ContractError, match="which has 100"):
        imports.memory((0, 91), 10)
    with pytest.raises(ContractError, match="announced twice"):
        imports.news(Frame(0, 0, [], None, [export]), lambda: None)
    with pytest.raises(ContractError, match="is closed"):
        imports.news(Frame(0, 0, [], None, [], [5]), lambda: None)
    longer = dataclasses.replace(export, number=1, num_bytes=101)
    with pytest.raises(TransferError, match="too short"):
        imports.news(Frame(0, 0, [], None, [longer]), lambda: None)
    forged = Export(2, 10, b"not a handle".ljust(HANDLE_BYTES, b"\0"))
    with pytest.raises(TransferError, match="is none"):
        imports.news(Frame(0, 0, [], None, [forged]), lambda: None)
    imports.close_all()
    imports.close_all()


# --- other processes ------------------------------------------------------------------------


def _held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def _poison(model: torch.nn.Module) -> None:
    poison(model)


def _counts(model: torch.nn.Module) -> tuple[int, int, int]:
    device = doubles.double_device("")
    return device.counts.opens, device.counts.closes, len(device.open_now)


def _slow(model: torch.nn.Module) -> None:
    doubles.double_device("").delay_s = 0.5


def test_in_other_processes_every_handle_is_opened_and_closed_once(device: DoubleDevice) -> None:
    model = device.place(net())
    with ProcessWorker(poisoned_net) as a, ProcessWorker(poisoned_net) as b:
        with LocalController([a, b], config()) as controller:
            for _ in range(3):
                for worker in (a, b):
                    worker.run(_poison)
                controller.sync_weights(model)
                for worker in (a, b):
                    assert_same_bytes(model.state_dict(), worker.run(_held))
                    assert worker.run(_counts) == (12, 0, 12)
            assert device.counts.exports == 12
        for worker in (a, b):
            assert worker.run(_counts) == (12, 12, 0)


def test_a_worker_killed_in_the_middle_frees_the_others(device: DoubleDevice) -> None:
    model = device.place(net())
    with ProcessWorker(poisoned_net) as a, ProcessWorker(poisoned_net) as b:
        settings = config(bucket_size_bytes=2500, on_worker_failure="raise")
        with LocalController([a, b], settings) as controller:
            controller.sync_weights(model)
            b.run(_slow)
            timer = threading.Timer(0.4, os.kill, (b.pid, signal.SIGKILL))
            a.run(_poison)
            timer.start()
            start = time.monotonic()
            with pytest.raises(PartialUpdate) as caught:
                controller.sync_weights(model)
            assert time.monotonic() - start < 8
            timer.join()
            assert [str(row.state) for row in caught.value.report.workers] == ["READY", "LOST"]
            assert_same_bytes(model.state_dict(), a.run(_held))
        opens, closes, left = a.run(_counts)
        assert opens == closes > 12
        assert left == 0


def _trainer_that_dies(connection: Any) -> None:
    model = doubles.double_device("aaaa-1").place(net())
    channel, infos = DoubleIPCEngine.trainer_open(plan(on(GPU_A)))
    source = ModuleSource(model)
    wire = metadata_to_wire(source.metadata())
    info = {key: wire[key] for key in ("names", "dtype_names", "shapes")}
    connection.send((infos[0], info))
    args = {"channel": channel, "update_info": info, "stable": True}
    DoubleIPCEngine.trainer_send_weights(iter(source), args)
    connection.recv()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_trainers_memory_is_let_go_of() -> None:
    """It would stay taken for as long as a worker has it open, and its successor needs it."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_trainer_that_dies, args=(there,), daemon=True)
    process.start()
    init_info, update_info = here.recv()
    worker = DoubleIPCEngine(config())
    worker._looks_every_s = 0.1
    worker.init_transfer_engine(worker.parse_init_info(init_info))
    received: list[str] = []
    worker.receive_weights(
        worker.parse_update_info(update_info),
        lambda weights: received.extend(n for n, _ in weights),
    )
    assert received == update_info["names"]
    device = doubles.double_device("aaaa-1")
    time.sleep(0.3)
    assert len(device.open_now) == 12  # it lives: kept for the next round
    here.send("die")
    until = time.monotonic() + 20
    while device.open_now and time.monotonic() < until:
        time.sleep(0.05)
    assert device.open_now == {}
    worker.shutdown()
    assert device.counts.opens == device.counts.closes == 12
    process.join()


def test_an_abort_frees_a_sender_that_waits_for_a_worker() -> None:
    """In milliseconds, not when some timeout of the transport's is over."""
    channel, _ = DoubleIPCEngine.trainer_open(plan(on(GPU_A)))
    model = doubles.double_device("aaaa-1").place(net())
    metadata = ModuleSource(model).metadata()
    info = {
        "names": [m.name for m in metadata],
        "dtype_names": ["float32"] * len(metadata),
        "shapes": [list(m.shape) for m in metadata],
    }
    errors: list[BaseException] = []

    def send() -> None:
        try:
            DoubleIPCEngine.trainer_send_weights(
                iter(ModuleSource(model)), {"channel": channel, "update_info": info, "stable": True}
            )
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()  # nobody reads
    DoubleIPCEngine.trainer_abort(channel)
    thread.join(1.0)
    assert not thread.is_alive()
    assert isinstance(errors[0], TransferError)
    DoubleIPCEngine.trainer_close(channel)
    DoubleIPCEngine.trainer_close(channel)
