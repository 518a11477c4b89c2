"""Memory files: sealed memfds that another process of this host opens as /proc/<pid>/fd/<n>.

They have no name in any file system, so nothing can be left behind, and the kernel frees one with its
last user, also after SIGKILL. Whoever opens one makes sure that it is the very file that was meant:
process ids recycle, and differ between PID namespaces.

Mappings are never closed, only dropped: `mmap.close()` under a live tensor would be a segfault.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import hmac
import mmap
import os
import secrets
import threading
import warnings
import weakref
from typing import Any

import torch

from rayxfer.daemons import daemon, ending
from rayxfer.errors import BackendUnavailable, ConfigError, TransferError

__all__ = [
    "ForeignFile",
    "MemoryFile",
    "create",
    "file_size",
    "find",
    "map_file",
    "map_for_any_thread",
    "open_other",
    "populate",
]

PAGE_BYTES = 4096
MAGIC = b"rayxfer1"

_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004  # SEAL, SHRINK, GROW
_LATER_S = 0.25
_LOOK_PAGES = 1 << 12
"""So many at a time: each of the threads that look has an arena of malloc's, which keeps what it took."""
_MADV_HUGEPAGE, _MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 14, 22, 23


def check_system() -> None:
    """Raise BackendUnavailable where there are no memory files."""
    if not hasattr(os, "memfd_create"):
        raise BackendUnavailable("shm needs Linux: this system has no memfd_create")


def create(name: str, num_bytes: int) -> int:
    """The descriptor of a new sealed file with room for `num_bytes`.

    Raises:
        TransferError: there is no room. BackendUnavailable: no memory files here.
    """
    check_system()
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
        _fill(fd, num_bytes)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise TransferError(
            f"no room for a memory file of {num_bytes} bytes: {error}", phase="connect", cause=error
        ) from error
    return fd


def _fill(fd: int, num_bytes: int) -> None:
    """Make its pages, as an error where memory is short: a page that is touched would be a bus error."""
    with contextlib.suppress(OSError, ValueError):
        # Through a mapping, since only that can ask for huge pages. It makes what it can.
        mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with contextlib.closing(mapped):
            mapped.madvise(_MADV_HUGEPAGE)
            mapped.madvise(_MADV_POPULATE_WRITE)  # since Linux 5.14
    os.posix_fallocate(fd, 0, num_bytes)


def open_other(*, pid: int, fd: int, inode: int, file_bytes: int, write: bool) -> int:
    """A descriptor of our own of another process's memory file.

    Raises:
        BackendUnavailable: it cannot be opened from here (another host or PID namespace, another
            user, hardened /proc), or it is another file.
        ConfigError: the description is none.
    """
    for value in (pid, fd, inode, file_bytes):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"shm: {value!r} in a file's description is no natural number")
    mode = os.O_RDWR if write else os.O_RDONLY
    try:
        own = os.open(f"/proc/{pid}/fd/{fd}", mode | os.O_CLOEXEC | os.O_NONBLOCK)
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
    except BaseException:
        os.close(own)
        raise
    return own


class _Map(mmap.mmap):
    """A mapping that owns a descriptor: both go with the last tensor over it."""

    fd: int | None = None
    about: dict[str, int | str] | None = None
    num_bytes = 0

    def __del__(self, close: Any = os.close) -> None:
        if self.fd is not None:
            close(self.fd)


def map_file(fd: int, num_bytes: int, *, write: bool, private: bool = False) -> _Map:
    """Map a whole file; its pages are there when this returns.

    write: others see what is written; with `private` they do not, and pages that were not written
    to show what others write.
    """
    flags = mmap.MAP_PRIVATE if private else mmap.MAP_SHARED
    access = mmap.PROT_READ | (mmap.PROT_WRITE if write else 0)
    mapped = _Map(fd, num_bytes, flags, access)
    with contextlib.suppress(OSError):
        mapped.madvise(_MADV_HUGEPAGE)
    with contextlib.suppress(OSError):  # before Linux 5.14: the first round pays
        mapped.madvise(_MADV_POPULATE_WRITE if write and not private else _MADV_POPULATE_READ)
    return mapped


_files: dict[int, weakref.ref[_Map]] = {}
_starts: list[int] = []
_registry = threading.Lock()


def _register(mapped: _Map, address: int) -> None:
    with _registry:
        for start in [start for start, found in _files.items() if found() is None]:
            _forget(start)
        _files[address] = weakref.ref(mapped)
        bisect.insort(_starts, address)


def _forget(start: int) -> None:
    del _files[start]
    _starts.remove(start)


def map_for_any_thread(fd: int, num_bytes: int) -> torch.Tensor:
    """A whole file of this process, shared and writable (flat uint8). Not by Python's mmap: the last to let
    go of a buffer may be a thread of gloo's, without an interpreter."""
    return torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=num_bytes, dtype=torch.uint8)


