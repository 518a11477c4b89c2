"""How `cuda.py` and `nccl_library.py` call the driver and NCCL: against stubs in C, with host memory.

That arguments arrive as they should, in which order, and what is made of answers. Not that CUDA and
NCCL do what the stubs do.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayxfer import BackendUnavailable, TransferError, WeightTransferEngineFactory
from rayxfer.engines import cuda, nccl_library
from rayxfer.engines.device import HANDLE_BYTES, Counts, Device, Lane, Mark, Ready
from rayxfer.testing import check_engine
from rayxfer.testing.doubles import DoubleDevice, DoubleIPCEngine
from rayxfer.testing.tensors import relocate
from rayxfer.topology import Facts

ORDINAL = 3
STREAM = 0x5E


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stubs")
    out = tmp_path_factory.mktemp("stubs")
    found = {}
    for name in ("libcuda", "libnccl"):
        source = Path(__file__).parent / "stubs" / f"{name}_stub.c"
        found[name] = out / f"{name}.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(found[name]), str(source)], check=True
        )
    return found


@pytest.fixture
def load(stubs: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes `ctypes.CDLL` give fresh copies of the stubs."""
    real = ctypes.CDLL
    loaded: dict[str, ctypes.CDLL] = {}

    def fake(name: str, *args: Any, **kwargs: Any) -> ctypes.CDLL:
        stem = str(name).partition(".")[0]
        if stem not in stubs:
            return real(name, *args, **kwargs)
        if stem not in loaded:
            copy = tmp_path / f"{stem}.so"
            shutil.copy(stubs[stem], copy)  # its own statics
            loaded[stem] = real(str(copy))
        return loaded[stem]

    monkeypatch.setattr(ctypes, "CDLL", fake)
    return lambda stem: loaded[stem]


class StubbedDevice(cuda.CudaDevice):
    """`CudaDevice` over the stub; only what torch itself does on a GPU is left to the double."""

    def __init__(self) -> None:
        self.uuid = "stub"
        self.torch_device = torch.device("cpu")
        self.counts = Counts()
        self._driver = cuda._Driver(ORDINAL)
        self._double = DoubleDevice("stub")

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def lane(self) -> Lane:
        return self._double.lane()

    def mark(self) -> Mark:
        return self._double.mark()

    def settle(self) -> None:
        return None

    def ready(self) -> Ready:
        return self._double.ready()

    def open_ready(self, handle: bytes) -> Ready:
        return self._double.open_ready(handle)

    def _view(self, address: int, num_bytes: int) -> torch.Tensor:
        memory = (ctypes.c_ubyte * num_bytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)


@pytest.fixture
def device(load: Any) -> Iterator[StubbedDevice]:
    cuda._own_blocks.clear()
    cuda._mapped.clear()
    yield StubbedDevice()
    assert load("libcuda").stub_depth() == 0  # every context that was pushed was popped
    cuda._own_blocks.clear()
    cuda._mapped.clear()


def test_memory_is_found_exported_and_given_back(device: StubbedDevice) -> None:
    memory = device.allocate(1000)
    memory.copy_(torch.arange(1000).to(torch.uint8))
    block = device.block_of(memory[100:200])
    assert block is not None
    page = 2 << 20  # never a part of a page that other allocations are on
    assert (block.base, block.num_bytes) == (memory.data_ptr(), page)
    assert device.lives(block)
    handle = device.export(block)
    assert len(handle) == HANDLE_BYTES
    assert device.block_of(torch.zeros(4, dtype=torch.uint8)) is None
    opened = device.open(handle, 1000)
    assert torch.equal(opened.memory, memory)
    device.close(opened)
    with pytest.raises(TransferError, match=f"{page + 1} bytes was announced, {page} are"):
        device.open(handle, page + 1)
    assert device.counts.opens == device.counts.closes == 2
    device.free(memory)
    assert not device.lives(block)
    other = device.allocate(1000)
    assert device.block_of(other) != block
    device.free(other)


def test_a_handle_of_another_process_is_mapped_once_and_unmapped_with_its_last_user(
    device: StubbedDevice, load: Any
) -> None:
    memory = device.allocate(64)
    block = device.block_of(memory)
    assert block is not None
    handle = device.export(block)
    cuda._own_blocks.clear()  # as if another process had exported it
    first, second = device.open(handle, 64), device.open(handle, 64)
    library = load("libcuda")
    assert library.stub_opens() == 1
    assert torch.equal(first.memory, memory)
    device.close(first)
    assert library.stub_closes() == 0
    device.close(second)
    assert library.stub_closes() == 1
    with pytest.raises(TransferError, match="CUDA_ERROR_INVALID_VALUE"):
        device.open(bytes(HANDLE_BYTES), 64)
    assert device.counts.opens == device.counts.closes


def test_what_cuda_ipc_cannot_export_is_not_taken(device: StubbedDevice) -> None:
    for num_bytes, taken in (((4 << 20) + 4242, False), (4 << 20, True), (64 << 10, False)):
        out = ctypes.c_uint64()
        device._driver.call("cuMemAlloc_v2", ctypes.byref(out), num_bytes)
        found = device.block_of(device._view(out.value, num_bytes))
        assert (found is not None) == taken


