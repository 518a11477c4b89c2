"""`gloo`: over TCP from process to process, on one host or many, each host once.

How the bytes go is in `routes.py` and `line.py`: neighbours of the line are groups of two, and who
follows a leader on its host reads its memory file. A follower that cannot open that file joins the
line instead, right behind the leader.

Gloo does not notice a peer that was killed or stopped before an operation's own timeout, and has no
abort. So waiting here is in short slices against an abort flag, and abort shuts down the group's
sockets, which makes every pending operation fail at once and keeps a stopped peer that wakes up
later from completing an old receive with new bytes.

Payloads travel unencrypted.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rayxfer.base import LoadWeights, SessionPlan
from rayxfer.daemons import daemon
from rayxfer.engines.broadcast import BroadcastEngine, BroadcastInitInfo, Member
from rayxfer.engines.collective import IN_FLIGHT, Group, Layouts, Staging
from rayxfer.engines.host_copy import HostCopy, receive_version
from rayxfer.engines.line import PARTS_IN_FLIGHT, SLOTS, Line, receive_line, send_line
from rayxfer.engines.rendezvous import RendezvousStore
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.engines.routes import Route, plan_routes
from rayxfer.errors import BackendUnavailable, ConfigError, TransferError
from rayxfer.packing import ALIGNMENT_BYTES, Layout, align
from rayxfer.topology import Facts

__all__ = ["GlooEngine", "GlooInitInfo"]

_SLICE = timedelta(milliseconds=20)
_FOREVER = timedelta(days=1)  # operations end by abort, not by gloo's own clock
_MESH_TIMEOUT_S = 10.0
_SETTLE_S = 2.0
_LEAST_SLOT_BYTES = 64 << 10
_LONGEST_PART_BYTES = 8 << 20
_LONGEST_REASON = 400
_device_lock = threading.Lock()


class GlooGroup(Group):
    """A gloo process group beside whatever groups the process already has."""

    def __init__(self, store: Any, rank: int, world_size: int, host: str, timeout_s: float) -> None:
        self.device = torch.device("cpu")
        self._aborted = threading.Event()
        self._ports: set[int] = set()
        self._shut: set[int] = set()
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        with _device_lock:
            before = _listening_ports()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            self._ports |= _listening_ports() - before
        # for connecting alone: addresses are exchanged through the store, which has its own deadline
        options._timeout = timedelta(seconds=max(min(timeout_s, _MESH_TIMEOUT_S), 0.1))
        options._threads = PARTS_IN_FLIGHT  # an operation that waits holds one
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

    def settle(self) -> bool:
        """Until gloo has closed the shut sockets: it first reads what is still in them. Milliseconds, and
        bounded in any case. (An operation that was cut off in its middle never completes.)"""
        deadline = time.monotonic() + _SETTLE_S
        while self._shut & _inodes():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.002)
        return True

    def abort(self) -> None:
        self._aborted.set()
        self._shut |= _shut_sockets(self._ports)

    def close(self) -> None:
        self._aborted.set()
        group, self._group = self._group, None
        if group is not None:
            # Dropping a group with a stuck operation blocks, so that is left to a daemon thread.
            box = [group]
            del group
            daemon(box.clear, "rayxfer-gloo-close")


@dataclass
class GlooInitInfo(BroadcastInitInfo):
    """How a worker joins, and its place.

    Attributes:
        route: `Route`, as a dict.
        part_bytes: what is longer travels in parts of this size; also the slot of a ring.
        version_bytes: of the weights that the workers of a host are to use as one copy; 0: none.
        followers: facts about those of `route`, where there is such a copy.
    """

    route: dict[str, Any] | None = None
    part_bytes: int = _LONGEST_PART_BYTES
    version_bytes: int = 0
    followers: list[dict[str, Any]] = field(default_factory=list)

    def place(self) -> Route:
        """Raises ConfigError: `route` is none."""
        try:
            found = Route(**(self.route or {}))
            return Route(int(found.next), int(found.leader), tuple(map(int, found.followers)))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"gloo: {self.route!r} is no route: {error}") from error


class GlooEngine(BroadcastEngine):
    """Along a line of hosts, over torch's gloo. See the module's text."""

    init_info_cls = GlooInitInfo
    default_bucket_size_bytes = 4 << 20
    buffers = 2 * IN_FLIGHT

    @classmethod
    def _layouts_for(cls, bucket_size_bytes: int) -> Layouts:
        # From half a unit on, a tensor goes from where it lies to its place: no copy at either end is worth
        # more than fewer messages.
        unit = cls._unit_bytes(bucket_size_bytes)
        return Layouts(unit, unit // 2)

    @staticmethod
    def _unit_bytes(bucket_size_bytes: int) -> int:
        # Half a bucket, so that twice as many are in flight: gloo sends nothing before the receiver has
        # said where to, and a member that passes it on keeps it until it is out again.
        return max(1, bucket_size_bytes // 2)

    @classmethod
    def check_available(cls) -> None:
        if not (dist.is_available() and dist.is_gloo_available()):
            raise BackendUnavailable("gloo: this torch was built without torch.distributed's gloo")

    # ---- coming together ------------------------------------------------------------------------

    @classmethod
    def _places(cls, plan: SessionPlan) -> list[dict[str, Any]]:
        _, routes = plan_routes(plan.sender, plan.workers)
        part_bytes = _part_bytes(cls._unit_bytes(plan.bucket_size_bytes), routes)
        places: list[dict[str, Any]] = [
            {
                "route": {"next": r.next, "leader": r.leader, "followers": list(r.followers)},
                "part_bytes": part_bytes,
            }
            for r in routes
        ]
        if plan.config.load_mode == "mapped":
            version_bytes = cls._layouts_for(plan.bucket_size_bytes).file_bytes(plan.metadata)
            for route, place in zip(routes, places, strict=True):
                place["version_bytes"] = version_bytes
                place["followers"] = [plan.workers[r - 1].to_wire() for r in route.followers]
        return places

    @classmethod
    def _make_group(cls, member: Member) -> Line:
        plan, info = member.plan, member.init_info
        line = Line(_LONGEST_PART_BYTES)
        try:
            if plan is not None:
                first, routes = plan_routes(plan.sender, plan.workers)
                line.part_bytes = _part_bytes(cls._unit_bytes(plan.bucket_size_bytes), routes)
                line.after = _neighbours(member, first, 0)
            else:
                assert isinstance(info, GlooInitInfo)
                line.part_bytes = info.part_bytes
                _join(line, member, info)
        except BaseException:
            line.close()
            raise
        return line

    @classmethod
    def reached(cls, channel: Any, names: Sequence[str]) -> list[str]:
        plan: SessionPlan = channel.plan
        out = []
        for rank, route in enumerate(plan_routes(plan.sender, plan.workers)[1], 1):
            if not route.leader:
                out.append("")
                continue
            answer = channel.rendezvous.get(f"opened/{rank}", 0.0) or b""
            leader = names[route.leader - 1]
            why = answer.decode(errors="replace")
            out.append(f"not through {leader}: {why}" if why else f"through {leader}")
        return out

    @classmethod
    def provers(cls, channel: Any) -> list[int]:
        plan: SessionPlan = channel.plan
        _, routes = plan_routes(plan.sender, plan.workers)
        return [(route.leader or rank) - 1 for rank, route in enumerate(routes, 1)]

    @classmethod
    def upstream(cls, channel: Any) -> list[int]:
        plan: SessionPlan = channel.plan
        _, routes = plan_routes(plan.sender, plan.workers)
        before = {route.next: rank - 1 for rank, route in enumerate(routes, 1) if not route.leader}
        return [
            route.leader - 1 if route.leader else before.get(rank, -1)
            for rank, route in enumerate(routes, 1)
        ]

    # ---- one round ------------------------------------------------------------------------------

    def _receive(self, group: Line, staging: Staging, layout: Layout, load: LoadWeights) -> None:
        if group.copy is not None and getattr(load, "keeps", False) and layout.file_bytes:
            receive_version(group, group.copy, layout, load)
        else:
            receive_line(group, staging, layout, load)

    @classmethod
    def _send(
        cls,
        group: Line,
        staging: Staging,
        iterator: Iterator[tuple[str, torch.Tensor]],
        layout: Layout,
        plan: SessionPlan,
        *,
        stable: bool,
    ) -> None:
        send_line(group, staging, iterator, layout, stable=stable)


def _part_bytes(unit_bytes: int, routes: Sequence[Route]) -> int:
    """The longest that travels in one piece: a unit at least, and a slot where there are rings."""
    slot = align(max(unit_bytes, _LEAST_SLOT_BYTES), ALIGNMENT_BYTES)
    rings = any(route.followers for route in routes)
    return slot if rings else max(slot, _LONGEST_PART_BYTES)


def _neighbours(member: Member, into: int, end: int) -> GlooGroup:
    """The group of two that leads into worker `into`; `end`: 1 if this is that worker."""
    store = dist.PrefixStore(f"into/{into}", member.store)  # type: ignore[attr-defined]
    return GlooGroup(store, end, 2, member.host, member.timeout_s)


def _join(line: Line, member: Member, info: GlooInitInfo) -> None:
    """A worker takes its place."""
    kept = member.kept
    place, store, rank = info.place(), member.store, member.rank
    following = place.next
    if place.leader:
        why = _follow(line, store, place.leader, rank)
        store.set(f"opened/{rank}", why)
        if not why:
            if kept is not None:
                kept.pop("versions", None)  # of a time when it was not led
            return
        behind = _ranks(store.get(f"behind/{place.leader}"))
        following = next(iter(behind[behind.index(rank) + 1 :]), following)
    elif place.followers:
        behind = _lead(line, store, place.followers, rank, info)
        following = next(iter(behind), following)
    if info.version_bytes and kept is not None:
        followers = [Facts.from_wire(one) for one in info.followers]
        line.copy = HostCopy(kept, info.version_bytes, followers if line.ring is not None else ())
    # Neighbours join by twos, not one after the other along the whole line.
    steps = ("before", "after") if rank % 2 else ("after", "before")
    for step in steps:
        if step == "before":
            line.before = _neighbours(member, rank, 1)
        elif following:
            line.after = _neighbours(member, following, 0)


def _ranks(value: bytes) -> list[int]:
    return [int(rank) for rank in json.loads(bytes(value))]


def _follow(line: Line, store: RendezvousStore, leader: int, rank: int) -> str:
    """Open the leader's ring; returns why that cannot be done, or "" ."""
    about = json.loads(bytes(store.get(f"ring/{leader}")))
    if "why" in about:
        return str(about["why"])[:_LONGEST_REASON]
    try:
        line.follow(RingReader(reader=about["readers"].index(rank), **about["ring"]))
    except BackendUnavailable as error:
        return error.message[:_LONGEST_REASON]
    return ""


