"""The trainer's side of a round: one pass over the source feeds every channel.

`Sender.sync` is the whole of DESIGN's "one round", as seen from the trainer: begin, connect, prepare,
update, verify, finish, commit. It talks to workers directly and to the coordinator only to begin, to
record and to settle. No Ray in here: clients and the coordinator are given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import Any, Protocol

from rayxfer.background import Snapshots, Turns
from rayxfer.call import Call, Offer, Row, mismatch
from rayxfer.channel import Calls, Channel, Link, connect
from rayxfer.client import SLICE_S, client_for, lost_process, outcome, wait_answers
from rayxfer.config import WeightTransferConfig
from rayxfer.daemons import ending, waited_for
from rayxfer.digest import digest_named
from rayxfer.errors import (
    BackendUnavailable,
    ConfigError,
    ContractError,
    PartialUpdate,
    RayxferError,
    StateError,
    TransferError,
    TransferTimeout,
    WorkerLost,
)
from rayxfer.factory import EngineEntry, WeightTransferEngineFactory
from rayxfer.gpus import link_between, uuid_of
from rayxfer.lease import Lease
from rayxfer.metadata import ParamMeta
from rayxfer.packing import ALIGNMENT_BYTES
from rayxfer.report import KEEPER_RANK, SyncReport, WorkerState
from rayxfer.source import Standing, WeightSource, checked_metadata
from rayxfer.stream import Broken, Stream, cancelled
from rayxfer.topology import (
    Facts,
    bucket_size,
    check_agreement,
    choose_backend,
    device_name,
    free_memory,
    local_facts,
    process_gone,
)

__all__ = ["CoordinatorProtocol", "Sender"]

_log = logging.getLogger("rayxfer")

_RETRIES_WITHOUT_LOSS = 1
"""How often a round that broke with nobody lost is tried again before its suspects are left out."""


_JOIN_S = 0.5
"""How long to wait for the threads of a broken stream. One that is stuck in a user's source or engine
is a daemon, and holds nothing but its own channel."""


class CoordinatorProtocol(Protocol):
    """What a sender needs of the controller actor (or of a plain `Coordinator`)."""

    def begin(self, request: dict[str, Any]) -> dict[str, Any]: ...
    def renew(self, claim: dict[str, Any]) -> None: ...
    def commit(
        self, claim: dict[str, Any], rows: list[dict[str, Any]], message: dict[str, Any]
    ) -> dict[str, Any]: ...
    def settle(self, claim: dict[str, Any], rows: list[dict[str, Any]]) -> None: ...


class _Again(Exception):
    """This attempt is over; try again with whoever is left."""


class Sender:
    """Sends one trainer's weights to one controller's workers. Not for concurrent use.

    Args:
        coordinator: the controller actor, or a plain coordinator.
        entries: registrations to ship, by backend.
        fetch_entries: asks for more of them, where a backend is not among those.
    """

    def __init__(
        self,
        coordinator: CoordinatorProtocol,
        entries: dict[str, EngineEntry] | None = None,
        fetch_entries: Callable[[], dict[str, EngineEntry]] = dict,
    ) -> None:
        self._coordinator = coordinator
        self._fetch_entries = fetch_entries
        self._entries = entries or {}
        self._facts: Facts | None = None
        self._config = WeightTransferConfig()
        self._links: dict[int, Link] = {}
        self._roster: str | None = None
        self._channels: list[Channel] = []
        self._kept: dict[str, dict[str, Any]] = {}
        self._base: dict[str, Any] = {}
        self._owner: dict[str, Any] = {}
        self._previous: dict[str, int] = {}
        self._last: tuple[list[ParamMeta], Offer] | None = None
        self._lease = Lease(coordinator.renew)
        self._cancelled = threading.Event()
        self.turns = Turns()
        self.snapshots = Snapshots()

    def orphaned(self) -> bool:
        """Whether the controller is gone for good."""
        alive = getattr(self._coordinator, "alive", None)
        return alive is not None and not alive()

    def cancel(self) -> None:
        """Have a sync under way end soon, with ControllerClosed; there can be none after it."""
        self._cancelled.set()

    def _check_cancelled(self, version: int | None) -> None:
        if self._cancelled.is_set() or ending():
            raise cancelled(version)

    def close(self) -> None:
        """Close every channel, and let kept memory go. Safe to call twice."""
        self._lease.close()
        self.snapshots.close()
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()
        self._kept = {}

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # what closing needs may be gone by then; the kernel frees the rest
            self.close()

    # ---- the whole ------------------------------------------------------------------------------

    def sync(self, source: WeightSource, *, version: int | None, partial: bool) -> SyncReport:
        """One round. See `Controller.sync_weights` for errors and the state after them."""
        with waited_for(self.cancel):
            self._check_cancelled(version)
            return self._sync(source, version, partial)

    def _sync(self, source: WeightSource, version: int | None, partial: bool) -> SyncReport:
        start = time.monotonic()
        offer, standing = self._described(source)
        process = self._local_facts().to_wire()
        grant = self._coordinator.begin(
            {
                "version": version,
                "roster": self._roster,
                "num_tensors": len(offer.metadata),
                "num_bytes": offer.num_bytes,
                "metadata_digest": offer.digest,
                "process": process,
                "partial": partial,
            }
        )
        call = Call(
            source,
            standing,
            offer,
            partial,
            grant["round_id"],
            grant["version"],
            process,
            grant["base"],
        )
        self._lease.start(call.claim())
        try:
            self._adopt(grant)
            for rank, link in self._links.items():
                call.rows[rank] = Row(link, WorkerState.READY, grant["versions"][rank])
            for rank, error in grant["lost"].items():
                call.rows[rank].fail(error, WorkerState.LOST)
            call.deadline = time.monotonic() + self._config.sync_timeout_s
            call.phases["begin"] = time.monotonic() - start
            self._run(call)
        except BaseException as error:
            self._release(call, error)
            raise
        finally:
            self._lease.stop()
        report = call.report(time.monotonic() - start, self._unchanged(call))
        failed = [row for row in report.workers if row.error is not None]
        if failed and self._config.on_worker_failure == "raise":
            who = "; ".join(f"worker {row.rank} is {row.state}: {row.error}" for row in failed)
            raise PartialUpdate(
                f"version {report.version} was committed, but not by every worker: {who}",
                report=report,
                cause=failed[0].error,
            )
        return report

    def _described(self, source: WeightSource) -> tuple[Offer, Standing | None]:
        """The source's metadata, checked, with its digest (remembered, since it rarely changes); and its
        tensors, where they are there already."""
        if self._last is not None:
            standing = source._standing(self._last[1].columns)
            if standing is not None:
                return self._last[1], standing
        offered = source.metadata()
        if self._last is not None and self._last[0] == offered:
            return self._last[1], None
        offer = Offer(checked_metadata(source, offered))
        self._last = (list(offered), offer)
        return offer, source._standing(offer.columns)

    def _run(self, call: Call) -> None:
        limit = 8 + 2 * len(
            call.rows
        )  # workers that come and go for ever must not keep us for ever
        for _ in range(limit):
            self._check_cancelled(call.version)
            links = call.live()
            if not call.serving():
                raise self._nobody(call)
            try:
                self._timed(call, "connect", self._ensure_channels, links)
                links = call.live()
                call.tries += 1
                gated = self._may_be_gated(call, links)
                if not gated:
                    self._timed(call, "prepare", self._prepare, links)
                call.attempts += 1
                self._timed(call, "update", self._update, links, gated)
                self._timed(call, "finish", self._finish)
                break
            except _Again:
                if call.left_s() > 0:
                    continue
                raise self._timeout(
                    call, "update", None, "sync_timeout_s", self._config.sync_timeout_s
                ) from None
        else:
            raise TransferError(
                f"version {call.version} was given up after {limit} tries: workers keep coming and going",
                phase="connect",
                weight_version=call.version,
            )
        self._timed(call, "commit", self._commit)

    @staticmethod
    def _timed(call: Call, phase: str, function: Callable[..., None], *args: Any) -> None:
        start = time.monotonic()
        try:
            function(call, *args)
        finally:
            spent = time.monotonic() - start
            call.phases[phase] = call.phases.get(phase, 0.0) + spent
            if phase == "connect":
                call.deadline += spent  # sync_timeout_s excludes connecting

    def _nobody(self, call: Call) -> RayxferError:
        first = next((row.error for row in call.rows.values() if row.error is not None), None)
        if first is None:
            return TransferError(
                "there is no worker to send to", phase="begin", weight_version=call.version
            )
        kind = TransferTimeout if isinstance(first, TransferTimeout) else TransferError
        return kind(
            f"version {call.version} reached no worker and was not committed: {first}",
            phase=getattr(first, "phase", None),
            weight_version=call.version,
            worker=getattr(first, "worker", None),
            name=getattr(first, "name", None),
            report=call.report(0.0, ()),
            cause=first,
        )

    # ---- membership and channels ----------------------------------------------------------------

    def _local_facts(self) -> Facts:
        if self._facts is None:
            self._facts = local_facts()
        return self._facts

    def _facts_of(self, call: Call) -> Facts:
        """This process's facts, with the device on which the source's tensors are now."""
        if call.standing is not None:
            return self._local_facts()
        device = call.source.weights_device()
        if device.type != "cuda":
            return self._local_facts()
        return dataclasses.replace(
            self._local_facts(), device=device_name(device), free_bytes=free_memory(device)
        )

    def _adopt(self, grant: dict[str, Any]) -> None:
        if grant.get("members") is not None:
            old = self._links
            self._links = {}
            self._config = grant["config"]
            self._owner = grant["owner"]
            self._base = {"controller_id": self._owner["controller_id"]}
            self._roster = grant["roster"]
            for member in grant["members"]:
                rank, known = member["rank"], old.get(member["rank"])
                same = known is not None and known.incarnation == member["incarnation"]
                if known is not None and same and known.facts is not None:
                    known.requested = member["backend"]
                    self._links[rank] = known
                    continue
                self._links[rank] = Link(
                    rank,
                    client_for(member["handle"]),
                    member["backend"],
                    Facts.from_wire(member["facts"]) if member["facts"] else None,
                    member["incarnation"],
                )
        for link in self._links.values():
            link.calls = 0

    def _entry(self, backend: str) -> EngineEntry:
        if backend not in self._entries and backend not in WeightTransferEngineFactory.built_in:
            self._entries |= self._fetch_entries()  # it may have come with a later worker
        if backend not in self._entries:
            self._entries[backend] = WeightTransferEngineFactory.entry(backend)
        return self._entries[backend]

    def _ensure_channels(self, call: Call, links: list[Link]) -> None:
        """Channels over exactly these links; those that fit stay, the others are opened."""
        sender = self._facts_of(call)
        groups: dict[str, list[Link]] = {}
        # the keeper last: who is first on its host has the copy that the others use, and it uses none
        for link in sorted(links, key=lambda one: one.rank == KEEPER_RANK):
            assert link.facts is not None  # only a worker that was never reached has none
            check_agreement(sender, link.facts, link.rank, link.requested)
            if link.requested == "auto":
                choice = choose_backend(
                    sender,
                    link.facts,
                    shm_refused=link.refused.get("shm"),
                    ipc_refused=link.refused.get("ipc"),
                    taken={uuid_of(m.facts.device) for m in groups.get("nccl", ()) if m.facts},
                )
                link.backend, link.reason = choice.backend, choice.reason
                if choice.backend == "nccl" and sender.boot_id == link.facts.boot_id:
                    how = link_between(uuid_of(sender.device), uuid_of(link.facts.device))
                    link.reason += f" ({how})" if how else ""
            else:
                link.backend, link.reason = link.requested, "as configured"
            groups.setdefault(link.backend, []).append(link)
        wanted = {
            (backend, tuple((link.rank, link.incarnation) for link in group)): group
            for backend, group in groups.items()
        }
        kept: list[Channel] = []
        for channel in self._channels:
            moved = channel.plan.sender.device != sender.device
            if not channel.dirty and not moved and channel.key in wanted:
                kept.append(channel)
                del wanted[channel.key]
            else:
                channel.close()
        self._channels = kept
        call.digest = _digest_for(sender, links)
        deadline = time.monotonic() + self._config.connect_timeout_s
        for (backend, _), group in wanted.items():
            self._channels.append(self._open(call, backend, group, deadline))
        for channel in self._channels:
            for link, reached in zip(channel.links, channel.reached, strict=True):
                link.reason += f"; {reached}" if reached else ""

    def _open(self, call: Call, backend: str, group: list[Link], deadline: float) -> Channel:
        entry = self._entry(backend)
        engine_cls = entry.load()
        # never more than the model
        total = sum(m.num_bytes + ALIGNMENT_BYTES for m in call.metadata)
        sender = self._facts_of(call)
        members = [sender, *(link.facts for link in group if link.facts is not None)]
        wanted = self._config.bucket_size_bytes or bucket_size(
            engine_cls.default_bucket_size_bytes, members
        )
        size = max(1, min(wanted, total))
        try:
            return connect(
                backend=backend,
                engine_cls=engine_cls,
                entry=entry,
                links=group,
                config=self._config,
                sender=sender,
                bucket_size_bytes=size,
                metadata=call.metadata,
                kept=self._kept.setdefault(backend, {}),
                base_message=self._base,
                deadline=deadline,
            )
        except (BackendUnavailable, StateError, TransferError) as error:
            rank = getattr(error, "worker", None)
            link = next((one for one in group if one.rank == rank), None)
            if isinstance(error, BackendUnavailable):
                refused = group if link is None else [link]
                if backend in ("shm", "ipc") and all(one.requested == "auto" for one in refused):
                    for one in refused:
                        one.refused[backend] = error.message
                    raise _Again from error
                raise
            if link is None:
                raise
            if isinstance(error, WorkerLost) and self._reattach(call, link):
                raise _Again from error
            call.rows[link.rank].fail(error, WorkerState.LOST)
            raise _Again from error

    def _reattach(self, call: Call, link: Link) -> bool:
        """A worker that lost its session (restarted by Ray, or repaired) is taken in again."""
        # a process that is gone comes back, if at all, later than a round should wait for
        timeout = 0.5 if process_gone(link.facts) else min(self._config.stall_timeout_s, 10.0)
        owner = {**self._owner, "rank": link.rank}
        for op in ("attach", "describe"):
            answer = self._ask(link, op, {"owner": owner}, timeout)
            if isinstance(answer, RayxferError):
                return False
        assert not isinstance(answer, RayxferError)
        if link.incarnation == answer["incarnation"] and answer["owner"] is None:
            return False
        link.incarnation = answer["incarnation"]
        link.facts = Facts.from_wire(answer["facts"])
        link.has_metadata = None
        call.rows[link.rank].version = answer["version"]
        return True

    def _ask(
        self, link: Link, op: str, message: dict[str, Any], timeout_s: float
    ) -> dict[str, Any] | RayxferError:
        """One urgent message and its answer, or the error, or a timeout as an error."""
        future = link.signal(op, {**self._base, **message})
        wait_futures([future], timeout=timeout_s)
        if not future.done():
            return TransferTimeout(
                f"worker {link.rank} did not answer {op!r} within {timeout_s:g} s", worker=link.rank
            )
        return outcome(future, link.rank)

    # ---- phases ---------------------------------------------------------------------------------

    def _fan_out(
        self, call: Call, links: Sequence[Link], op: str, message: Callable[[Link], dict[str, Any]]
    ) -> dict[int, dict[str, Any] | RayxferError]:
        """`op` on every link at once, asked again until done. A link that does not answer in time
        yields `TransferTimeout`."""
        answers: dict[int, dict[str, Any] | RayxferError] = {}
        by_rank = {link.rank: link for link in links}
        heard = dict.fromkeys(by_rank, time.monotonic())
        base = {**self._base, **call.ids(), "wait_s": SLICE_S}

        def send(link: Link) -> Future[dict[str, Any]]:
            return link.call(op, {**base, **message(link)})

        first = Calls(links, op, [{**base, **message(link)} for link in links]).futures()
        pending = {future: link.rank for future, link in zip(first, links, strict=True)}
        while pending:
            done, _ = wait_futures(pending, timeout=0.1, return_when="FIRST_COMPLETED")
            if op != "commit":  # what is recorded is completed
                self._check_cancelled(call.version)
            now = time.monotonic()
            for future in done:
                rank = pending.pop(future)
                heard[rank] = now
                answer = outcome(future, rank)
                if isinstance(answer, dict) and answer.get("done") is False:
                    if call.left_s() > 0:
                        pending[send(by_rank[rank])] = rank
                        continue
                    answer = self._timeout(
                        call, op, rank, "sync_timeout_s", self._config.sync_timeout_s
                    )
                answers[rank] = answer
            limit = SLICE_S + self._config.stall_timeout_s
            for future, rank in list(pending.items()):
                if not done and process_gone(by_rank[rank].facts):
                    del pending[future]
                    answers[rank] = lost_process(rank, op)
                elif now - heard[rank] > limit or call.left_s() <= 0:
                    del pending[future]
                    answers[rank] = self._timeout(
                        call, op, rank, "stall_timeout_s", self._config.stall_timeout_s
                    )
        return answers

    def _timeout(
        self,
        call: Call,
        phase: str,
        rank: int | None,
        key: str,
        seconds: float,
        name: str | None = None,
    ) -> TransferTimeout:
        who = "the sender" if rank is None else f"worker {rank}"
        at = f" at {name!r}" if name else ""
        return TransferTimeout(
            f"{who} made no progress in {phase}{at} of version {call.version} within {key}={seconds:g}",
            phase=phase,
            weight_version=call.version,
            worker=rank,
            name=name,
        )

    def _may_be_gated(self, call: Call, links: list[Link]) -> bool:
        """Whether the offer and its bytes go in one call. Not an offer that is new to a worker: it may be
        refused, and then all that is wrong with it is to be said, by every worker. Nor a part of the model
        that will be of no use to somebody."""
        return (
            len(self._channels) == 1
            and self._channels[0].gated
            and not call.two_steps
            and call.offer.num_bytes > 0
            and all(link.has_metadata == call.offer.digest for link in links)
            and (not call.partial or all(call.rows[n.rank].version == call.base for n in links))
        )

    def _offers(self, call: Call) -> dict[int, dict[str, Any]]:
        """What each worker is told of this round's offer, by rank."""
        messages: dict[int, dict[str, Any]] = {}
        for channel in self._channels:
            for link in channel.links:
                info = channel.engine_cls.round_update_info(channel.handle, call.metadata)
                messages[link.rank] = {
                    "session_id": channel.plan.session_id,
                    "metadata_digest": call.offer.digest,
                    "partial": call.partial,
                    "base": call.base,
                    "digest": call.digest,
                    "update_info": info,
                }
                if link.has_metadata != call.offer.digest:
                    messages[link.rank]["metadata"] = call.offer.wire
        return messages

    def _prepare(self, call: Call, links: list[Link]) -> None:
        """Preflight on every worker. Raises with every problem of every worker; nothing changed."""
        messages = self._offers(call)
        answers = self._fan_out(call, links, "prepare", lambda link: messages[link.rank])
        problems: list[str] = []
        first: tuple[int, str | None] | None = None
        again = False
        for link in links:
            answer = answers[link.rank]
            row = call.rows[link.rank]
            if isinstance(answer, (ConfigError, ContractError)):
                raise answer
            if isinstance(answer, RayxferError):
                row.fail(answer, WorkerState.LOST)
                self._channel_of(link).dirty = True
                again = True
            elif "need" in answer:
                again = True
                link.has_metadata = None
                if answer["need"] != "metadata":
                    self._channel_of(link).dirty = True
                    if not self._reattach(call, link):
                        row.fail(
                            WorkerLost(f"worker {link.rank} lost its session", worker=link.rank),
                            WorkerState.LOST,
                        )
            elif "behind" in answer:
                row.fail(StateError(answer["behind"]), WorkerState(answer["state"]))
                row.version = answer["version"]
                self._channel_of(link).dirty = True
                again = True
            elif "problems" in answer:
                first = first or (link.rank, answer.get("name"))
                problems += [f"worker {link.rank}: {text}" for text in answer["problems"]]
            else:
                link.has_metadata = call.offer.digest
                row.casts = answer["casts"]
                call.kept = answer["kept"]
        if problems:
            assert first is not None
            shown = "\n  ".join(problems[:50])
            more = f"\n  and {len(problems) - 50} more" if len(problems) > 50 else ""
            raise ContractError(
                f"preflight: the offer does not fit; nothing was changed:\n  {shown}{more}",
                phase="prepare",
                problems=tuple(problems),
                worker=first[0],
                name=first[1],
            )
        if again:
            self._abort_workers(call, [one for one in links if call.rows[one.rank].error is None])
            raise _Again

    def _channel_of(self, link: Link) -> Channel:
        return next(channel for channel in self._channels if link in channel.links)

    def _update(self, call: Call, links: list[Link], gated: bool) -> None:
        """Stream to every channel and gather the votes; compare digests."""
        stream = Stream(
            channels=self._channels,
            source=call.source,
            standing=call.standing,
            metadata=call.metadata,
            num_bytes=call.offer.num_bytes,
            wire=call.offer.wire,
            config=self._config,
            digest=digest_named(call.digest) if self._config.verify == "digest" else None,
            base_message={**self._base, **call.ids()},
            version=call.version,
            partial=call.partial,
            prove_all=call.prove_all,
            offers=self._offers(call) if gated else None,
            gate=(call.round_id << 16) + call.tries,
            deadline=call.deadline,
            cancelled=self._cancelled,
        )
        start = time.monotonic()
        broken = stream.run()
        if broken is not None:
            self._clear_up(call, links, stream, broken)
            raise _Again
        call.digests = stream.digests
        failed: list[Link] = []
        for link in links:
            vote = stream.votes[link.rank]
            row = call.rows[link.rank]
            row.seconds = vote.at - start
            error = vote.error or mismatch(vote, stream.digests, call)
            if error is not None:
                row.fail(error, WorkerState.TORN)
                self._channel_of(link).dirty = True
                failed.append(link)
            else:
                row.verified, row.complete, row.finish = vote.verified, vote.complete, vote.finish
                if gated:
                    row.casts, call.kept = vote.casts, vote.kept
        if failed:
            self._abort_workers(call, failed)
            if any(self._lost_copy(call, link) for link in call.live()):
                self._abort_workers(call, call.live())
                raise _Again
        unproven = [link for link in call.live() if stream.votes[link.rank].shared]
        if any(not self._proven(call, link, stream) for link in unproven):
            # whoever was to prove the shared copy failed, or does not use it: each for itself, then
            call.prove_all = True
            self._abort_workers(call, call.live())
            raise _Again

    def _lost_copy(self, call: Call, link: Link) -> bool:
        """Whether what this worker got lies with another that was aborted, and so has closed its files to
        whoever has not gone over to them."""
        if self._config.load_mode != "mapped" or call.partial:
            return False
        owner = self._channel_of(link).owner(link)
        return owner is not None and call.rows[owner.rank].error is not None

    def _proven(self, call: Call, link: Link, stream: Stream) -> bool:
        """Whether another worker has proven the copy that this one uses."""
        prover = self._channel_of(link).prover(link)
        if prover is None or call.rows[prover.rank].error is not None:
            return False
        return stream.votes[prover.rank].shared_proof

    def _clear_up(self, call: Call, links: list[Link], stream: Stream, broken: Broken) -> None:
        """After a broken stream: free everyone, decide who is out. Raises if no retry can help."""
        for rank, error in broken.failed.items():
            call.rows[rank].fail(error, WorkerState.TORN)
        for rank, error in broken.lost.items():
            call.rows[rank].fail(error, WorkerState.LOST)
        for channel in self._channels:
            channel.abort()
        self._abort_workers(call, links)
        if not stream.join(_JOIN_S):
            self._kept = {}  # whoever is stuck may still write to memory that was to be used again
        if broken.fatal is not None:
            raise broken.fatal
        if call.left_s() <= 0:
            raise self._timeout(call, "update", None, "sync_timeout_s", self._config.sync_timeout_s)
        if broken.refused:
            call.two_steps = True
            call.attempts -= 1  # nothing of it was sent
            return
        if any(call.rows[link.rank].error is not None for link in links):
            return
        call.glitches += 1
        if call.glitches > _RETRIES_WITHOUT_LOSS:
            if not broken.suspects:
                raise broken.error
            for rank, error in broken.suspects.items():
                row = call.rows[rank]
                row.fail(error, row.left_as)

    def _abort_workers(self, call: Call, links: Sequence[Link]) -> None:
        """Tell workers that the round is over; rows learn what state that left them in.

        Lost workers are told as well (a stopped one may wake up), but not waited for.
        """
        timeout = self._config.stall_timeout_s
        message = {**self._base, **call.ids(), "timeout_s": timeout}
        futures = {link.rank: link.signal("abort", message) for link in links}
        waited = {r: f for r, f in futures.items() if call.rows[r].state != WorkerState.LOST}
        facts = {link.rank: link.facts for link in links}
        answers = wait_answers(waited, facts, timeout + 1.0)
        for link in links:
            self._channel_of(link).dirty = True
            if link.rank not in waited:
                continue
            row, answer = call.rows[link.rank], answers[link.rank]
            if answer is None or (isinstance(answer, dict) and answer.get("stuck")):
                answer = self._timeout(call, "abort", link.rank, "stall_timeout_s", timeout)
            if isinstance(answer, RayxferError):
                row.fail(answer, WorkerState.LOST)
                continue
            row.left_as, row.version = WorkerState(answer["state"]), answer["version"]
            if row.error is not None:
                row.state = row.left_as

    def _finish(self, call: Call) -> None:
        """All live workers voted: finish on each. One that fails is TORN; the others go on."""
        links = call.live()
        if not call.serving():
            raise self._nobody(call)
        failed = []
        asked = [link for link in links if call.rows[link.rank].finish]
        for rank, answer in self._fan_out(call, asked, "finish", lambda link: {}).items():
            if isinstance(answer, RayxferError):
                lost = isinstance(answer, (WorkerLost, TransferTimeout))
                call.rows[rank].fail(answer, WorkerState.LOST if lost else WorkerState.TORN)
                self._channel_of(call.rows[rank].link).dirty = True
                if not lost:
                    failed.append(call.rows[rank].link)
        if failed:
            self._abort_workers(call, failed)
        if not call.serving():
            raise self._nobody(call)

    def _commit(self, call: Call) -> None:
        """Record the version; then caches and resume. What fails now makes a worker TORN.

        The controller does all of it in the one call if every worker is quick; this finishes the rest.
        """
        hoped = call.settled(committed=True)
        said = self._coordinator.commit(call.claim(), hoped, {**self._base, **call.ids()})
        links = {link.rank: link for link in call.live()}
        answers: dict[int, dict[str, Any] | RayxferError] = {}
        for rank, answer in said["answers"].items():
            links[rank].calls += 1
            if isinstance(answer, RayxferError) or answer.get("done"):
                answers[rank] = answer
        slow = [link for rank, link in links.items() if rank not in answers]
        answers |= self._fan_out(call, slow, "commit", lambda link: {})
        for rank, answer in answers.items():
            row = call.rows[rank]
            if isinstance(answer, RayxferError):
                lost = isinstance(answer, (WorkerLost, TransferTimeout))
                row.fail(answer, WorkerState.LOST if lost else WorkerState.TORN)
                self._channel_of(row.link).dirty = True
            else:
                row.state, row.version = WorkerState.READY, call.version
        if said["settled"]:
            return
        with contextlib.suppress(StateError):  # committed all the same: the controller asks around
            self._coordinator.settle(call.claim(), call.settled())

    # ---- ends -----------------------------------------------------------------------------------

    def _release(self, call: Call, error: BaseException) -> None:
        """The call failed: free whoever still waits, and close the round."""
        try:
            live = [link for link in call.live() if any(link in c.links for c in self._channels)]
            self._abort_workers(call, live)
            why = error if isinstance(error, RayxferError) else TransferError(repr(error))
            for link in live:
                row = call.rows[link.rank]
                if row.error is None and row.left_as == WorkerState.TORN:
                    row.fail(why, WorkerState.TORN)
        finally:
            # the caller is to see the first error
            with contextlib.suppress(RayxferError):
                self._coordinator.settle(call.claim(), call.settled())
            channels, self._channels = self._channels, []
            for channel in channels:  # of no use any more; and the interpreter may be about to end
                try:
                    channel.close()
                except Exception:  # a custom engine's
                    _log.warning("closing %r failed", channel.backend, exc_info=True)

    def _unchanged(self, call: Call) -> tuple[str, ...]:
        """The names whose bytes are those of the last sync that had them, where digests tell."""
        if call.digests is None:
            return ()
        names = call.offer.columns.names
        before = map(self._previous.get, names)
        same = zip(names, before, call.digests, strict=True)
        unchanged = tuple([name for name, old, new in same if old == new])
        self._previous.update(zip(names, call.digests, strict=True))
        return unchanged


def _digest_for(sender: Facts, links: Sequence[Link]) -> str:
    """Of the tensors: one that GPUs compute, where all of them are on a GPU at both ends."""
    everywhere = [sender, *(link.facts for link in links if link.facts is not None)]
    return "words" if all(uuid_of(facts.device) for facts in everywhere) else "xxh3"
