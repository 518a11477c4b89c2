"""`shm`: a ring of buckets in shared memory, for a sender and CPU workers on one host.

The ring is small on purpose: what the sender has just written is still in the processor's cache
when the workers read it (where they share one: see `stores.py`). Workers read one slot while the sender
fills the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import (
    LoadWeights,
    SessionPlan,
    WeightTransferEngine,
    WeightTransferInitInfo,
)
from rayxfer.engines.collective import Layouts, TensorsUpdateInfo, merged_init_info
from rayxfer.engines.frame_reader import FrameReader
from rayxfer.engines.frames import send_frames, send_version
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.engines.versions import Versions
from rayxfer.errors import StateError
from rayxfer.memfile import check_system
from rayxfer.packing import ALIGNMENT_BYTES, Layout, align
from rayxfer.topology import Facts

__all__ = ["ShmEngine", "ShmInitInfo"]

_MIN_SLOT_BYTES = 64 << 10


@dataclass
class ShmInitInfo(WeightTransferInitInfo):
    """Where the ring is: the sender's process and descriptor, and what proves that it is the one.

    Attributes:
        pid, fd: opened as /proc/<pid>/fd/<fd>.
        inode, file_bytes, nonce: checked after opening.
        bucket_size_bytes: the sender's wire unit.
    """

    pid: int
    fd: int
    inode: int
    file_bytes: int
    nonce: str
    bucket_size_bytes: int


@dataclass
class _Channel:
    ring: RingWriter
    layouts: Layouts
    workers: tuple[Facts, ...]
    versions: Versions | None


class ShmEngine(WeightTransferEngine[ShmInitInfo, TensorsUpdateInfo]):
    """A ring in a memory file. See the module's text."""

    init_info_cls = ShmInitInfo
    update_info_cls = TensorsUpdateInfo
    copies_before_next = True
    gated = True
    default_bucket_size_bytes = 8 << 20

    _ring: RingReader | None = None
    _reader: FrameReader | None = None
    _layouts: Layouts | None = None

    @classmethod
    def check_available(cls) -> None:
        check_system()

    def init_transfer_engine(self, init_info: ShmInitInfo) -> None:
        """Map the sender's ring. Raises BackendUnavailable where it cannot be opened."""
        self._layouts = Layouts(init_info.bucket_size_bytes)
        self._ring = RingReader.of(init_info, self.parallel_config.rank)
        self._reader = FrameReader(self._ring)

    def receive_weights(self, update_info: TensorsUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive one round. Raises TransferError when the round is aborted."""
        reader = self._reader
        if reader is None or self._layouts is None:
            raise StateError("shm: receive_weights before init_transfer_engine")
        reader.receive(self._layouts.get(update_info), load_weights)

    def enter(self, gate: int) -> None:
        """Raises TransferError when the round is aborted."""
        if self._ring is None:
            raise StateError("shm: enter before init_transfer_engine")
        self._ring.ready(gate)
        self._ring.slot()

    def abort(self) -> None:
        if self._ring is not None:
            self._ring.abort()

    def shutdown(self) -> None:
        """Drop the mapping. Safe to call twice."""
        ring, self._ring = self._ring, None
        if self._reader is not None:
            self._reader.close()
        self._reader = self._layouts = None
        if ring is not None:
            ring.abort()

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Write one round into the ring; returns once every worker has read it."""
        channel: _Channel = trainer_args["channel"]
        ring, layout = channel.ring, channel.layouts.get(trainer_args["update_info"])
        if "gate" in trainer_args:
            ring.gate(trainer_args["gate"])
        if channel.versions is None or trainer_args.get("partial") or not layout.file_bytes:
            send_frames(ring, layout, iterator, stable=bool(trainer_args.get("stable")))
            return
        channel.versions.learn(channel.workers, ring.held())
        send_version(ring, layout, iterator, channel.versions.pick(layout.file_bytes))

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[_Channel, list[dict[str, Any]]]:
        cls.check_available()
        merged_init_info({"bucket_size_bytes": plan.bucket_size_bytes}, plan.config.init_info)
        unit, slots = _unit(plan.bucket_size_bytes, len(plan.workers))
        slot_bytes = align(max(unit, _MIN_SLOT_BYTES), ALIGNMENT_BYTES)
        ring = RingWriter(
            slot_bytes=slot_bytes, slots=slots, readers=len(plan.workers), nonce=plan.token
        )
        own = {**ring.describe(), "bucket_size_bytes": unit}
        info = {**plan.config.init_info, **own}
        versions = None
        if plan.config.load_mode == "mapped":
            versions = plan.kept.setdefault("versions", Versions())
            size = Layout(plan.metadata, unit).file_bytes
            if size:
                versions.prepare(size)
        layouts = Layouts(unit)
        channel = _Channel(ring, layouts, plan.workers, versions)
        return channel, [dict(info) for _ in plan.workers]

    @classmethod
    def trainer_abort(cls, channel: _Channel) -> None:
        channel.ring.abort()

    @classmethod
    def trainer_close(cls, channel: _Channel) -> None:
        channel.ring.close()
        if channel.versions is not None:
            channel.versions.learn(channel.workers, channel.ring.held())
        channel.ring.release()
        channel.layouts.clear()


def _unit(bucket_size_bytes: int, readers: int) -> tuple[int, int]:
    """What goes into a slot, and how many slots there are: never more than two buckets in all.

    To one worker what counts is that a slot is still in the processor's cache, to several that they meet
    seldom. Measured (2 cores, 1 GiB, in parts of memcpy): one worker 0.72 with 2 x 4 MiB, 0.94
    with 4 x 2. Two: 0.44 with 2 x 4, 0.43 with 4 x 2, 0.48 with 2 x 8, 0.29 with 4 x 4. Four: 0.27, 0.29,
    0.32, 0.21.
    """
    part = bucket_size_bytes // 4
    return (part, 4) if readers == 1 and part >= _MIN_SLOT_BYTES else (bucket_size_bytes, 2)
