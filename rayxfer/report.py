"""What a sync tells its caller, and what a controller knows: plain data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from rayxfer.errors import RayxferError

__all__ = ["Status", "SyncReport", "WorkerReport", "WorkerState", "WorkerStatus"]


KEEPER_RANK = -1
"""The rank of a keeper (`rayxfer.keeper`): no place in the list of workers, so never shown."""


class WorkerState(enum.StrEnum):
    """Where a worker stands. A `str`: compares and prints as its name.

    CONNECTING: member, but does not hold the committed version yet. READY: serves its version.
    UPDATING: a round is under way. TORN: an in-place load broke half-way; serves nothing, holds its
    requests, the next sync repairs it. LOST: dead or out of reach.
    """

    CONNECTING = "CONNECTING"
    READY = "READY"
    UPDATING = "UPDATING"
    TORN = "TORN"
    LOST = "LOST"


@dataclass(frozen=True)
class WorkerStatus:
    """One worker, as the controller last saw it.

    Attributes:
        rank: stable index in the list of workers.
        state: a `WorkerState`.
        version: the version it serves (or last served).
        backend: the engine that last reached it, or what was asked for.
        error: why it is not READY, or None.
    """

    rank: int
    state: WorkerState
    version: int
    backend: str
    error: RayxferError | None = None


@dataclass(frozen=True)
class Status:
    """A controller at a glance: the committed version, one row per worker."""

    version: int
    workers: tuple[WorkerStatus, ...]
    busy: bool = False
    name: str = ""

    def __str__(self) -> str:
        rows = [
            f"controller {self.name} at version {self.version}{' (syncing)' if self.busy else ''}"
        ]
        for w in self.workers:
            rows.append(f"  worker {w.rank}: {w.state} v{w.version} {w.backend}")
            if w.error is not None:
                rows[-1] += f" - {w.error}"
        return "\n".join(rows)


@dataclass(frozen=True)
class WorkerReport:
    """One worker's part in a sync.

    Attributes:
        rank: stable index in the list of workers.
        state: its `WorkerState` at the end.
        version: the version it holds at the end (the old one if it did not take the new one).
        seconds: from the first byte offered to its vote.
        backend: the engine that carried its bytes.
        reason: why that engine.
        verified: "loaded" (its parameters' bytes were digested after the last bucket; of a copy that
            workers of one host share, by one of them), "delivered"
            (what arrived was digested before an opaque loader saw it), or "off".
        complete: whether every parameter of the worker was proven written; None: its loader does
            not say.
        casts: name → "from -> to", where the worker's dtype differs.
        error: why it does not serve the new version, or None.
    """

    rank: int
    state: WorkerState
    version: int
    seconds: float
    backend: str
    reason: str = ""
    verified: str = "off"
    complete: bool | None = None
    casts: Mapping[str, str] = field(default_factory=dict)
    error: RayxferError | None = None


@dataclass(frozen=True)
class SyncReport:
    """What one `sync_weights` did.

    Attributes:
        version: the version that was committed.
        num_bytes: bytes of one pass over the source (not times workers).
        num_tensors: tensors of that pass.
        seconds: the whole call.
        workers: one row per worker.
        phases: seconds per phase: begin, connect, prepare, update, finish, commit.
        attempts: passes over the source that were started (1 where nothing failed).
        partial: whether only some of the model was offered.
        sent: names that were offered, where `partial`.
        kept: names that the workers know and that stayed, where `partial` and known.
        unchanged: names whose bytes equal those of the previous sync from this sender.
        control_calls: the most calls that any one worker received.
    """

    version: int
    num_bytes: int
    num_tensors: int
    seconds: float
    workers: tuple[WorkerReport, ...]
    phases: Mapping[str, float] = field(default_factory=dict)
    attempts: int = 1
    partial: bool = False
    sent: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    unchanged: tuple[str, ...] = ()
    control_calls: int = 0

    @property
    def gigabytes_per_second(self) -> float:
        """num_bytes / seconds, in 1e9 bytes per second."""
        return self.num_bytes / 1e9 / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        phases = ", ".join(f"{k} {v * 1e3:.1f} ms" for k, v in self.phases.items())
        rows = [
            f"version {self.version}: {self.num_bytes:,} bytes in {self.num_tensors} tensors, "
            f"{self.seconds:.3f} s, {self.gigabytes_per_second:.2f} GB/s ({phases})"
        ]
        for w in self.workers:
            row = (
                f"  worker {w.rank}: {w.state} v{w.version} over {w.backend}, verified {w.verified}"
            )
            row += f", {len(w.casts)} casts" if w.casts else ""
            rows.append(row + (f" - {w.error}" if w.error is not None else ""))
        return "\n".join(rows)