def test_errors_have_cudas_names(device: StubbedDevice) -> None:
    with pytest.raises(TransferError, match=r"no room.*CUDA_ERROR_OUT_OF_MEMORY"):
        device.allocate(1 << 50)
    with pytest.raises(TransferError, match="cuMemFree_v2: CUDA_ERROR_INVALID_VALUE"):
        device._driver.call("cuMemFree_v2", 12345)


def test_calls_work_in_every_thread(device: StubbedDevice) -> None:
    """A new thread has no context: each call brings its own."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            device.free(device.allocate(10))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


class StubbedEngine(DoubleIPCEngine):
    """`ipc` over the stub."""

    device: StubbedDevice

    @classmethod
    def _device_of(cls, uuid: str) -> Device:
        return cls.device

    @classmethod
    def _uuid_of(cls, facts: Facts) -> str:
        return "stub"


def test_the_kit_over_the_stubbed_driver(
    device: StubbedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StubbedEngine, "device", device, raising=False)

    def hold(flat: torch.Tensor) -> torch.Tensor:
        memory = device.allocate(max(1, flat.numel()))[: flat.numel()]
        return memory.copy_(flat)

    WeightTransferEngineFactory.register_engine("stubbed", StubbedEngine)
    try:
        place: Callable[[Any], Any] = lambda model: relocate(model, hold)  # noqa: E731
        assert not check_engine("stubbed", place=place, only="every_tensor").failed
        assert not check_engine("stubbed", place=place, only="abort").failed
    finally:
        del WeightTransferEngineFactory._direct["stubbed"]
    assert device.counts.opens == device.counts.closes > 0


# --- NCCL -----------------------------------------------------------------------------------


class StubLane(Lane):
    pointer = STREAM  # type: ignore[assignment]

    def follow(self) -> None: ...
    def lead(self) -> None: ...
    def mark(self) -> Mark: ...  # type: ignore[empty-body]


def test_a_communicator_is_joined_used_and_aborted(load: Any) -> None:
    library = nccl_library.NcclLibrary()
    stub = load("libnccl")
    stub.stub_sent.restype = ctypes.c_size_t
    assert library.version == (2, 27, 3)
    comm = library.join(library.unique_id(), 0, 1, 5.0, lambda: False)
    assert comm.idle()
    comm.broadcast(torch.zeros(77, dtype=torch.uint8), StubLane())
    assert not comm.idle()
    assert not comm.idle()
    assert comm.idle()
    assert stub.stub_sent() == 77
    comm.abort()
    comm.abort()
    assert stub.stub_aborts() == 1
    for use in (comm.idle, lambda: comm.broadcast(torch.zeros(1, dtype=torch.uint8), StubLane())):
        with pytest.raises(TransferError, match="aborted"):
            use()


def test_a_connect_is_left_in_time_and_leaves_nothing(load: Any) -> None:
    library = nccl_library.NcclLibrary()
    start = time.monotonic()
    with pytest.raises(TransferError, match="not all 2 members"):
        library.join(library.unique_id(), 1, 2, 0.2, lambda: False)
    with pytest.raises(TransferError, match="aborted"):
        library.join(library.unique_id(), 1, 2, 60.0, lambda: time.monotonic() - start > 0.4)
    assert time.monotonic() - start < 5
    assert load("libnccl").stub_aborts() == 2
    with pytest.raises(TransferError, match="128 bytes, not 3"):
        library.join(b"abc", 0, 1, 1.0, lambda: False)


def test_a_peer_that_is_lost_is_said_in_nccls_words(load: Any) -> None:
    library = nccl_library.NcclLibrary()
    comm = library.join(library.unique_id(), 0, 1, 5.0, lambda: False)
    load("libnccl").stub_break(1)
    with pytest.raises(TransferError, match="remote process exited"):
        comm.idle()
    comm.abort()


def test_a_library_that_torch_has_not_loaded_is_taken_from_nvidias_wheel(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stubbed = ctypes.CDLL
    asked: list[str] = []

    def only_by_path(name: str) -> ctypes.CDLL:
        asked.append(name)
        if "/" not in name:
            raise OSError(f"{name}: cannot open shared object file")
        return stubbed("libnccl.so.2")

    (tmp_path / "nvidia" / "nccl").mkdir(parents=True)
    for name in [name for name in sys.modules if name.partition(".")[0] == "nvidia"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(ctypes, "CDLL", only_by_path)
    assert nccl_library.NcclLibrary().version == (2, 27, 3)
    assert asked == ["libnccl.so.2", str(tmp_path / "nvidia" / "nccl" / "lib" / "libnccl.so.2")]


def test_without_the_library_it_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", nothing)
    with pytest.raises(BackendUnavailable, match=r"libnccl\.so\.2"):
        nccl_library.NcclLibrary()
    with pytest.raises(BackendUnavailable, match=r"libcuda\.so\.1"):
        cuda._Driver(0)