def _lead(
    line: Line, store: RendezvousStore, followers: Sequence[int], rank: int, info: GlooInitInfo
) -> list[int]:
    """Make a ring for the followers; returns those that cannot open it."""
    about: dict[str, Any]
    try:
        ring = RingWriter(
            slot_bytes=info.part_bytes, slots=SLOTS, readers=len(followers), nonce=info.token
        )
    except BackendUnavailable as error:
        about = {"why": error.message}
    else:
        line.lead(ring)
        about = {"ring": ring.describe(), "readers": list(followers)}
    store.set(f"ring/{rank}", json.dumps(about))
    behind = [one for one in followers if bytes(store.get(f"opened/{one}"))]
    store.set(f"behind/{rank}", json.dumps(behind))
    if line.ring is not None:
        if len(behind) == len(followers):
            line.unlead()
        for reader, one in enumerate(followers):
            if one in behind and line.ring is not None:  # nothing is to wait for it
                RingReader(reader=reader, **about["ring"]).leave()
    return behind


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


def _shut_sockets(ports: set[int]) -> set[int]:
    """Shut the connections of a group, known by its members' listening ports; returns their inodes.
    Never the listening socket itself: gloo terminates the process over that."""
    shut = set()
    for sock in _sockets():
        try:
            if _listening(sock):
                continue
            ends = {int(sock.getsockname()[1]), int(sock.getpeername()[1])}
            if ends & ports:
                sock.shutdown(socket.SHUT_RDWR)
                shut.add(os.fstat(sock.fileno()).st_ino)
        except OSError:
            continue  # not connected any more
    return shut


def _inodes() -> set[int]:
    """Of every TCP socket of this process."""
    return {os.fstat(sock.fileno()).st_ino for sock in _sockets()}
