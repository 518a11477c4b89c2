"""The real device: CUDA through torch, and through the driver where torch has no public call.

Memory handles go through the driver (`libcuda`) itself: torch's own sharing counts references in files
under /dev/shm, and hands out pickled reductions. Loaded by the GPU engines only, once they run.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rayxfer.engines.device import HANDLE_BYTES, Block, Counts, Device, Lane, Mark, Opened, Ready
from rayxfer.errors import BackendUnavailable, ConfigError, TransferError
from rayxfer.gpus import canonical_uuid
from rayxfer.packing import align

__all__ = ["CudaDevice", "cuda_device"]

_BUFFER_ID, _LEGACY_IPC_CAPABLE = 7, 10  # CU_POINTER_ATTRIBUTE_…
_LAZY_PEER_ACCESS = 1

_PAGE_BYTES = 2 << 20
"""What is smaller, the driver may cut from a page that it shares with other allocations. A handle then
opens the whole page (CUDA's guide advises to share multiples of 2 MiB only)."""


def cuda_device(uuid: str) -> CudaDevice:
    """This process's device of that UUID ("": the calling thread's current one). One object each.

    Raises:
        ConfigError: it is not among the visible ones, naming those.
    """
    seen = [
        canonical_uuid(str(torch.cuda.get_device_properties(i).uuid))
        for i in range(torch.cuda.device_count())
    ]
    uuid = uuid or seen[torch.cuda.current_device()]
    if uuid not in seen:
        mask = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise ConfigError(
            f"GPU {uuid} is not visible to this process: it sees {', '.join(seen)} "
            f"(CUDA_VISIBLE_DEVICES={mask!r})"
        )
    with _lock:
        if uuid not in _devices:
            _devices[uuid] = CudaDevice(uuid, seen.index(uuid))
        return _devices[uuid]


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_ubyte * HANDLE_BYTES),)


