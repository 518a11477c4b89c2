"""How the members of one broadcast channel come together: what `gloo` and `nccl` have in common.

The sender opens a rendezvous and is rank 0; the workers follow from `rank_offset` on. Each connect
makes a group of its own, beside whatever groups the process has, so a broken one is closed and made
anew. A subclass says what a group is (`_make_group`) and what it cannot do (`_check_plan`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from rayxfer.base import (
    LoadWeights,
    SessionPlan,
    WeightTransferEngine,
    WeightTransferInitInfo,
)
from rayxfer.engines.collective import (
    IN_FLIGHT,
    Group,
    Layouts,
    Staging,
    TensorsUpdateInfo,
    merged_init_info,
    receive_buckets,
    send_buckets,
)
from rayxfer.engines.rendezvous import Rendezvous, RendezvousStore
from rayxfer.errors import ConfigError, StateError, TransferError
from rayxfer.packing import Layout
from rayxfer.topology import routable_address, same_host

__all__ = ["BroadcastEngine", "BroadcastInitInfo", "Member"]

_LOOPBACK = "127.0.0.1"


@dataclass
class BroadcastInitInfo(WeightTransferInitInfo):
    """How a worker joins the group.

    Attributes:
        master_address, master_port: the sender's rendezvous.
        rank_offset: transport rank of the first worker (the sender is rank 0).
        world_size: sender and workers.
        token: 32 hex digits; shown to the rendezvous before anything else.
        bucket_size_bytes: the sender's wire unit.
        loopback: all members share a host, so nothing listens on other interfaces.
        timeout_s: for the connect.
        device: UUID of the GPU on which this worker's weights live; "" for the process's current
            one, or none.
    """

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    token: str
    bucket_size_bytes: int
    loopback: bool
    timeout_s: float
    device: str


@dataclass(frozen=True)
class Member:
    """One process that is about to join a group.

    Attributes:
        store: the rendezvous, as a torch store.
        rank, world_size: its place; the sender is 0.
        host: the address of the interface to use.
        device: UUID of its GPU, or "".
        timeout_s: left for the connect.
        gave_up: set when the connect was aborted.
        init_info: what a worker was told; None at the sender.
        plan: what the sender knows; None at a worker.
        kept: what outlives the group at a worker that uses weights where they lie.
    """

    store: RendezvousStore
    rank: int
    world_size: int
    host: str
    device: str
    timeout_s: float
    gave_up: threading.Event
    init_info: BroadcastInitInfo | None = None
    plan: SessionPlan | None = None
    kept: dict[str, Any] | None = None


@dataclass
class _Channel:
    engine_cls: type[BroadcastEngine]
    rendezvous: Rendezvous
    plan: SessionPlan
    layouts: Layouts
    device: str = ""
    group: Group | None = None
    staging: Staging | None = None
    gave_up: threading.Event = field(default_factory=threading.Event)
    closed: bool = False


class BroadcastEngine(WeightTransferEngine[BroadcastInitInfo, TensorsUpdateInfo]):
    """Packed broadcast over a group. See the module's text."""

    init_info_cls = BroadcastInitInfo
    update_info_cls = TensorsUpdateInfo
    copies_before_next = True
    gated = True
    buffers: ClassVar[int] = IN_FLIGHT
    """Staging buffers at either end, of a unit each."""

    _group: Group | None = None
    _store: RendezvousStore | None = None
    _staging: Staging | None = None
    _bucket_size_bytes = 0
    _layouts: Layouts | None = None
    _place: tuple[str, int] = ("", 0)

    def __init__(self, config: Any = None, parallel_config: Any = None) -> None:
        super().__init__(config, parallel_config)
        self._gave_up = threading.Event()

    # ---- what differs between transports -------------------------------------------------------

    @classmethod
    def _make_group(cls, member: Member) -> Group:
        """Join the group; blocks until all are there.

        Raises:
            TransferError, TransferTimeout: not all came; nothing is left open.
        """
        raise NotImplementedError

    @classmethod
    def _check_plan(cls, plan: SessionPlan) -> None:
        """Raise ConfigError for a fleet that this transport cannot serve."""

    @classmethod
    def _devices(cls, plan: SessionPlan) -> tuple[str, list[str]]:
        """GPU UUIDs of the sender and of each worker; "" where none is meant."""
        return "", ["" for _ in plan.workers]

    @classmethod
    def _places(cls, plan: SessionPlan) -> list[dict[str, Any]]:
        """Further fields of each worker's init info."""
        return [{} for _ in plan.workers]

    @classmethod
    def _layouts_for(cls, bucket_size_bytes: int) -> Layouts:
        """What is packed together."""
        return Layouts(bucket_size_bytes)

    def _receive(self, group: Any, staging: Staging, layout: Layout, load: LoadWeights) -> None:
        receive_buckets(group, staging, layout, load)

    @classmethod
    def _send(
        cls,
        group: Any,
        staging: Staging,
        iterator: Iterator[tuple[str, torch.Tensor]],
        layout: Layout,
        plan: SessionPlan,
        *,
        stable: bool,
    ) -> None:
        """`stable`: yielded tensors keep memory and values until this returns."""
        send_buckets(group, staging, iterator, layout)

    # ---- the worker ----------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        """Join the group. Raises TransferError or TransferTimeout; then nothing is left open."""
        self.check_available()
        host = _LOOPBACK if init_info.loopback else routable_address()
        self._check_aborted()
        self._store = RendezvousStore(
            (init_info.master_address, init_info.master_port), init_info.token, init_info.timeout_s
        )
        rank = init_info.rank_offset + self.parallel_config.rank
        self._place = str(rank), init_info.world_size
        self._layouts = self._layouts_for(init_info.bucket_size_bytes)
        self._check_aborted()
        self._group = self._make_group(
            Member(
                self._store,
                rank,
                init_info.world_size,
                host,
                init_info.device,
                init_info.timeout_s,
                self._gave_up,
                init_info=init_info,
                kept=self.kept,
            )
        )
        self._staging = Staging(self._group.device, self.buffers)

    def enter(self, gate: int) -> None:
        """At the sender's rendezvous. Raises TransferError when the round is aborted, TransferTimeout when
        not all came within sync_timeout_s."""
        store, (member, members) = self._store, self._place
        if store is None:
            raise StateError(f"{type(self).__name__}: enter before init_transfer_engine")
        try:
            store.enter(member, gate, members, self.config.sync_timeout_s)
        except TransferError as error:
            if self._gave_up.is_set():
                raise TransferError("the channel was aborted", phase="update") from error
            raise

    def receive_weights(self, update_info: TensorsUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive one round. Raises TransferError when a peer is lost or the round is aborted; what
        was handed to `load_weights` until then stays with the loader."""
        staging, layouts = self._staging, self._layouts
        if self._group is None or staging is None or layouts is None:
            self.check_available()
            name = type(self).__name__
            raise StateError(f"{name}: receive_weights before init_transfer_engine")
        self._receive(self._group, staging, layouts.get(update_info), load_weights)

    def _check_aborted(self) -> None:
        if self._gave_up.is_set():
            raise TransferError("the connect was aborted", phase="connect")

    def abort(self) -> None:
        self._gave_up.set()
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

    # ---- the sender ----------------------------------------------------------------------------

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Broadcast one round to every worker of the channel; returns when all bytes are out and no
        tensor is read any more."""
        channel: _Channel | None = trainer_args.get("channel")
        if channel is None or channel.group is None or channel.staging is None:
            raise StateError("trainer_send_weights before the channel was connected")
        if "gate" in trainer_args:
            plan = channel.plan
            members, timeout_s = 1 + len(plan.workers), plan.config.sync_timeout_s
            if not channel.rendezvous.enter("0", trainer_args["gate"], members, timeout_s):
                raise TransferError("the channel was aborted", phase="update")
        channel.engine_cls._send(
            channel.group,
            channel.staging,
            iterator,
            channel.layouts.get(trainer_args["update_info"]),
            channel.plan,
            stable=bool(trainer_args.get("stable", False)),
        )

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[_Channel, list[dict[str, Any]]]:
        """Raises ConfigError for a fleet that cannot be served, or settings that contradict it."""
        cls.check_available()
        cls._check_plan(plan)
        loopback = all(same_host(plan.sender, worker) for worker in plan.workers)
        rendezvous = Rendezvous(_LOOPBACK if loopback else plan.sender.address, plan.token)
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
        device, devices = cls._devices(plan)
        layouts = cls._layouts_for(plan.bucket_size_bytes)
        channel = _Channel(cls, rendezvous, plan, layouts, device)
        places = zip(devices, cls._places(plan), strict=True)
        return channel, [{**info, **place, "device": device} for device, place in places]

    @classmethod
    def trainer_connect(cls, channel: _Channel, timeout_s: float) -> None:
        plan = channel.plan
        store = RendezvousStore(channel.rendezvous, plan.token, timeout_s)
        host = channel.rendezvous.address[0]
        world_size = 1 + len(plan.workers)
        group = cls._make_group(
            Member(
                store, 0, world_size, host, channel.device, timeout_s, channel.gave_up, plan=plan
            )
        )
        channel.staging, channel.group = Staging(group.device, cls.buffers), group
        if channel.closed:  # given up meanwhile: nobody else will close it
            group.close()

    @classmethod
    def trainer_abort(cls, channel: _Channel) -> None:
        channel.gave_up.set()
        channel.rendezvous.close()
        if channel.group is not None:
            channel.group.abort()

    @classmethod
    def trainer_close(cls, channel: _Channel) -> None:
        channel.closed = True
        channel.layouts.clear()
        channel.gave_up.set()
        channel.rendezvous.close()
        if channel.group is not None:
            channel.group.close()
