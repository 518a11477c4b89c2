"""What the GPU engines ask of a device. Pure: the real one is in `cuda.py`, and `rayxfer.testing` has a
file-backed double, so that everything but the device's own calls is tested without one.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from rayxfer.errors import BackendUnavailable, TransferError

__all__ = [
    "HANDLE_BYTES",
    "Block",
    "Counts",
    "Device",
    "Lane",
    "Mark",
    "Opened",
    "Ready",
    "check_cuda",
    "expandable_segments",
    "wait_mark",
]

HANDLE_BYTES = 64
"""Size of CUDA's handles of memory and of events."""

_SPINS = 50
_PAUSE_S = 20e-6


def check_cuda(backend: str) -> None:
    """Raise `BackendUnavailable` with the reason if this process cannot run a CUDA engine."""
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) was built without CUDA"
    elif not torch.cuda.is_available():
        reason = "no CUDA device is visible to this process"
    else:
        return
    raise BackendUnavailable(f"backend {backend!r} needs CUDA: {reason}")


def expandable_segments() -> str | None:
    """The setting under which torch's allocator makes memory that CUDA IPC cannot export, or None."""
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        for entry in os.environ.get(name, "").split(","):
            key, _, value = entry.partition(":")
            if key.strip() == "expandable_segments" and value.strip().lower() == "true":
                return f"{name}=expandable_segments:True"
    return None


class Mark(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has passed it. Raises TransferError for an error of the device."""


def wait_mark(mark: Mark, aborted: threading.Event, what: str) -> None:
    """Return when the device has passed the mark.

    Raises:
        TransferError: `aborted` was set meanwhile, or the device failed.
    """
    spins = 0
    while not mark.done():
        if aborted.is_set():
            raise TransferError(f"the {what} channel was aborted", phase="update")
        spins += 1
        time.sleep(0 if spins < _SPINS else _PAUSE_S)
    if aborted.is_set():
        raise TransferError(f"the {what} channel was aborted", phase="update")


class Lane(ABC):
    """A stream that lives as long as its channel: fresh ones would strand the allocator's memory."""

    @property
    @abstractmethod
    def pointer(self) -> int:
        """What libraries take as a stream."""

    @abstractmethod
    def follow(self) -> None:
        """Go on only after what the current stream has queued by now."""

    @abstractmethod
    def lead(self) -> None:
        """Let the current stream go on only after what this lane has queued by now."""

    @abstractmethod
    def mark(self) -> Mark:
        """This point of the lane."""


@dataclass(frozen=True)
class Block:
    """One allocation of the device, as a whole (an allocator's segment holds many tensors).

    Attributes:
        base: address of its first byte in the exporting process.
        num_bytes: its length.
        identity: unique over the life of the process: tells it from a later one at the same address.
    """

    base: int
    num_bytes: int
    identity: int


@dataclass(frozen=True)
class Opened:
    """Another process's block, as seen from here.

    Attributes:
        handle: what it was opened by.
        memory: all its bytes (flat uint8). Not to be used after `Device.close`.
    """

    handle: bytes
    memory: torch.Tensor


class Ready(ABC):
    """An event that one process records and others wait for, without the host waiting."""

    @property
    @abstractmethod
    def handle(self) -> bytes:
        """HANDLE_BYTES of plain data for `Device.open_ready`; b"" where events cannot be shared."""

    @abstractmethod
    def record(self) -> bool:
        """Everything that the current stream has queued by now. Returns whether others have to `wait`:
        not if all of that is done. Where events cannot be shared, returns only when it is."""

    @abstractmethod
    def wait(self) -> None:
        """Let the current stream go on only after what was last recorded."""


@dataclass
class Counts:
    """How often each call was made: what is opened must be closed, what is allocated freed."""

    exports: int = 0
    opens: int = 0
    closes: int = 0
    allocations: int = 0
    frees: int = 0


class Device(ABC):
    """One GPU, as one process sees it.

    Attributes:
        uuid: the same in every process, whatever it may see and in which order.
        torch_device: under which torch knows it here.
        counts: calls made by this process.
    """

    uuid: str
    torch_device: torch.device
    counts: Counts

    # ---- order ---------------------------------------------------------------------------------

    @abstractmethod
    def use(self) -> AbstractContextManager[object]:
        """Make it the current device of this thread for a while."""

    @abstractmethod
    def lane(self) -> Lane:
        """A new lane. Make one per channel, not per round."""

    @abstractmethod
    def mark(self) -> Mark:
        """This point of the current stream."""

    @abstractmethod
    def settle(self) -> None:
        """Return when all that this process has queued on the device, on any stream, is done."""

    # ---- memory between processes --------------------------------------------------------------

    @abstractmethod
    def block_of(self, tensor: torch.Tensor) -> Block | None:
        """The block in which a tensor's bytes lie; None if it is elsewhere or cannot be exported."""

    @abstractmethod
    def alive(self, blocks: Sequence[Block]) -> list[bool]:
        """Whether each block is still allocated, and the same one."""

    def lives(self, block: Block) -> bool:
        """`alive` of one."""
        return self.alive([block])[0]

    @abstractmethod
    def export(self, block: Block) -> bytes:
        """HANDLE_BYTES of plain data, by which other processes open the block."""

    @abstractmethod
    def open(self, handle: bytes, num_bytes: int) -> Opened:
        """Another process's block (or this one's own: then nothing is mapped anew).

        Raises:
            TransferError: it cannot be opened, or is shorter than `num_bytes`.
        """

    @abstractmethod
    def close(self, opened: Opened) -> None:
        """Give it back. Its tensors must not be used any more."""

    @abstractmethod
    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory of our own (flat uint8) that can be exported under every setting of the allocator.

        Raises:
            TransferError: there is no room.
        """

    @abstractmethod
    def free(self, memory: torch.Tensor) -> None:
        """The reverse of `allocate`."""

    @abstractmethod
    def ready(self) -> Ready:
        """A new event of this process."""

    @abstractmethod
    def open_ready(self, handle: bytes) -> Ready:
        """Another process's event (or this one's own)."""
