"""Doubles of a GPU and of `ipc` on it, so that all but the device's own calls runs without one.

These are doubles: a "GPU" is a set of memory files in this process, and a handle names such a file. They
show that every export is opened and closed once, that memory is held as long as it is read, that
devices are matched by UUID and that an abort frees everyone. They show nothing about CUDA. That of
NCCL is in `double_nccl.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from rayxfer.engines.device import HANDLE_BYTES, Block, Counts, Device, Lane, Mark, Opened, Ready
from rayxfer.engines.ipc import IPCEngine
from rayxfer.errors import ConfigError, TransferError
from rayxfer.gpus import uuid_of
from rayxfer.testing.tensors import relocate
from rayxfer.topology import Facts

__all__ = ["DoubleDevice", "DoubleIPCEngine", "double_device"]

_HANDLE = struct.Struct("<8sIIQQQ")
_MAGIC = b"rxdouble"
_count = itertools.count(1)


class _Mark(Mark):
    """Passed after a delay: copies on a device are not done when they were queued."""

    def __init__(self, delay_s: float) -> None:
        self._at = time.monotonic() + delay_s

    def done(self) -> bool:
        return time.monotonic() >= self._at


class _Lane(Lane):
    def __init__(self, device: DoubleDevice) -> None:
        self._device = device
        self.pending: list[Callable[[], bool]] = []

    @property
    def pointer(self) -> int:
        return 0

    def follow(self) -> None:
        self._device.log.append("follow")

    def lead(self) -> None:
        self._device.log.append("lead")

    def mark(self) -> Mark:
        self._device.log.append("mark")
        return _LaneMark(list(self.pending))


class _LaneMark(Mark):
    def __init__(self, pending: list[Callable[[], bool]]) -> None:
        self._pending = pending

    def done(self) -> bool:
        return all(done() for done in self._pending)


class _Ready(Ready):
    def __init__(self, device: DoubleDevice, handle: bytes) -> None:
        self._device, self._handle = device, handle

    @property
    def handle(self) -> bytes:
        return self._handle if self._device.shares_events else b""

    def record(self) -> bool:
        self._device.log.append("record")
        return self._device.busy

    def wait(self) -> None:
        self._device.log.append("wait")


class _Memory:
    """One memory file and this process's mapping of it."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("rayxfer-double", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, num_bytes)
        self.bytes = _mapped(self.fd, num_bytes)
        self.block = Block(self.bytes.data_ptr(), num_bytes, next(_count))


def _mapped(fd: int, num_bytes: int) -> torch.Tensor:
    mapping = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    return torch.frombuffer(mapping, dtype=torch.uint8)  # never closed under it, only dropped