class _Raw:
    """Memory at an address, in the form from which torch makes a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class _Driver:
    """The calls of libcuda that we make; each in the device's primary context."""

    def __init__(self, ordinal: int) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise BackendUnavailable(f"CUDA's driver library: {error}", cause=error) from error
        address, out = ctypes.c_uint64, ctypes.c_void_p
        for name, arguments in {
            "cuMemGetAddressRange_v2": [out, out, address],
            "cuPointerGetAttribute": [out, ctypes.c_int, address],
            "cuIpcGetMemHandle": [out, address],
            "cuIpcOpenMemHandle_v2": [out, _Handle, ctypes.c_uint],
            "cuIpcCloseMemHandle": [address],
            "cuMemAlloc_v2": [out, ctypes.c_size_t],
            "cuMemFree_v2": [address],
            "cuDeviceGet": [out, ctypes.c_int],
            "cuDevicePrimaryCtxRetain": [out, ctypes.c_int],
            "cuCtxPushCurrent_v2": [ctypes.c_void_p],
            "cuCtxPopCurrent_v2": [out],
            "cuGetErrorName": [ctypes.c_int, out],
        }.items():
            function = getattr(self._lib, name)
            function.argtypes, function.restype = arguments, ctypes.c_int
        device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._check(self._lib.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        retained = self._lib.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), device)
        self._check(retained, "cuDevicePrimaryCtxRetain")

    def _check(self, result: int, what: str) -> None:
        if result:
            name = ctypes.c_char_p()
            self._lib.cuGetErrorName(result, ctypes.byref(name))
            said = name.value.decode() if name.value else f"error {result}"
            raise TransferError(f"{what}: {said}", phase="update")

    def call(self, name: str, *arguments: Any, what: str | None = None) -> None:
        """Raises TransferError with CUDA's own name of the error."""
        popped = ctypes.c_void_p()
        self._check(self._lib.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:
            result = getattr(self._lib, name)(*arguments)
        finally:
            self._lib.cuCtxPopCurrent_v2(ctypes.byref(popped))
        self._check(result, what or name)

    def range_of(self, address: int) -> tuple[int, int]:
        """Base address and length of the allocation that holds an address."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        return base.value, size.value

    def identities(self, addresses: Sequence[int]) -> list[int]:
        """Per address its allocation, unique over the life of the process; 0 for none."""
        out, popped = ctypes.c_uint64(), ctypes.c_void_p()
        found = []
        query = self._lib.cuPointerGetAttribute
        self._check(self._lib.cuCtxPushCurrent_v2(self._context), "cuCtxPushCurrent")
        try:  # one context for all: there are hundreds of them in every round
            for address in addresses:
                failed = query(ctypes.byref(out), _BUFFER_ID, address)
                found.append(0 if failed else out.value)
        finally:
            self._lib.cuCtxPopCurrent_v2(ctypes.byref(popped))
        return found

    def exportable(self, address: int) -> bool:
        """Whether CUDA IPC takes it (what the driver maps piece by piece, it does not)."""
        out = ctypes.c_int()
        self.call("cuPointerGetAttribute", ctypes.byref(out), _LEGACY_IPC_CAPABLE, address)
        return bool(out.value & 0xFF)  # a bool is written


class _CudaMark(Mark):
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def done(self) -> bool:
        try:
            return bool(self._event.query())  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise TransferError(f"the GPU failed: {error}", phase="update", cause=error) from error


class _CudaLane(Lane):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def pointer(self) -> int:
        return int(self._stream.cuda_stream)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def lead(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return _CudaMark(event)


class _CudaReady(Ready):
    """Shared where the system can: then the host waits for nothing."""

    def __init__(self, device: torch.device, handle: bytes | None = None) -> None:
        self._device = device
        self._handle = b""
        if handle is not None:
            self._handle = handle
            self._event = torch.cuda.Event.from_ipc_handle(device, handle)  # type: ignore[no-untyped-call]
            return
        self._event = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        with contextlib.suppress(RuntimeError):  # some systems cannot: then `record` waits
            self._handle = bytes(self._event.ipc_handle())

    @property
    def handle(self) -> bytes:
        return self._handle

    def record(self) -> bool:
        stream = torch.cuda.current_stream(self._device)
        # Two processes take turns on a GPU, so an event costs two changes between them. A trainer that
        # sends what lies there has nothing queued.
        if stream.query():
            return False
        if not self._handle:
            stream.synchronize()
            return False
        self._event.record(stream)
        return True

    def wait(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))


_lock = threading.Lock()
_devices: dict[str, CudaDevice] = {}
_own_blocks: dict[bytes, int] = {}
"""Handles that this process exported → address: CUDA refuses to open them here."""
_own_events: weakref.WeakValueDictionary[bytes, _CudaReady] = weakref.WeakValueDictionary()
_mapped: dict[bytes, tuple[int, int]] = {}
"""Handles that this process has open → (address, how often)."""


class CudaDevice(Device):
    """One visible GPU. Get it from `cuda_device`."""

    def __init__(self, uuid: str, ordinal: int) -> None:
        self.uuid = uuid
        self.torch_device = torch.device("cuda", ordinal)
        self.counts = Counts()
        torch.empty(1, device=self.torch_device)  # torch makes the primary context
        self._driver = _Driver(ordinal)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        with torch.cuda.device(self.torch_device):
            yield

    def lane(self) -> Lane:
        return _CudaLane(self.torch_device)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return _CudaMark(event)

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    # ---- memory between processes --------------------------------------------------------------

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        if tensor.device != self.torch_device or not tensor.numel():
            return None
        address = tensor.data_ptr()
        try:
            if not self._driver.exportable(address):
                return None
            base, num_bytes = self._driver.range_of(address)
            if num_bytes < _PAGE_BYTES:  # torch's segments never are, unless it caches nothing
                return None
            if address + tensor.numel() * tensor.element_size() > base + num_bytes:
                return None
            return Block(base, num_bytes, self._driver.identities([base])[0])
        except TransferError:  # none of the driver's own allocations: it has to be staged
            return None

    def alive(self, blocks: Sequence[Block]) -> list[bool]:
        identities = self._driver.identities([block.base for block in blocks])
        return [found == b.identity for found, b in zip(identities, blocks, strict=True)]

    def export(self, block: Block) -> bytes:
        handle = _Handle()
        self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), block.base)
        self.counts.exports += 1
        out = bytes(handle.bytes)
        with _lock:
            _own_blocks[out] = block.base
        return out

    def open(self, handle: bytes, num_bytes: int) -> Opened:
        raw = _Handle((ctypes.c_ubyte * HANDLE_BYTES)(*handle))
        with _lock:
            address = _own_blocks.get(handle)
            if address is None:
                address, users = _mapped.get(handle, (0, 0))
                if not users:
                    out = ctypes.c_uint64()
                    self._driver.call(
                        "cuIpcOpenMemHandle_v2",
                        ctypes.byref(out),
                        raw,
                        _LAZY_PEER_ACCESS,
                        what="cuIpcOpenMemHandle (is the exporting process alive, on this host?)",
                    )
                    address = out.value
                _mapped[handle] = (address, users + 1)
            self.counts.opens += 1
        opened = None
        try:
            base, length = self._driver.range_of(address)
            if base + length < address + num_bytes:
                raise TransferError(
                    f"a block of {num_bytes} bytes was announced, {base + length - address} are there",
                    phase="update",
                )
            memory = self._view(address, num_bytes)
            opened = Opened(handle, memory)
        finally:
            if opened is None:
                self._unmap(handle)
        return opened

    def _view(self, address: int, num_bytes: int) -> torch.Tensor:
        with self.use():
            memory: torch.Tensor = torch.as_tensor(
                _Raw(address, num_bytes), device=self.torch_device
            )
        if memory.data_ptr() != address:
            raise TransferError("torch copied what it was to look at", phase="update")
        return memory

    def close(self, opened: Opened) -> None:
        self._unmap(opened.handle)

    def _unmap(self, handle: bytes) -> None:
        with _lock:
            self.counts.closes += 1
            if handle not in _mapped:
                return  # our own block
            address, users = _mapped.pop(handle)
            if users > 1:
                _mapped[handle] = (address, users - 1)
            else:
                self._driver.call("cuIpcCloseMemHandle", address)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        out = ctypes.c_uint64()
        self._driver.call(
            "cuMemAlloc_v2",
            ctypes.byref(out),
            align(max(1, num_bytes), _PAGE_BYTES),  # pages of its own
            what=f"no room for a staging buffer of {num_bytes} bytes",
        )
        self.counts.allocations += 1
        return self._view(out.value, num_bytes)

    def free(self, memory: torch.Tensor) -> None:
        address = memory.data_ptr()
        self._driver.call("cuMemFree_v2", address)
        self.counts.frees += 1
        with _lock:
            for handle in [h for h, base in _own_blocks.items() if base == address]:
                del _own_blocks[handle]

    def ready(self) -> Ready:
        made = _CudaReady(self.torch_device)
        if made.handle:
            with _lock:
                _own_events[made.handle] = made
        return made

    def open_ready(self, handle: bytes) -> Ready:
        with _lock:
            own = _own_events.get(handle)
        if own is not None:
            return own
        try:
            return _CudaReady(self.torch_device, handle)
        except RuntimeError as error:
            raise TransferError(
                f"the sender's event cannot be opened here: {error}", phase="connect", cause=error
            ) from error
