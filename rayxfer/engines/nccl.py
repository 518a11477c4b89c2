"""`nccl`: packed broadcast between GPUs, over a communicator of its own, on the code `gloo` uses.

The sender and every worker need a GPU each. Packing and loading run on the stream that is current in
the calling thread, the broadcast on a lane of the channel: each broadcast comes after the packing of
its bucket (or the last reading of it), and the host, which waits in slices against an abort flag, does
not touch a bucket before its broadcast is through. Payloads travel unencrypted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import SessionPlan
from rayxfer.daemons import daemon
from rayxfer.engines.broadcast import BroadcastEngine, Member
from rayxfer.engines.collective import Group
from rayxfer.engines.device import Device, Lane, Mark, check_cuda
from rayxfer.errors import ConfigError, TransferError
from rayxfer.gpus import uuid_of

__all__ = ["NCCLEngine", "NcclGroup"]

_SPINS = 50
_PAUSE_S = 20e-6
_CLOSE_S = 30.0


@dataclass
class _Held:
    """A buffer under way, and the point of the lane where that ends (None: not reached yet)."""

    buffer: torch.Tensor
    mark: Mark | None = None


_stuck: list[object] = []
"""Groups whose lane did not come to an end: what they hold is never given back."""


class NcclGroup(Group):
    """A communicator, its lane, and what is under way.

    Args:
        member: who joins.
        device: on which GPU.
        library: `nccl_library()`, or a double of it.
    """

    def __init__(self, member: Member, device: Device, library: Any) -> None:
        self.device = device.torch_device
        self._device = device
        self._aborted = member.gave_up
        self._held: deque[_Held] = deque()
        self._closed = False
        with device.use():
            self._lane: Lane = device.lane()
            if member.rank == 0:
                member.store.set("nccl", library.unique_id().hex())
            unique_id = bytes.fromhex(bytes(member.store.get("nccl")).decode())
            self._comm = library.join(
                unique_id,
                member.rank,
                member.world_size,
                member.timeout_s,
                member.gave_up.is_set,
            )

    def start(self, buffer: torch.Tensor) -> Mark:
        held = _Held(buffer)
        self._held.append(held)  # until it is through, whatever becomes of the caller
        with self._device.use():
            self._lane.follow()
            self._comm.broadcast(buffer, self._lane)
            self._poll(self._comm.idle)
            held.mark = self._lane.mark()
        return held.mark

    def wait(self, work: Mark) -> None:
        self._poll(lambda: self._comm.idle() and work.done())
        with self._device.use():
            self._lane.lead()
        while self._held and (mark := self._held[0].mark) is not None and mark.done():
            self._held.popleft()

    def drain(self) -> None:
        with self._device.use():
            mark = self._device.mark()
        self._poll(mark.done)

    def _poll(self, done: Any) -> None:
        spins = 0
        while True:
            if self._aborted.is_set():
                raise TransferError("the nccl channel was aborted", phase="update")
            if done():
                return
            spins += 1
            time.sleep(0 if spins < _SPINS else _PAUSE_S)

    def abort(self) -> None:
        self._aborted.set()  # frees whoever waits; the rest may take NCCL a moment
        if not self._closed:
            daemon(self._comm.abort, "rayxfer-nccl-abort")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._aborted.set()
        daemon(self._release, "rayxfer-nccl-close")

    def _release(self) -> None:
        """Buffers go only when no kernel writes to them any more."""
        self._comm.abort()
        try:
            with self._device.use():
                last = self._lane.mark()
            ended = _passed(last)
        except (TransferError, RuntimeError):  # the GPU is out of order
            ended = False
        if not ended:
            _stuck.append(self)  # better lost than written to in other hands
            return
        self._held.clear()


def _passed(mark: Mark) -> bool:
    """Whether the device passes it in reasonable time."""
    deadline = time.monotonic() + _CLOSE_S
    while not mark.done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class NCCLEngine(BroadcastEngine):
    """Packed broadcast over NCCL. See the module's text."""

    default_bucket_size_bytes = 64 << 20

    # ---- the device's calls: a double replaces these three -------------------------------------

    @classmethod
    def check_available(cls) -> None:
        check_cuda("nccl")
        cls._library()

    @classmethod
    def _device(cls, uuid: str) -> Device:
        from rayxfer.engines.cuda import cuda_device

        return cuda_device(uuid)

    @classmethod
    def _library(cls) -> Any:
        from rayxfer.engines.nccl_library import nccl_library

        return nccl_library()

    # --------------------------------------------------------------------------------------------

    @classmethod
    def _make_group(cls, member: Member) -> NcclGroup:
        return NcclGroup(member, cls._device(member.device), cls._library())

    @classmethod
    def _devices(cls, plan: SessionPlan) -> tuple[str, list[str]]:
        # a sender whose weights are on the CPU packs on the GPU that is current where it opens; of a
        # worker with several ranks only the first one's GPU is known: each takes its own
        sender = uuid_of(plan.sender.device) or cls._device("").uuid
        return sender, [uuid_of(w.device) if w.num_ranks == 1 else "" for w in plan.workers]

    @classmethod
    def _check_plan(cls, plan: SessionPlan) -> None:
        sender, workers = cls._devices(plan)
        taken = {sender: "the sender"}
        for rank, uuid in enumerate(workers):
            if uuid and uuid in taken:
                raise ConfigError(
                    f"backend 'nccl': receiver {rank} and {taken[uuid]} are on one GPU ({uuid}), and "
                    "NCCL takes each GPU once: use 'ipc' for workers on the sender's GPU, or 'auto'"
                )
            if uuid:
                taken[uuid] = f"receiver {rank}"