class DoubleDevice(Device):
    """A "GPU" of memory files. Get it from `double_device`.

    Attributes:
        delay_s: how long after they were queued the device's copies are done.
        busy: False: as if the current stream had nothing left to do when an event is recorded.
        shares_events: False: as on systems where events cannot be shared.
        exportable: False: as under an allocator whose memory cannot be exported (`allocate`'s can).
        open_now: handles that are open, as often as they are.
        log: order of calls about streams and events.
    """

    def __init__(self, uuid: str) -> None:
        self.uuid = uuid
        self.torch_device = torch.device("cpu")
        self.counts = Counts()
        self.delay_s = 0.0
        self.busy = True
        self.shares_events = True
        self.exportable = True
        self.open_now: dict[bytes, int] = {}
        self.log: list[str] = []
        self._memories: dict[int, _Memory] = {}
        self._ours: set[int] = set()
        self._lock = threading.Lock()

    # ---- putting tensors on it -----------------------------------------------------------------

    def place(self, module: torch.nn.Module) -> torch.nn.Module:
        """Move the module's parameters and buffers onto this device, each storage into a block."""
        relocate(module, self.hold)
        return module

    def hold(self, flat: torch.Tensor) -> torch.Tensor:
        """A copy of flat bytes in a block of its own."""
        memory = self._new(max(1, flat.numel()))
        memory.bytes[: flat.numel()].copy_(flat)
        return memory.bytes[: flat.numel()]

    def _new(self, num_bytes: int) -> _Memory:
        memory = _Memory(num_bytes)
        with self._lock:
            self._memories[memory.block.base] = memory
        return memory

    def drop(self, block: Block) -> None:
        """As if the trainer's allocator gave the block back."""
        with self._lock:
            os.close(self._memories.pop(block.base).fd)

    # ---- order ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        yield

    def lane(self) -> Lane:
        self.log.append("lane")
        return _Lane(self)

    def mark(self) -> Mark:
        return _Mark(self.delay_s)

    def settle(self) -> None:
        time.sleep(self.delay_s)

    # ---- memory between processes --------------------------------------------------------------

    def block_of(self, tensor: torch.Tensor) -> Block | None:
        address, num_bytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        with self._lock:
            for memory in self._memories.values():
                block = memory.block
                inside = (
                    block.base <= address and address + num_bytes <= block.base + block.num_bytes
                )
                if inside and (self.exportable or block.base in self._ours):
                    return block
        return None

    def alive(self, blocks: Sequence[Block]) -> list[bool]:
        with self._lock:
            found = [self._memories.get(block.base) for block in blocks]
        return [m is not None and m.block == b for m, b in zip(found, blocks, strict=True)]

    def export(self, block: Block) -> bytes:
        with self._lock:
            fd = self._memories[block.base].fd
        self.counts.exports += 1
        inode = os.fstat(fd).st_ino
        packed = _HANDLE.pack(_MAGIC, os.getpid(), fd, inode, block.num_bytes, block.base)
        return packed.ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes, num_bytes: int) -> Opened:
        magic, pid, fd, inode, size, base = _HANDLE.unpack(handle[: _HANDLE.size])
        if magic != _MAGIC or size < num_bytes:
            raise TransferError("the double's handle is none, or too short", phase="update")
        if pid == os.getpid():
            with self._lock:
                memory = self._memories[base].bytes
        else:
            try:
                own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise TransferError(
                    f"the double's handle cannot be opened: {error}", phase="update", cause=error
                ) from error
            try:
                if os.fstat(own).st_ino != inode:
                    raise TransferError("the double's handle is of another file", phase="update")
                memory = _mapped(own, size)
            finally:
                os.close(own)
        with self._lock:
            self.counts.opens += 1
            self.open_now[handle] = self.open_now.get(handle, 0) + 1
        return Opened(handle, memory[:num_bytes])

    def close(self, opened: Opened) -> None:
        with self._lock:
            left = self.open_now.pop(opened.handle) - 1  # KeyError: closed twice
            if left:
                self.open_now[opened.handle] = left
            self.counts.closes += 1

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = self._new(num_bytes)
        self.counts.allocations += 1
        self._ours.add(memory.block.base)
        return memory.bytes

    def free(self, memory: torch.Tensor) -> None:
        block = self.block_of(memory)
        assert block is not None, "freed twice"
        self.drop(block)
        self._ours.discard(block.base)
        self.counts.frees += 1

    def ready(self) -> Ready:
        return _Ready(self, struct.pack("<Q", next(_count)).ljust(HANDLE_BYTES, b"\0"))

    def open_ready(self, handle: bytes) -> Ready:
        return _Ready(self, handle)


_devices: dict[str, DoubleDevice] = {}
visible: list[str] | None = None
"""UUIDs that this process "sees"; None: any."""


def double_device(uuid: str) -> DoubleDevice:
    """This process's double of that UUID ("": "double-0").

    Raises:
        ConfigError: it is not among `visible`.
    """
    uuid = uuid or "double-0"
    if visible is not None and uuid not in visible:
        raise ConfigError(
            f"GPU {uuid} is not visible to this process: it sees {', '.join(visible)}"
        )
    return _devices.setdefault(uuid, DoubleDevice(uuid))


class DoubleIPCEngine(IPCEngine):
    """`ipc` over doubles. Facts that name no GPU mean "double-0"."""

    bad_setting: str | None = None

    @classmethod
    def check_available(cls) -> None:
        return None

    @classmethod
    def _device_of(cls, uuid: str) -> Device:
        return double_device(uuid)

    @classmethod
    def _uuid_of(cls, facts: Facts) -> str:
        return uuid_of(facts.device) or "double-0"

    @classmethod
    def _bad_setting(cls) -> str | None:
        return cls.bad_setting
