"""`gloo`: packed broadcast over TCP between CPU processes, on one host or many.

Gloo does not notice a peer that was killed or stopped before an operation's own timeout, and has no
abort. So waiting here is in short slices against an abort flag, and abort shuts down the group's
sockets, which makes every pending operation fail at once and keeps a stopped peer that wakes up
later from completing an old receive with new bytes.

Payloads travel unencrypted.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rayxfer.base import (
    LoadWeights,
    SessionPlan,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from rayxfer.engines.collective import (
    Group,
    Layouts,
    Staging,
    merged_init_info,
    receive_buckets,
    send_buckets,
)
from rayxfer.engines.rendezvous import Rendezvous, RendezvousStore
from rayxfer.errors import BackendUnavailable, ConfigError, StateError, TransferError
from rayxfer.topology import routable_address, same_host

__all__ = ["GlooEngine", "GlooInitInfo", "GlooUpdateInfo"]

_SLICE = timedelta(milliseconds=20)
_FOREVER = timedelta(days=1)  # operations end by abort, not by gloo's own clock
_MESH_TIMEOUT_S = 10.0
_LOOPBACK = "127.0.0.1"
_device_lock = threading.Lock()


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """How a worker joins the group.

    Attributes:
        master_address, master_port: the sender's rendezvous.
        rank_offset: transport rank of the first worker (the sender is rank 0).
        world_size: sender and workers.
        token: 32 hex digits; shown to the rendezvous before anything else.
        bucket_size_bytes: the sender's wire unit.
        loopback: all members share a host, so nothing listens on other interfaces.
        timeout_s: for the connect.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    token: str
    bucket_size_bytes: int
    loopback: bool
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """What one round carries: names, bare dtype names, shapes, in the order of the stream."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


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
            thread = threading.Thread(target=box.clear, name="rayxfer-gloo-close", daemon=True)
            _closing.add(thread)
            thread.start()


_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish_closing() -> None:
    """A process that ends inside a group's destructor aborts: give those a moment."""
    deadline = time.monotonic() + 2.0
    for thread in list(_closing):
        thread.join(max(0.0, deadline - time.monotonic()))


@dataclass
class _Channel:
    rendezvous: Rendezvous
    plan: SessionPlan
    staging: Staging
    layouts: Layouts
    group: GlooGroup | None = None
    closed: bool = False


class GlooEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Packed broadcast over torch's gloo. See the module's text."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    copies_before_next = True
    default_bucket_size_bytes = 8 << 20

    _group: GlooGroup | None = None
    _store: RendezvousStore | None = None
    _info: GlooInitInfo | None = None
    _staging: Staging | None = None
    _layouts: Layouts | None = None
    _gave_up = False

    @classmethod
    def check_available(cls) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise BackendUnavailable("gloo: this torch was built without torch.distributed's gloo")

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Join the group. Raises TransferError or TransferTimeout; then nothing is left open."""
        self._info = init_info
        host = _LOOPBACK if init_info.loopback else routable_address()
        self._check_aborted()
        self._store = RendezvousStore(
            (init_info.master_address, init_info.master_port), init_info.token, init_info.timeout_s
        )
        self._staging = Staging(torch.device("cpu"))
        self._layouts = Layouts(init_info.bucket_size_bytes)
        self._check_aborted()
        self._group = GlooGroup(
            self._store,
            init_info.rank_offset + self.parallel_config.rank,
            init_info.world_size,
            host,
            init_info.timeout_s,
        )

    def receive_weights(self, update_info: GlooUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive one round. Raises TransferError when a peer is lost or the round is aborted."""
        staging, layouts = self._staging, self._layouts
        if self._group is None or self._info is None or staging is None or layouts is None:
            raise StateError("gloo: receive_weights before init_transfer_engine")
        receive_buckets(
            self._group,
            staging,
            layouts.get(update_info),
            self._info.bucket_size_bytes,
            load_weights,
        )

    def _check_aborted(self) -> None:
        if self._gave_up:
            raise TransferError("the connect was aborted", phase="connect")

    def abort(self) -> None:
        self._gave_up = True
        if self._store is not None:
            self._store.close()
        if self._group is not None:
            self._group.abort()

    def shutdown(self) -> None:
        """Leave the group. Safe to call twice."""
        group, self._group = self._group, None
        store, self._store = self._store, None
        if group is not None:
            group.close()
        if store is not None:
            store.close()
        self._staging = self._layouts = None

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Broadcast one round to every worker of the channel."""
        channel: _Channel = trainer_args["channel"]
        if channel.group is None:
            raise StateError("gloo: trainer_send_weights before the channel was connected")
        send_buckets(
            channel.group,
            channel.staging,
            iterator,
            channel.layouts.get(trainer_args["update_info"]),
            channel.plan.bucket_size_bytes,
        )

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[_Channel, list[dict[str, Any]]]:
        loopback = all(same_host(plan.sender, worker) for worker in plan.workers)
        host = _LOOPBACK if loopback else plan.sender.address
        rendezvous = Rendezvous(host, plan.token)
        own = {
            "master_address": rendezvous.address[0],
            "master_port": rendezvous.address[1],
            "rank_offset": 1,
            "world_size": 1 + len(plan.workers),
            "token": plan.token,
            "bucket_size_bytes": plan.bucket_size_bytes,
            "loopback": loopback,
            "timeout_s": plan.deadline_s,
        }
        try:
            info = merged_init_info(own, plan.config.init_info)
        except ConfigError:
            rendezvous.close()
            raise
        channel = _Channel(
            rendezvous, plan, Staging(torch.device("cpu")), Layouts(plan.bucket_size_bytes)
        )
        return channel, [dict(info) for _ in plan.workers]

    @classmethod
    def trainer_connect(cls, channel: _Channel, timeout_s: float) -> None:
        store = RendezvousStore(channel.rendezvous, channel.plan.token, timeout_s)
        channel.group = GlooGroup(
            store, 0, 1 + len(channel.plan.workers), channel.rendezvous.address[0], timeout_s
        )
        if channel.closed:  # given up meanwhile: nobody else will close it
            channel.group.close()

    @classmethod
    def trainer_abort(cls, channel: _Channel) -> None:
        channel.rendezvous.close()
        if channel.group is not None:
            channel.group.abort()

    @classmethod
    def trainer_close(cls, channel: _Channel) -> None:
        channel.closed = True
        channel.layouts.clear()
        channel.rendezvous.close()
        if channel.group is not None:
            channel.group.close()


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
