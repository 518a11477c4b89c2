"""`gloo`: packed broadcast over TCP between CPU processes, on one host or many.

Gloo does not notice a peer that was killed or stopped before an operation's own timeout, and has no
abort. So waiting here is in short slices against an abort flag, and abort shuts down the group's
sockets, which makes every pending operation fail at once and keeps a stopped peer that wakes up
later from completing an old receive with new bytes.

Payloads travel unencrypted.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rayxfer.engines.broadcast import BroadcastEngine, Member
from rayxfer.engines.closing import close_later
from rayxfer.engines.collective import Group
from rayxfer.engines.rendezvous import RendezvousStore
from rayxfer.errors import BackendUnavailable, TransferError

__all__ = ["GlooEngine"]

_SLICE = timedelta(milliseconds=20)
_FOREVER = timedelta(days=1)  # operations end by abort, not by gloo's own clock
_MESH_TIMEOUT_S = 10.0
_device_lock = threading.Lock()


class GlooGroup(Group):
    """A gloo process group beside whatever groups the process already has."""

    def __init__(
        self, store: RendezvousStore, rank: int, world_size: int, host: str, timeout_s: float
    ) -> None:
        self.device = torch.device("cpu")
        self._aborted = threading.Event()
        self._ports: set[int] = set()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        with _device_lock:
            before = _listening_ports()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._ports |= _listening_ports() - before
        # for connecting alone: addresses are exchanged through the store, which has its own deadline
        options._timeout = timedelta(seconds=max(min(timeout_s, _MESH_TIMEOUT_S), 0.1))
        options._threads = 2
        store.set(f"ports/{rank}", ",".join(map(str, self._ports)))
        self._group: Any = dist.ProcessGroupGloo(store, rank, world_size, options)
        for other in range(world_size):
            text = bytes(store.get(f"ports/{other}")).decode()
            self._ports |= {int(port) for port in text.split(",") if port}
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._options.timeout = _FOREVER

    def start(self, buffer: torch.Tensor) -> Any:
        if self._aborted.is_set() or self._group is None:
            raise TransferError("the gloo group was aborted", phase="update")
        return self._group.broadcast([buffer], self._options)

    def wait(self, work: Any) -> None:
        while not self._aborted.is_set():
            done = work.is_completed()  # asked first: it may complete just as the slice ends
            try:
                work.wait(_SLICE)
                return
            except RuntimeError as error:
                if done:
                    raise TransferError(
                        f"gloo lost a peer: {error}", phase="update", cause=error
                    ) from error
        raise TransferError("the gloo group was aborted", phase="update")

    def abort(self) -> None:
        self._aborted.set()
        _shut_sockets(self._ports)

    def close(self) -> None:
        self._aborted.set()
        group, self._group = self._group, None
        if group is not None:
            # Dropping a group with a stuck operation blocks, so that is left to a daemon thread.
            box = [group]
            del group
            close_later(box.clear, "rayxfer-gloo-close")


class GlooEngine(BroadcastEngine):
    """Packed broadcast over torch's gloo. See the module's text."""

    default_bucket_size_bytes = 8 << 20

    @classmethod
    def check_available(cls) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise BackendUnavailable("gloo: this torch was built without torch.distributed's gloo")

    @classmethod
    def _make_group(cls, member: Member) -> GlooGroup:
        return GlooGroup(
            member.store, member.rank, member.world_size, member.host, member.timeout_s
        )


def _sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, as duplicates to be closed by the caller."""
    for entry in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                continue
            sock = socket.socket(fileno=os.dup(int(entry)))
        except OSError:
            continue  # closed meanwhile
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _listening(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _listening_ports() -> set[int]:
    return {int(sock.getsockname()[1]) for sock in _sockets() if _listening(sock)}


def _shut_sockets(ports: set[int]) -> None:
    """Shut the connections of a group, known by its members' listening ports. Never the listening
    socket itself: gloo terminates the process over that."""
    for sock in _sockets():
        try:
            if _listening(sock):
                continue
            ends = {int(sock.getsockname()[1]), int(sock.getpeername()[1])}
            if ends & ports:
                sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # not connected any more
