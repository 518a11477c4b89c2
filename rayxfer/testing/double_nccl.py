"""A double of NCCL: a communicator is a meeting point of threads in one process.

It shows in which order things are asked for, that buffers stay as they are while a broadcast runs,
and that an abort frees everyone. It shows nothing about NCCL.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from rayxfer.engines.device import Device
from rayxfer.engines.nccl import NCCLEngine
from rayxfer.errors import TransferError, TransferTimeout
from rayxfer.testing.doubles import DoubleDevice, double_device

__all__ = ["DoubleNCCLEngine", "DoubleNccl"]


class _Meeting:
    """Where the members of one communicator meet: threads of one process."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.members: set[int] = set()
        self.sent: dict[int, torch.Tensor] = {}
        self.done: dict[int, set[int]] = {}

    def through(self, turn: int, size: int) -> bool:
        return turn < 0 or len(self.done.get(turn, ())) == size


class _DoubleComm:
    """As `Communicator`. An operation ends, a moment later, when all members have begun it."""

    def __init__(self, meeting: _Meeting, rank: int, size: int, library: DoubleNccl) -> None:
        self._meeting, self._rank, self._size, self._library = meeting, rank, size, library
        self._turn = 0
        self._gone = threading.Event()

    def idle(self) -> bool:
        if self._gone.is_set():
            raise TransferError("the NCCL communicator was aborted", phase="update")
        return True

    def broadcast(self, buffer: torch.Tensor, lane: Any) -> None:
        self.idle()
        turn, self._turn = self._turn, self._turn + 1
        ended = threading.Event()
        self._library.device.log.append("broadcast")
        lane.pending = [ended.is_set]

        def run() -> None:
            meeting = self._meeting
            with meeting.changed:
                if self._rank == 0:
                    meeting.sent[turn] = buffer
                    meeting.changed.notify_all()
                while turn not in meeting.sent and not self._gone.is_set():
                    meeting.changed.wait(0.01)
                while not meeting.through(turn - 1, self._size) and not self._gone.is_set():
                    meeting.changed.wait(0.01)
            time.sleep(self._library.delay_s)
            with meeting.changed:
                if not self._gone.is_set() and self._rank:
                    buffer.copy_(
                        meeting.sent[turn]
                    )  # read late: a buffer used again too early shows
                meeting.done.setdefault(turn, set()).add(self._rank)
                meeting.changed.notify_all()
                while not meeting.through(turn, self._size) and not self._gone.is_set():
                    meeting.changed.wait(0.01)
            ended.set()

        threading.Thread(target=run, name="double-nccl", daemon=True).start()

    def abort(self) -> None:
        if not self._gone.is_set():
            self._gone.set()
            self._library.aborted += 1


class DoubleNccl:
    """As `NcclLibrary`. `joined` and `aborted` count communicators."""

    version = (0, 0, 0)

    def __init__(self) -> None:
        self.delay_s = 0.002
        self.joined = self.aborted = 0
        self._meetings: dict[bytes, _Meeting] = {}

    @property
    def device(self) -> DoubleDevice:
        return double_device("")

    def unique_id(self) -> bytes:
        made = os.urandom(16)
        self._meetings[made] = _Meeting()
        return made

    def join(
        self,
        unique_id: bytes,
        rank: int,
        world_size: int,
        timeout_s: float,
        gave_up: Callable[[], bool],
    ) -> _DoubleComm:
        meeting = self._meetings[unique_id]
        comm = _DoubleComm(meeting, rank, world_size, self)
        deadline = time.monotonic() + timeout_s
        with meeting.changed:
            meeting.members.add(rank)
            meeting.changed.notify_all()
            while len(meeting.members) < world_size:
                if gave_up():
                    raise TransferError("the connect was aborted", phase="connect")
                if time.monotonic() > deadline:
                    raise TransferTimeout("not all members came", phase="connect")
                meeting.changed.wait(0.01)
        self.joined += 1
        return comm


double_nccl = DoubleNccl()


class DoubleNCCLEngine(NCCLEngine):
    """`nccl` over doubles, within one process."""

    @classmethod
    def check_available(cls) -> None:
        return None

    @classmethod
    def _device(cls, uuid: str) -> Device:
        return double_device("")

    @classmethod
    def _library(cls) -> Any:
        return double_nccl
