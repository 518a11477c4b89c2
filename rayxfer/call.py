"""One `sync_weights` call: what is offered, what becomes of each worker, and what the report says of it."""

from __future__ import annotations

import array
import time
from dataclasses import dataclass, field
from typing import Any

from rayxfer.channel import Link
from rayxfer.errors import RayxferError, TransferError
from rayxfer.metadata import Columns, ParamMeta, metadata_digest, metadata_to_wire
from rayxfer.report import KEEPER_RANK, SyncReport, WorkerReport, WorkerState
from rayxfer.source import Standing, WeightSource
from rayxfer.stream import Vote

__all__ = ["Call", "Offer", "Row", "mismatch"]


@dataclass
class Row:
    """What becomes of one worker in this call."""

    link: Link
    state: WorkerState
    version: int
    seconds: float = 0.0
    verified: str = "off"
    complete: bool | None = None
    finish: bool = False
    casts: dict[str, str] = field(default_factory=dict)
    error: RayxferError | None = None
    left_as: WorkerState = WorkerState.READY
    """What an abort left the worker as."""

    def fail(self, error: RayxferError, state: WorkerState) -> None:
        self.error, self.state = error, state


class Offer:
    """What a source offers, and what follows from that alone: kept from round to round."""

    def __init__(self, metadata: tuple[ParamMeta, ...]) -> None:
        self.metadata = metadata
        self.digest = metadata_digest(metadata)
        self.columns = Columns(metadata)
        self.wire = metadata_to_wire(metadata)
        self.num_bytes = sum(self.columns.num_bytes)


@dataclass
class Call:
    """One `sync`: what all phases share."""

    source: WeightSource
    standing: Standing | None
    offer: Offer
    partial: bool
    round_id: int
    version: int
    process: dict[str, Any]
    base: int
    deadline: float = 0.0
    rows: dict[int, Row] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    attempts: int = 0
    tries: int = 0
    glitches: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    digest: str = "xxh3"
    digests: list[int] | None = None
    prove_all: bool = False
    two_steps: bool = False
    """A worker has refused an offer that came together with its bytes: ask all of them first."""

    @property
    def metadata(self) -> tuple[ParamMeta, ...]:
        return self.offer.metadata

    def live(self) -> list[Link]:
        return [row.link for row in self.rows.values() if row.error is None]

    def serving(self) -> bool:
        """Whether anybody is left who will serve the version (a keeper alone does not)."""
        return any(link.rank != KEEPER_RANK for link in self.live())

    def claim(self) -> dict[str, Any]:
        """What proves to a controller, a restarted one too, that this round is ours."""
        return {"round_id": self.round_id, "version": self.version, "process": self.process}

    def ids(self) -> dict[str, Any]:
        """What every message of this attempt carries."""
        return {"round_id": self.round_id, "attempt": self.tries, "version": self.version}

    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def settled(self, *, committed: bool = False) -> list[dict[str, Any]]:
        """What became of each worker; `committed`: of the live ones, if they all commit."""

        def now(row: Row) -> tuple[WorkerState, int]:
            hoped = committed and row.error is None
            return (WorkerState.READY, self.version) if hoped else (row.state, row.version)

        return [
            {
                "rank": rank,
                "state": str(now(row)[0]),
                "version": now(row)[1],
                "backend": row.link.backend or row.link.requested,
                "incarnation": row.link.incarnation,
                "error": row.error,
                "casts": bool(row.casts),
                "partial": self.partial,
            }
            for rank, row in self.rows.items()
        ]

    def report(self, seconds: float, unchanged: tuple[str, ...]) -> SyncReport:
        names = self.offer.columns.names
        return SyncReport(
            version=self.version,
            num_bytes=self.offer.num_bytes,
            num_tensors=len(names),
            seconds=seconds,
            workers=tuple(
                WorkerReport(
                    rank=rank,
                    state=row.state,
                    version=row.version,
                    seconds=row.seconds,
                    backend=row.link.backend or row.link.requested,
                    reason=row.link.reason,
                    verified=row.verified,
                    complete=row.complete,
                    casts=row.casts,
                    error=row.error,
                )
                for rank, row in self.rows.items()
                if rank != KEEPER_RANK
            ),
            phases=dict(self.phases),
            attempts=self.attempts,
            partial=self.partial,
            sent=names if self.partial else (),
            kept=tuple(self.kept) if self.partial else (),
            unchanged=unchanged,
            control_calls=max((row.link.calls for row in self.rows.values()), default=0),
        )


def mismatch(vote: Vote, sent: list[int] | None, call: Call) -> RayxferError | None:
    """The first tensor whose digest at the worker is not what the sender read."""
    if sent is None or vote.verified == "off" or vote.shared:
        return None
    if len(vote.digests) != len(sent):
        return TransferError(
            f"worker {vote.rank} digested {len(vote.digests)} tensors, the sender {len(sent)}",
            phase="verify",
            weight_version=call.version,
            worker=vote.rank,
        )
    if array.array("Q", sent) == vote.digests:
        return None
    for meta, here, there in zip(call.metadata, sent, vote.digests, strict=True):
        if here != there:
            return TransferError(
                f"digest mismatch at {meta.name!r} on worker {vote.rank}: the sender read {here:016x}, "
                f"{vote.verified} was {there:016x}; the version was not taken",
                phase="verify",
                weight_version=call.version,
                worker=vote.rank,
                name=meta.name,
            )
    return None
