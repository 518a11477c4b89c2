"""A ring of slots in one memory file: one writer, some readers, no name in any file system.

The file is a sealed memfd that readers open through /proc/<pid>/fd/<n>, so nothing can be left in
/dev/shm and the kernel frees it with its last user, also after SIGKILL. The writer publishes frames
by a counter; each reader acknowledges by its own, and sets it to the highest value when it leaves.
Waiting is a futex on the counter itself (a plain sleep where there is none), always in slices against
an abort flag.

Mappings are never closed, only dropped: `mmap.close()` under a live tensor would be a segfault.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import platform
import struct
import threading
import time

import torch

from rayxfer.errors import BackendUnavailable, ConfigError, TransferError

__all__ = ["RingReader", "RingWriter"]

_MAGIC = b"rayxfer1"
_LINE = 64  # one cache line per counter: no false sharing
_HEAD = 2 * _LINE  # after magic + nonce, and the geometry
_PAGE = 4096
_SLICE_S = 0.05
_SPINS = 20
_LEFT = (1 << 64) - 1
"""A reader that has left is done with every frame there will ever be."""

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
_barrier = threading.Lock()


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


def _fence() -> None:
    """Order memory operations around it (a lock has acquire and release semantics everywhere)."""
    with _barrier:
        pass


class _Memory:
    """The mapping, and its 64-bit counters."""

    def __init__(self, fd: int, num_bytes: int, *, populate: int) -> None:
        self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.suppress(OSError):  # before Linux 5.14: the first round pays
            self._map.madvise(populate)  # pay page faults now, not in a round
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self.bytes.data_ptr()
        self._words = memoryview(self._map).cast("Q")

    def read(self, offset: int) -> int:
        value = self._words[offset // 8]
        _fence()
        return value

    def write(self, offset: int, value: int) -> None:
        _fence()
        self._words[offset // 8] = value
        if _FUTEX is not None:
            _libc.syscall(
                _FUTEX, ctypes.c_void_p(self._address + offset), 1, 1 << 30, None, None, 0
            )

    def wait_change(self, offset: int, seen: int, timeout_s: float) -> None:
        """Return soon after the counter differs from `seen`, or after `timeout_s`."""
        for _ in range(_SPINS):
            if self._words[offset // 8] != seen:
                return
        if _FUTEX is None:
            time.sleep(min(timeout_s, 1e-4))
            return
        pause = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
        _libc.syscall(
            _FUTEX,
            ctypes.c_void_p(self._address + offset),
            0,  # FUTEX_WAIT, between processes
            ctypes.c_uint32(seen & 0xFFFFFFFF),
            ctypes.byref(pause),
            None,
            0,
        )

    def wake(self, offset: int) -> None:
        if _FUTEX is not None:
            _libc.syscall(
                _FUTEX, ctypes.c_void_p(self._address + offset), 1, 1 << 30, None, None, 0
            )


def _tail(reader: int) -> int:
    return _HEAD + _LINE * (1 + reader)


def _data_start(readers: int) -> int:
    return -(-_tail(readers) // _PAGE) * _PAGE


class RingWriter:
    """The sender's end. `describe()` tells readers how to open it."""

    def __init__(self, *, slot_bytes: int, slots: int, readers: int, nonce: str) -> None:
        self.slot_bytes, self._slots, self._readers = slot_bytes, slots, readers
        self._start = _data_start(readers)
        size = self._start + slots * slot_bytes
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable("shm needs Linux: this system has no memfd_create")
        self._fd = os.memfd_create("rayxfer-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, size)
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _SEALS)
            # posix_fallocate fails with an error where memory is short; a touched page would be a
            # bus error
            os.posix_fallocate(self._fd, 0, size)
            memory = _Memory(self._fd, size, populate=_MADV_POPULATE_WRITE)
        except (OSError, OverflowError) as error:
            os.close(self._fd)
            raise TransferError(
                f"no room for a memory file of {size} bytes: {error}", phase="connect", cause=error
            ) from error
        header = _MAGIC + bytes.fromhex(nonce) + struct.pack("<QQQ", slot_bytes, slots, readers)
        memory.bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._mapped: _Memory | None = memory
        self._nonce = nonce
        self._head = 0
        self._aborted = threading.Event()
        self.lagging: int | None = None

    @property
    def _memory(self) -> _Memory:
        memory = self._mapped
        if memory is None:
            raise TransferError("the shm channel was closed", phase="update")
        return memory

    def describe(self) -> dict[str, int | str]:
        """Plain data for `RingReader`."""
        stat = os.fstat(self._fd)
        return {
            "pid": os.getpid(),
            "fd": self._fd,
            "inode": stat.st_ino,
            "file_bytes": stat.st_size,
            "nonce": self._nonce,
        }

    def slot(self, ahead: int = 0) -> torch.Tensor:
        """The next slot to fill (flat uint8), once every reader is done with it; or the one `ahead` of
        it, while those before are not published yet."""
        need = self._head + 1 + ahead - self._slots
        for reader in range(self._readers):
            while (seen := self._memory.read(_tail(reader))) < need:
                self.lagging = reader
                self._check()
                self._memory.wait_change(_tail(reader), seen, _SLICE_S)
        self._check()
        self.lagging = None
        start = self._start + ((self._head + ahead) % self._slots) * self.slot_bytes
        return self._memory.bytes[start : start + self.slot_bytes]

    def publish(self) -> None:
        """The slot is complete: let readers have it."""
        self._head += 1
        self._memory.write(_HEAD, self._head)

    def drain(self) -> None:
        """Return when every reader is done with every frame."""
        for reader in range(self._readers):
            while (seen := self._memory.read(_tail(reader))) < self._head:
                self.lagging = reader
                self._check()
                self._memory.wait_change(_tail(reader), seen, _SLICE_S)
        self.lagging = None

    @property
    def turn(self) -> int:
        """The place of the slot that `slot` gives next: 0 … slots - 1."""
        return self._head % self._slots

    def staying(self) -> list[int]:
        """The readers that have not left."""
        return [r for r in range(self._readers) if self._memory.read(_tail(r)) != _LEFT]

    def _check(self) -> None:
        if self._aborted.is_set():
            raise TransferError("the channel was aborted", phase="update")

    def abort(self) -> None:
        self._aborted.set()
        memory = self._mapped
        if memory is not None:
            for reader in range(self._readers):
                memory.wake(_tail(reader))

    def close(self) -> None:
        """Give up the descriptor; the memory goes with its last user. Safe to call twice."""
        self.abort()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def release(self) -> None:
        """After `close`: drop the mapping too. Nothing else may be asked of it then.

        Not left to the garbage collector: the error of a failed connect, which a report may keep for long,
        reaches this object through its traceback.
        """
        self._mapped = None


