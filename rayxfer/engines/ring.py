"""A ring of slots in one memory file: one writer, some readers, no name in any file system.

The writer publishes frames by a counter, each with a word that says what it is; each reader
acknowledges by a counter of its own, and sets it to the highest value when it leaves. Waiting is a
futex on the counter itself (a plain sleep where there is none), always in slices against an abort flag.
"""

from __future__ import annotations

import ctypes
import hmac
import os
import platform
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rayxfer.engines.stores import Stores
from rayxfer.errors import BackendUnavailable, ConfigError, TransferError
from rayxfer.memfile import MAGIC, PAGE_BYTES, create, map_file, nonce_bytes, open_other

__all__ = ["RingReader", "RingWriter"]

_LINE = 64  # one cache line per counter: no false sharing
_HEAD = 2 * _LINE  # after magic + nonce, and the geometry
_SLICE_S = 0.05
_SPINS = 20
_DESCRIPTION = ("pid", "fd", "inode", "file_bytes", "nonce")
_CLOSED = 56  # in the header
_HOLDS, _READY, _GOING, _COPIED = 8, 16, 24, 32
"""Where in a reader's line the words are that say what it holds, for what it is ready, what it is about to
hold, and how much it has copied of what lies elsewhere."""
_BESIDE_S = 5e-5
_LEFT = (1 << 64) - 1
"""A reader that has left is done with every frame there will ever be."""

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

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._map = map_file(fd, num_bytes, write=True)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self.bytes.data_ptr()
        self._words = memoryview(self._map).cast("Q")

    def read(self, offset: int) -> int:
        value = self._words[offset // 8]
        _fence()
        return value

    def put(self, offset: int, value: int) -> None:
        """Without waking anybody; seen at the latest with the next `write`."""
        self._words[offset // 8] = value

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


def _kind(readers: int, slot: int) -> int:
    return _tail(readers) + _LINE * slot


def _data_start(readers: int, slots: int) -> int:
    return -(-_kind(readers, slots) // PAGE_BYTES) * PAGE_BYTES


class RingWriter:
    """The sender's end. `describe()` tells readers how to open it.

    Attributes:
        stores: which stores are the better ones to fill its slots with.
    """

    def __init__(self, *, slot_bytes: int, slots: int, readers: int, nonce: str) -> None:
        self.slot_bytes, self._slots, self._readers = slot_bytes, slots, readers
        self.num_slots = slots
        self._start = _data_start(readers, slots)
        size = self._start + slots * slot_bytes
        self._fd = create("rayxfer-ring", size)
        memory = _Memory(self._fd, size)
        header = MAGIC + bytes.fromhex(nonce) + struct.pack("<QQQ", slot_bytes, slots, readers)
        memory.bytes[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        self._mapped: _Memory | None = memory
        self._nonce = nonce
        self.num_readers = readers
        self.stores = Stores(slot_bytes)
        self._head = 0
        self._gate: int | None = None
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
        self._await_readers(0, lambda seen: seen >= need)
        self.check()
        start = self._start + ((self._head + ahead) % self._slots) * self.slot_bytes
        return self._memory.bytes[start : start + self.slot_bytes]

    def gate(self, token: int) -> None:
        """The next `publish` shows nothing to anybody until every reader is `ready` for this."""
        self._gate = token

    def _await_readers(self, word: int, done: Callable[[int], bool]) -> None:
        """Until every reader's word at this place of its line is `done`."""
        for reader in range(self._readers):
            at = _tail(reader) + word
            while not done(seen := self._memory.read(at)):
                self.lagging = reader
                self.check()
                self._memory.wait_change(at, seen, _SLICE_S)
        self.lagging = None

    def publish(self, kind: int = 0) -> None:
        """The slot is complete: let readers have it. `kind`: what it holds, as both sides agree."""
        token = self._gate
        if token is not None:
            self._await_readers(_READY, lambda seen: seen == token)
            self.check()
            self._gate = None
        self._memory.put(_kind(self._readers, self._head % self._slots), kind)
        self._head += 1
        self._memory.write(_HEAD, self._head)

    def drain(self) -> None:
        """Return when every reader is done with every frame."""
        self._await_readers(0, lambda seen: seen >= self._head)

    def copied(self) -> int:
        """Bytes that the reader who is furthest has copied of what frames only told of, since the ring
        exists."""
        return max(self._memory.read(_tail(r) + _COPIED) for r in range(self._readers))

    def beside(self, num_bytes: int) -> None:
        """Return once a reader has `copied` so much, or one is done with every frame."""
        while True:
            self.check()
            if self.copied() >= num_bytes:
                break
            tails = [self._memory.read(_tail(r)) for r in range(self._readers)]
            if max(tails) >= self._head:
                break
            self.lagging = tails.index(min(tails))
            time.sleep(_BESIDE_S)  # not woken up: that would cost the reader
        self.lagging = None

    def held(self) -> list[tuple[int, int]]:
        """What each reader said last that it holds, and that it was about to; 0: nothing yet. Once this is
        closed, nobody can say anything else."""
        tails = [_tail(reader) for reader in range(self._readers)]
        return [(self._memory.read(at + _HOLDS), self._memory.read(at + _GOING)) for at in tails]

    @property
    def turn(self) -> int:
        """The place of the slot that `slot` gives next: 0 … slots - 1."""
        return self._head % self._slots

    def staying(self) -> list[int]:
        """The readers that have not left."""
        return [r for r in range(self._readers) if self._memory.read(_tail(r)) != _LEFT]

    def check(self) -> None:
        """Raises TransferError: it was aborted."""
        if self._aborted.is_set():
            raise TransferError("the channel was aborted", phase="update")

    def abort(self) -> None:
        self._aborted.set()
        memory = self._mapped
        if memory is not None:
            for reader in range(self._readers):
                memory.wake(_tail(reader))
                memory.wake(_tail(reader) + _READY)

    def close(self) -> None:
        """Give up the descriptor; the memory goes with its last user. Safe to call twice."""
        self.abort()
        if self._mapped is not None:
            self._mapped.write(_CLOSED, 1)
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

    @classmethod
    def of(cls, info: Any, reader: int) -> RingReader:
        """From an init info that has what `RingWriter.describe` said among its attributes."""
        return cls(reader=reader, **{key: getattr(info, key) for key in _DESCRIPTION})

    def __init__(
        self, *, reader: int, pid: int, fd: int, inode: int, file_bytes: int, nonce: str
    ) -> None:
        if isinstance(reader, bool) or not isinstance(reader, int) or reader < 0:
            raise ConfigError(f"shm: reader {reader!r} is no natural number")
        expected = MAGIC + nonce_bytes(nonce)
        own = open_other(pid=pid, fd=fd, inode=inode, file_bytes=file_bytes, write=True)
        try:
            self._memory = _Memory(own, file_bytes)
        finally:
            os.close(own)
        header = bytes(self._memory.bytes[:48].numpy())
        if not hmac.compare_digest(header[:24], expected):
            raise BackendUnavailable("shm: the memory file belongs to another session")
        self.slot_bytes, self._slots, readers = struct.unpack("<QQQ", header[24:48])
        if reader >= readers:
            raise ConfigError(f"shm: reader {reader} of {readers}")
        self._start = _data_start(readers, self._slots)
        self._readers, self._reader = readers, reader
        self._tail = 0
        self._copied, self._copying = 0, threading.Lock()
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

    @property
    def kind(self) -> int:
        """What the next frame is, once `slot` has returned it."""
        return self._memory.read(_kind(self._readers, self._tail % self._slots))

    def going(self, word: int) -> None:
        """This reader is about to hold what the word stands for. Either the writer knows that from now on,
        however late it looks, or it has closed the ring before.

        Raises:
            TransferError: it has.
        """
        self._memory.write(_tail(self._reader) + _GOING, word)
        if self._memory.read(_CLOSED):
            raise TransferError(
                "the sender has closed this channel meanwhile, and may write over what this worker was to "
                "go over to",
                phase="commit",
            )

    def hold(self, word: int) -> None:
        """It holds that, and nothing else of the writer's."""
        self._memory.write(_tail(self._reader) + _HOLDS, word)

    def ready(self, token: int) -> None:
        """This reader is ready for what the writer gates with this token."""
        self._memory.write(_tail(self._reader) + _READY, token)

    def copied(self, num_bytes: int) -> None:
        """So much more was copied of what a frame told of. From any thread."""
        with self._copying:
            self._copied += num_bytes
            self._memory.put(_tail(self._reader) + _COPIED, self._copied)

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