def populate(memory: torch.Tensor) -> None:
    """Have the pages of a shared mapping that begins here, whose file has them, in this process as well:
    else the first write to each costs a fault."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), _MADV_POPULATE_WRITE
        )


def find(address: int, num_bytes: int) -> tuple[dict[str, int | str], int] | None:
    """The `MemoryFile` of this process in which these bytes lie, if any: its description, and their
    offset in `bytes`."""
    at = bisect.bisect_right(_starts, address) - 1
    if at < 0:
        return None
    start = _starts[at]
    found = _files.get(start)
    mapped = None if found is None else found()
    if mapped is None or mapped.about is None:
        return None
    if address < start or address + num_bytes > start + mapped.num_bytes:
        return None
    return mapped.about, address - start


def file_size(about: dict[str, int | str]) -> int:
    """How many bytes there are for tensors in a file of this description."""
    return int(about["file_bytes"]) - PAGE_BYTES


class MemoryFile:
    """Bytes of this process that other processes of this host can map.

    Args:
        num_bytes: at least 1.

    Attributes:
        bytes: flat uint8 [num_bytes] on the CPU. The memory lives as long as any view of it does, also
            without this object.
        address: of the first byte.
        about: plain data, the arguments of `ForeignFile`.

    Raises:
        TransferError: there is no room. BackendUnavailable: not on Linux.
    """

    def __init__(self, num_bytes: int, *, name: str = "rayxfer-weights") -> None:
        fd = create(name, PAGE_BYTES + num_bytes)
        mapped = map_file(fd, PAGE_BYTES + num_bytes, write=True)
        mapped.fd = fd
        nonce = secrets.token_hex(16)
        mapped[: len(MAGIC) + 16] = MAGIC + bytes.fromhex(nonce)
        self.bytes = torch.frombuffer(mapped, dtype=torch.uint8)[PAGE_BYTES:]
        self.address = self.bytes.data_ptr()
        self.num_bytes = mapped.num_bytes = num_bytes
        stat = os.fstat(fd)
        self.about = mapped.about = {
            "pid": os.getpid(),
            "fd": fd,
            "inode": stat.st_ino,
            "file_bytes": stat.st_size,
            "nonce": nonce,
        }
        _register(mapped, self.address)


class ForeignFile:
    """Another process's `MemoryFile`, to be read here.

    Args:
        private: writable for this process, which keeps its changes to itself; else writing to it
            ends the process.

    Attributes:
        bytes: flat uint8, as in the owner.

    Raises:
        BackendUnavailable: it cannot be opened, or is another file. ConfigError: no description.
    """

    _cleaning: threading.Thread | None = None

    def __init__(
        self,
        *,
        pid: int,
        fd: int,
        inode: int,
        file_bytes: int,
        nonce: str,
        private: bool = False,
    ) -> None:
        expected = MAGIC + nonce_bytes(nonce)
        own = open_other(pid=pid, fd=fd, inode=inode, file_bytes=file_bytes, write=False)
        try:
            mapped = map_file(own, file_bytes, write=private, private=private)
        finally:
            os.close(own)
        if not hmac.compare_digest(mapped[: len(expected)], expected):
            raise BackendUnavailable("shm: the memory file belongs to another session")
        self._mapped = mapped
        self._now = threading.Event()
        self.bytes = readable(mapped)[PAGE_BYTES:]
        self.address = self.bytes.data_ptr()

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this mapping."""
        return 0 <= tensor.data_ptr() - self.address < len(self._mapped) - PAGE_BYTES

    def forget_writes(self) -> None:
        """Let go of this process's own changes to a private file, soon: its pages show the owner's bytes
        again. Nobody may read it until `settle` has returned.

        To find out whether there are any takes 13 ms for 1 GiB, so not in the hurry of a commit.
        """
        self._now.clear()
        self._cleaning = daemon(self._forget, "rayxfer-forget", self.hurry)

    def hurry(self) -> None:
        """It will be wanted again: do it now."""
        self._now.set()

    def settle(self) -> None:
        """Return when `forget_writes` is done."""
        cleaning, self._cleaning = self._cleaning, None
        if cleaning is not None:
            self._now.set()
            cleaning.join()  # no deadline: system calls on memory of our own

    def _forget(self) -> None:
        self._now.wait(_LATER_S)
        if ending():
            return
        size = len(self._mapped)
        if _own_pages(self.address - PAGE_BYTES, size) is not False:
            self._mapped.madvise(mmap.MADV_DONTNEED)
            with contextlib.suppress(OSError):
                self._mapped.madvise(_MADV_POPULATE_READ)


def _own_pages(address: int, num_bytes: int) -> bool | None:
    """Whether a private mapping has pages that this process wrote to; None: not known."""
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(address // PAGE_BYTES * 8)
            left = -(-num_bytes // PAGE_BYTES)
            while left:
                part = file.read(8 * min(left, _LOOK_PAGES))
                if not part:
                    return None
                entries = torch.frombuffer(bytearray(part), dtype=torch.int64)
                left -= len(entries)
                # there (or swapped out), and not of the file: bit 61 says that
                if bool(((entries & (1 << 61)) == 0).logical_and_(entries != 0).any()):
                    return True
    except OSError:
        return None
    return False


def readable(mapped: mmap.mmap) -> torch.Tensor:
    """A flat uint8 tensor over a mapping, writable or not, without torch's warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.frombuffer(mapped, dtype=torch.uint8)


def nonce_bytes(nonce: object) -> bytes:
    """Raises ConfigError for what is no hex string."""
    try:
        return bytes.fromhex(nonce)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"shm: the file's nonce is no hex string: {error}") from error