class RingReader:
    """A worker's end.

    Raises:
        BackendUnavailable: the file cannot be opened from here (another host or PID namespace,
            another user, hardened /proc), or what was opened is not the sender's ring.
        ConfigError: the description is none.
    """

    def __init__(
        self, *, reader: int, pid: int, fd: int, inode: int, file_bytes: int, nonce: str
    ) -> None:
        for value in (reader, pid, fd, inode, file_bytes):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ConfigError(f"shm: {value!r} in the ring's description is no natural number")
        try:
            expected = _MAGIC + bytes.fromhex(nonce)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"shm: the ring's nonce is no hex string: {error}") from error
        path = f"/proc/{pid}/fd/{fd}"
        try:
            own = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise BackendUnavailable(
                f"shm: cannot open the sender's memory file ({error.strerror}): another host, PID "
                "namespace or user",
                cause=error,
            ) from error
        try:
            stat = os.fstat(own)
            try:
                seals = fcntl.fcntl(own, _F_GET_SEALS)
            except OSError:
                seals = 0
            found = (stat.st_ino, stat.st_size, stat.st_uid, seals & _SEALS)
            if found != (inode, file_bytes, os.getuid(), _SEALS):
                raise BackendUnavailable(
                    f"shm: /proc/<sender>/fd/{fd} is not the sender's memory file (inode, size, owner "
                    f"and seals are {found}): process ids differ between the two"
                )
            self._memory = _Memory(own, file_bytes, populate=_MADV_POPULATE_READ)
        finally:
            os.close(own)
        header = bytes(self._memory.bytes[:48].numpy())
        if not hmac.compare_digest(header[:24], expected):
            raise BackendUnavailable("shm: the memory file belongs to another session")
        self.slot_bytes, self._slots, readers = struct.unpack("<QQQ", header[24:48])
        if reader >= readers:
            raise ConfigError(f"shm: reader {reader} of {readers}")
        self._start = _data_start(readers)
        self._reader = reader
        self._tail = 0
        self._aborted = threading.Event()

    def published(self, ahead: int = 0) -> bool:
        """Whether `slot(ahead)` would return at once."""
        return self._memory.read(_HEAD) > self._tail + ahead

    def slot(self, ahead: int = 0) -> torch.Tensor:
        """The next frame's slot (flat uint8), once it was published; or the one `ahead` of it, while
        those before are not released yet. Follow up with `release()`, one per frame, in order."""
        while (seen := self._memory.read(_HEAD)) <= self._tail + ahead:
            if self._aborted.is_set():
                raise TransferError("the channel was aborted", phase="update")
            self._memory.wait_change(_HEAD, seen, _SLICE_S)
        start = self._start + ((self._tail + ahead) % self._slots) * self.slot_bytes
        return self._memory.bytes[start : start + self.slot_bytes]

    def release(self) -> None:
        """Done with the slot: the writer may fill it again."""
        self._tail += 1
        self._memory.write(_tail(self._reader), self._tail)

    def leave(self) -> None:
        """Touch nothing of the writer's any more, and say so. The last call."""
        self._memory.write(_tail(self._reader), _LEFT)

    def abort(self) -> None:
        self._aborted.set()
        self._memory.wake(_HEAD)
