"""NCCL's own C interface: the few calls that a broadcast needs.

Not torch's ProcessGroupNCCL: its watchdog ends the process over a peer that is gone, unless an
environment variable was set before the process made its first group, and it wants a store that
outlives the connect. Here a communicator is non-blocking from the start, so a member that never
comes, or dies, is left with `ncclCommAbort` at any moment and from any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rayxfer.engines.device import Lane
from rayxfer.errors import BackendUnavailable, TransferError, TransferTimeout

__all__ = ["Communicator", "NcclLibrary", "nccl_library"]

_ID_BYTES = 128
_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8 = 1
_PAUSE_S = 100e-6


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * _ID_BYTES),)


class _Config(ctypes.Structure):
    """ncclConfig_t as of NCCL 2.14: later ones take it, and set the rest to their defaults."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


def _loaded() -> ctypes.CDLL:
    """The library that torch has loaded (one name, one library); else the one of NVIDIA's wheel."""
    try:
        return ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        with contextlib.suppress(ImportError, OSError):
            found = importlib.util.find_spec("nvidia.nccl")
            for folder in (found and found.submodule_search_locations) or ():
                return ctypes.CDLL(os.path.join(folder, "lib", "libnccl.so.2"))
        raise BackendUnavailable(
            f"backend 'nccl': this torch brings no libnccl.so.2 ({error})", cause=error
        ) from error


class NcclLibrary:
    """libnccl, as torch has loaded it.

    Raises:
        BackendUnavailable: there is none, or one before 2.14.
    """

    def __init__(self) -> None:
        self._lib = _loaded()
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        signatures: dict[str, list[Any]] = {
            "ncclGetVersion": [ctypes.POINTER(integer)],
            "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
            "ncclCommInitRankConfig": [
                ctypes.POINTER(pointer),
                integer,
                _UniqueId,
                integer,
                ctypes.POINTER(_Config),
            ],
            "ncclCommGetAsyncError": [pointer, ctypes.POINTER(integer)],
            "ncclCommAbort": [pointer],
            "ncclBroadcast": [pointer, pointer, size, integer, integer, pointer, pointer],
        }
        try:
            for name, arguments in signatures.items():
                function = getattr(self._lib, name)
                function.argtypes, function.restype = arguments, integer
        except AttributeError as error:
            raise BackendUnavailable(
                f"backend 'nccl' needs NCCL 2.14 or newer: {error}", cause=error
            ) from error
        self._lib.ncclGetErrorString.argtypes = [integer]
        self._lib.ncclGetErrorString.restype = ctypes.c_char_p
        code = integer()
        self.check(self._lib.ncclGetVersion(ctypes.byref(code)), "ncclGetVersion")
        self.version = (code.value // 10000, code.value % 10000 // 100, code.value % 100)

    def check(self, result: int, what: str) -> None:
        """Raise TransferError unless the call went well or is under way."""
        if result not in (_SUCCESS, _IN_PROGRESS):
            text = self._lib.ncclGetErrorString(result)
            said = text.decode(errors="replace") if text else f"error {result}"
            raise TransferError(f"{what}: {said} (NCCL_DEBUG=WARN says more)", phase="update")

    def unique_id(self) -> bytes:
        """What the members of one communicator share: made once, by one of them."""
        out = _UniqueId()
        self.check(self._lib.ncclGetUniqueId(ctypes.byref(out)), "ncclGetUniqueId")
        return bytes(out.internal)

    def join(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        timeout_s: float,
        gave_up: Callable[[], bool],
    ) -> Communicator:
        """Join on the current device; blocks until all members have.

        Raises:
            TransferTimeout: not all came in time.
            TransferError: NCCL refused, or `gave_up()` turned true. Nothing is left open.
        """
        if len(unique_id) != _ID_BYTES:
            raise TransferError(
                f"an NCCL id has {_ID_BYTES} bytes, not {len(unique_id)}", phase="connect"
            )
        shared = _UniqueId()
        ctypes.memmove(ctypes.byref(shared), unique_id, _ID_BYTES)
        config = _Config(ctypes.sizeof(_Config), 0xCAFEBEEF, 21400, 0)
        comm = ctypes.c_void_p()
        result = self._lib.ncclCommInitRankConfig(
            ctypes.byref(comm), world_size, shared, rank, ctypes.byref(config)
        )
        self.check(result, "ncclCommInitRankConfig")
        made = Communicator(self, comm, self._lib)
        deadline = time.monotonic() + timeout_s
        try:
            while not made.idle():
                if gave_up():
                    raise TransferError("the connect was aborted", phase="connect")
                if time.monotonic() > deadline:
                    raise TransferTimeout(
                        f"not all {world_size} members came to the NCCL communicator within "
                        f"{timeout_s:.0f} s",
                        phase="connect",
                    )
                time.sleep(_PAUSE_S)
        except BaseException:
            made.abort()
            raise
        return made


class Communicator:
    """One member's end. `abort` may come from any thread; everything after it raises."""

    def __init__(self, library: NcclLibrary, comm: ctypes.c_void_p, lib: ctypes.CDLL) -> None:
        self._library, self._comm, self._lib = library, comm, lib
        self._lock = threading.Lock()
        self._gone = False

    def _guarded(self) -> None:
        if self._gone:
            raise TransferError("the NCCL communicator was aborted", phase="update")

    def idle(self) -> bool:
        """Whether the last call is through (its work may still be queued on the device).

        Raises:
            TransferError: the communicator has failed: a peer is lost, or it was aborted.
        """
        state = ctypes.c_int()
        with self._lock:
            self._guarded()
            result = self._lib.ncclCommGetAsyncError(self._comm, ctypes.byref(state))
        self._library.check(result, "ncclCommGetAsyncError")
        self._library.check(state.value, "NCCL lost a peer or failed")
        return state.value == _SUCCESS

    def broadcast(self, buffer: torch.Tensor, lane: Lane) -> None:
        """Queue a broadcast of `buffer` (flat uint8, on the device) from rank 0. `idle` must hold
        before the lane is marked."""
        with self._lock:
            self._guarded()
            result = self._lib.ncclBroadcast(
                buffer.data_ptr(),
                buffer.data_ptr(),
                buffer.numel(),
                _UINT8,
                0,
                self._comm,
                lane.pointer,
            )
        self._library.check(result, "ncclBroadcast")

    def abort(self) -> None:
        """Stop what runs on the device and release everything. Safe to call twice."""
        with self._lock:
            if self._gone:
                return
            self._gone = True
        self._lib.ncclCommAbort(self._comm)


@functools.cache
def nccl_library() -> NcclLibrary:
    """The library, loaded once.

    Raises:
        BackendUnavailable: as `NcclLibrary`.
    """
    return NcclLibrary()
