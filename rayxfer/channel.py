"""A channel: one engine over some workers, opened by the trainer's process."""

from __future__ import annotations

import functools
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any

from rayxfer.base import SessionPlan, WeightTransferEngine
from rayxfer.client import SLICE_S, WorkerClient, lost_process, outcome, spawn, start_all
from rayxfer.config import WeightTransferConfig
from rayxfer.errors import (
    BackendUnavailable,
    ConfigError,
    RayxferError,
    TransferError,
    TransferTimeout,
    WorkerLost,
    portable_cause,
)
from rayxfer.factory import EngineEntry
from rayxfer.metadata import ParamMeta
from rayxfer.report import KEEPER_RANK
from rayxfer.topology import Facts, process_gone, rank_offsets

__all__ = ["Calls", "Channel", "Link", "connect"]

_TOGETHER_S = 0.1
"""How long to wait for several answers at once before each has a future of its own."""


@dataclass
class Link:
    """One worker, as the sender sees it.

    Attributes:
        rank: stable index in the list of workers.
        requested: the backend that was asked for ("auto" included).
        backend, reason: what was chosen for it, and why.
        facts: where it lives; None until it was reached.
        refused: backends that "auto" tried for it in vain → why.
        has_metadata: digest of the metadata that it is known to hold.
        calls: control calls of the current sync.
    """

    rank: int
    client: WorkerClient
    requested: str
    facts: Facts | None
    incarnation: str
    backend: str = ""
    reason: str = ""
    refused: dict[str, str] = field(default_factory=dict)
    has_metadata: str | None = None
    calls: int = 0
    acked: int = 0

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        self.calls += 1
        return self.client.call(op, message)

    def signal(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        self.calls += 1
        return self.client.signal(op, message)


class Calls:
    """The same operation on several links, sent off at once."""

    def __init__(self, links: Sequence[Link], op: str, messages: Sequence[dict[str, Any]]) -> None:
        for link in links:
            link.calls += 1
        self._gather = start_all([link.client for link in links], op, messages)

    def futures(self) -> list[Future[dict[str, Any]]]:
        """One per link, in order. Where answers come soon, these are there already. Ask once."""
        return self._gather(_TOGETHER_S)


@dataclass
class Channel:
    """One engine class over some links, and the trainer's end of it.

    Attributes:
        handle: whatever the engine's `trainer_open` made.
        dirty: something was aborted; it must be opened anew before it is used again.
        reached: what a report says of the way to each link's worker, or "".
        gated: an offer and its bytes may go in one call (see `WeightTransferEngine.gated`).
    """

    backend: str
    engine_cls: type[WeightTransferEngine[Any, Any]]
    links: list[Link]
    plan: SessionPlan
    handle: Any
    init_info: dict[str, Any]
    dirty: bool = False
    closed: bool = field(default=False, repr=False)
    reached: list[str] = field(default_factory=list)
    gated: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be the same for the channel to be used again."""
        return self.backend, tuple((link.rank, link.incarnation) for link in self.links)

    @functools.cached_property
    def _owners(self) -> dict[int, Link]:
        """By the rank of each worker: see `owner`. Once per channel, since asking goes over all workers."""
        at = self.engine_cls.provers(self.handle)
        ranks = _ranks_behind(self.links)
        links = {link.rank: link for link in self.links}
        return {ranks[one]: links[ranks[other]] for one, other in enumerate(at)}

    def owner(self, link: Link) -> Link | None:
        """Under `load_mode="mapped"`: whose copy this worker and others use (its own, maybe); None: the
        sender's, if any."""
        return self._owners.get(link.rank)

    def prover(self, link: Link) -> Link | None:
        """Who proves what this worker and others use as one copy."""
        first = next((one for one in self.links if one.rank != KEEPER_RANK), None)
        return self.owner(link) or first

    def comparable(self, late: list[Link]) -> list[Link]:
        """Of these, those whose bytes tell who is stuck: who is to use another's copy is told of bytes only
        when many of them are there."""
        bad = {link.rank for link in late}
        owners = [self.owner(link) for link in late]
        pairs = zip(late, owners, strict=True)
        return [one for one, own in pairs if own is None or own is one or own.rank not in bad]

    def nearest(self, stuck: list[Link]) -> list[Link]:
        """Of these, those whose bytes do not come through another of them."""
        before = self.engine_cls.upstream(self.handle)
        if not before:
            return stuck
        ranks = _ranks_behind(self.links)
        bad = {link.rank for link in stuck}

        def through_bad(link: Link) -> bool:
            at = before[ranks.index(link.rank)]
            while at >= 0:
                if ranks[at] in bad and ranks[at] != link.rank:
                    return True
                at = before[at]
            return False

        return [link for link in stuck if not through_bad(link)]

    def abort(self) -> None:
        self.dirty = True
        self.engine_cls.trainer_abort(self.handle)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.engine_cls.trainer_close(self.handle)


def connect(
    *,
    backend: str,
    engine_cls: type[WeightTransferEngine[Any, Any]],
    entry: EngineEntry,
    links: list[Link],
    config: WeightTransferConfig,
    sender: Facts,
    bucket_size_bytes: int,
    metadata: tuple[ParamMeta, ...],
    kept: dict[str, Any],
    base_message: dict[str, Any],
    deadline: float,
) -> Channel:
    """Open one channel: the trainer's end, and every worker's at the same time.

    Raises:
        BackendUnavailable, ConfigError: the first worker's refusal; `worker` says which.
        WorkerLost: a worker is gone; `worker` says which.
        TransferTimeout: not all came together before the deadline.
        TransferError: it failed for another reason.

    After an error nothing is left open on either side.
    """
    engine_cls.check_available()
    session_id = secrets.token_hex(8)
    plan = SessionPlan(
        session_id=session_id,
        token=secrets.token_hex(16),
        config=config,
        bucket_size_bytes=bucket_size_bytes,
        sender=sender,
        workers=tuple(
            link.facts
            for link in links
            if link.facts is not None
            for _ in range(link.facts.num_ranks)
        ),
        deadline_s=max(0.1, deadline - time.monotonic()),
        metadata=metadata,
        kept=kept,
    )
    try:
        handle, infos = engine_cls.trainer_open(plan)
    except RayxferError:
        raise
    except Exception as error:
        raise TransferError(
            f"backend {backend!r} could not open the sender's end: {type(error).__name__}: {error}",
            phase="connect",
            cause=portable_cause(error),
        ) from error
    channel = Channel(backend, engine_cls, links, plan, handle, infos[0] if infos else {})
    settings = {**asdict(config), "backend": backend}
    counts = [link.facts.num_ranks if link.facts is not None else 1 for link in links]
    messages = []
    for first, count in zip(rank_offsets(counts), counts, strict=True):
        ranks = [
            {
                "init_info": infos[rank],
                "parallel_config": {"rank": rank, "world_size": sum(counts)},
            }
            for rank in range(first, first + count)
        ]
        messages.append(
            {
                **base_message,
                "session_id": session_id,
                "entry": asdict(entry),
                "config": settings,
                **(ranks[0] if len(ranks) == 1 else {"ranks": ranks}),
                "wait_s": SLICE_S,
            }
        )
    try:
        _await_all(channel, messages, deadline)
    except BaseException:
        channel.abort()
        for link in links:
            link.signal("abort", {**base_message, "round_id": -1, "session_id": session_id})
        channel.close()
        raise
    said = engine_cls.reached(handle, [f"worker {rank}" for rank in _ranks_behind(links)])
    channel.reached = [said[first] for first in rank_offsets(counts)]
    return channel


def _ranks_behind(links: list[Link]) -> list[int]:
    """The worker behind each transport rank."""
    counts = [link.facts.num_ranks if link.facts is not None else 1 for link in links]
    return [link.rank for link, n in zip(links, counts, strict=True) for _ in range(n)]


def _await_all(channel: Channel, messages: list[dict[str, Any]], deadline: float) -> None:
    changed = threading.Event()
    own = spawn(
        lambda: channel.engine_cls.trainer_connect(
            channel.handle, max(0.1, deadline - time.monotonic())
        ),
        "rayxfer-connect",
    )
    pending: dict[int, Future[Any]] = {}

    def issue(position: int) -> None:
        future = channel.links[position].call("connect", messages[position])
        pending[position] = future
        future.add_done_callback(lambda _: changed.set())

    own.add_done_callback(lambda _: changed.set())
    for position in range(len(channel.links)):
        issue(position)
    problems: dict[int, RayxferError] = {}
    channel.gated = channel.engine_cls.gated
    while pending or not own.done():
        left = deadline - time.monotonic()
        if left <= 0:
            late = sorted(channel.links[p].rank for p in pending)
            raise _root(problems) or TransferTimeout(
                f"connect over {channel.backend!r} took longer than connect_timeout_s="
                f"{channel.plan.config.connect_timeout_s:g}; still waiting for "
                f"{'worker ' + ', '.join(map(str, late)) if late else 'the sender itself'}",
                phase="connect",
                worker=late[0] if late else None,
            )
        changed.wait(min(left, 0.1))
        changed.clear()
        for position, future in list(pending.items()):
            link = channel.links[position]
            if not future.done():
                if process_gone(link.facts):
                    del pending[position]
                    problems[position] = lost_process(link.rank, "connect")
                continue
            del pending[position]
            answer = outcome(future, channel.links[position].rank)
            if isinstance(answer, RayxferError):
                answer.__dict__["worker"] = channel.links[position].rank
                problems[position] = answer
            elif "need" in answer:
                problems[position] = WorkerLost(
                    f"worker {channel.links[position].rank} was restarted",
                    phase="connect",
                    worker=channel.links[position].rank,
                )
            elif not answer["done"]:
                issue(position)
            else:
                channel.gated = channel.gated and answer.get("gated", False)
        if problems:
            # one failure fails all: do not wait for the others to time out
            raise _root(problems) or next(iter(problems.values()))
    error = own.exception(timeout=0)
    if error is not None:
        raise TransferError(
            f"connect over {channel.backend!r} failed at the sender: {type(error).__name__}: {error}",
            phase="connect",
            cause=portable_cause(error),
        )


def _root(problems: dict[int, RayxferError]) -> RayxferError | None:
    """The most telling of several: a refusal or a death explains the others' broken connections."""
    order: tuple[Callable[[RayxferError], bool], ...] = (
        lambda e: isinstance(e, WorkerLost),
        lambda e: isinstance(e, (ConfigError, BackendUnavailable)),
    )
    for fits in order:
        for error in problems.values():
            if fits(error):
                return error
    return next(iter(problems.values()), None)
