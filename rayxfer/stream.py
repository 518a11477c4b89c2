"""The update phase: threads that feed and send, and a loop that watches workers, sender and clocks."""

from __future__ import annotations

import array
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from rayxfer.channel import Calls, Channel, Link
from rayxfer.client import SLICE_S, lost_process, outcome
from rayxfer.config import WeightTransferConfig
from rayxfer.daemons import daemon
from rayxfer.digest import Digest
from rayxfer.errors import (
    ContractError,
    ControllerClosed,
    RayxferError,
    TransferError,
    TransferTimeout,
    WorkerLost,
    portable_cause,
)
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.feed import Batch, Feed
from rayxfer.metadata import ParamMeta, metadata_to_wire
from rayxfer.reading import Reading, yields_at_once
from rayxfer.source import Standing, WeightSource
from rayxfer.threads import gpu_of_this_thread
from rayxfer.topology import process_gone

__all__ = ["Broken", "Stream", "Vote"]

_BATCH_BYTES = 8 << 20
_BATCH_TEMPORARY_BYTES = 1 << 20
_BATCH_TENSORS = 512
_LITTLE_BYTES = 1 << 20
_LOOK_EVERY_S = 0.09
_GRACE_S = 0.5
"""After one worker's transport broke: how long to wait for the news that another one died."""


_Step = tuple[str, int, Callable[[], None]]
"""Kind, index and function of what a thread does."""


@dataclass
class Vote:
    """What one worker said at the end of its update."""

    rank: int
    at: float
    error: RayxferError | None = None
    digests: Sequence[int] = ()
    verified: str = "off"
    complete: bool | None = None
    shared: bool = False
    """Whether it left the proof to the channel's prover: it uses the same copy."""
    shared_proof: bool = False
    """Whether its digests are of such a copy."""
    finish: bool = False
    """Whether the worker has something to run before the version is recorded."""
    casts: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    """Of a gated round: what the worker found in its preflight."""


@dataclass
class Broken:
    """Why a stream ended early.

    Attributes:
        error: the first error.
        fatal: set if no retry can help (the source is at fault, or time is up).
        lost: workers that are gone or stalled.
        failed: workers whose loader raised, or that voted no; they sit out the rest of the call.
        suspects: workers whose own transport failed with nobody known to be lost.
        channel: the channel whose sending failed, if that was it.
        refused: a worker did not take the offer; nothing was sent to anybody.
    """

    error: RayxferError
    fatal: RayxferError | None = None
    lost: dict[int, RayxferError] = field(default_factory=dict)
    failed: dict[int, RayxferError] = field(default_factory=dict)
    suspects: dict[int, RayxferError] = field(default_factory=dict)
    channel: int | None = None
    refused: bool = False


def cancelled(version: int | None) -> ControllerClosed:
    """Why a sync that somebody called off ends."""
    which = "a sync" if version is None else f"the sync of version {version}"
    return ControllerClosed(
        f"{which} was called off: its controller was shut down, or this process ends"
    )


class _Push:
    """Sends the payloads of a `uses_push` channel with the workers' update calls."""

    def __init__(self, stream: Stream, channel: Channel) -> None:
        self._stream, self._channel = stream, channel
        self._changed = threading.Condition()
        self._error: RayxferError | None = None

    def send(self, sequence: int, payload: Any, *, last: bool) -> None:
        for link in self._channel.links:
            self._stream.ask(link, {"sequence": sequence, "payload": payload, "last": last})

    def wait(self, sequence: int) -> None:
        """Return once every worker still in the round has consumed payload `sequence`."""
        with self._changed:
            while self._error is None and any(
                link.acked <= sequence and link.rank not in self._stream.votes
                for link in self._channel.links
            ):
                self._changed.wait(SLICE_S)
        if self._error is not None:
            raise self._error

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def abort(self, error: RayxferError) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()


class Stream:
    """One pass over the source into every channel. `run` returns None, or why it broke.

    offers: what each worker is told of the offer, by rank, where it was not asked before; nothing is sent
        before all have taken it then. `gate` is the number by which they say so.
    """

    def __init__(
        self,
        *,
        channels: Sequence[Channel],
        source: WeightSource,
        standing: Standing | None,
        metadata: tuple[ParamMeta, ...],
        num_bytes: int,
        wire: dict[str, Any],
        config: WeightTransferConfig,
        digest: Digest | None,
        base_message: dict[str, Any],
        version: int,
        partial: bool,
        prove_all: bool,
        offers: dict[int, dict[str, Any]] | None,
        gate: int,
        deadline: float,
        cancelled: threading.Event | None = None,
    ) -> None:
        self._cancelled = cancelled
        self._wire = wire
        self._channels = channels
        self._source = source
        self._metadata = metadata
        self._config = config
        self._base = base_message
        self._version = version
        self._partial = partial
        self._prove_all = prove_all
        self._offers, self._gate = offers, gate
        self._deadline = deadline
        # one channel's copies are enough to know what was read
        self._feeds = [
            Feed(digesting=digest if i == 0 else None, stays=source.stable)
            for i in range(len(channels))
        ]
        self._pushes = [_Push(self, c) if c.engine_cls.uses_push else None for c in channels]
        self._threads: list[threading.Thread] = []
        self._events: queue.SimpleQueue[tuple[str, int, Any]] = queue.SimpleQueue()
        self._links = {link.rank: link for channel in channels for link in channel.links}
        self._channel_of = {
            link.rank: index for index, channel in enumerate(channels) for link in channel.links
        }
        self._outstanding = dict.fromkeys(self._links, 0)
        self._heard = dict.fromkeys(self._links, time.monotonic())
        self._counting = threading.Lock()
        self._looked = time.monotonic()
        self._bytes = dict.fromkeys(self._links, 0)
        self._busy = dict.fromkeys(self._links, False)
        self._at_gate = dict.fromkeys(self._links, False)
        self._failed: dict[int, RayxferError] = {}
        self._moved = [time.monotonic() for _ in channels]
        self._handed = [0 for _ in channels]
        self._sent: set[int] = set()
        self._reading = Reading(source, metadata, version)
        self._fed = False
        # What is there already needs nobody to read it; what is soon there (views of tensors, a cast) no
        # thread of its own: two that take turns at small tensors cost more than one.
        self._standing = standing
        one = standing is None and len(channels) == 1
        self._alone = one and source.stable and yields_at_once(source)
        self._little = num_bytes <= _LITTLE_BYTES
        self.votes: dict[int, Vote] = {}

    @property
    def digests(self) -> list[int] | None:
        """Of every tensor, as the sender read it; None with verification off. Complete after `run`."""
        return self._feeds[0].digests if self._feeds else None

    # ---- threads --------------------------------------------------------------------------------

    def _spawn(self, *steps: _Step) -> None:
        """Run one step after the other in a thread that has the caller's context and torch modes;
        report the end of each. One that fails is the last."""
        context = contextvars.copy_context()
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        take_over_gpu = gpu_of_this_thread()

        def run() -> None:
            for kind, index, function in steps:
                error: BaseException | None = None
                try:
                    take_over_gpu()
                    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                        context.run(function)
                except BaseException as caught:
                    error = caught
                self._events.put((kind, index, error))
                if error is not None:
                    return

        kind, index, _ = steps[-1]
        self._threads.append(daemon(run, f"rayxfer-{kind}-{index}"))

    def _send(self, index: int) -> None:
        channel, feed, push = self._channels[index], self._feeds[index], self._pushes[index]
        wire = self._wire
        if channel.backend not in WeightTransferEngineFactory.built_in:
            wire = metadata_to_wire(self._metadata)  # theirs: they may do with it what they like
        update_info = {
            "names": wire["names"],
            "dtype_names": wire["dtype_names"],
            "shapes": wire["shapes"],
            **self._config.update_info,
        }
        args: dict[str, Any] = {
            **channel.init_info,
            "init_info": dict(channel.init_info),
            "update_info": update_info,
            "weight_version": self._version,
            "num_workers": len(channel.plan.workers),
            **self._config.trainer_args,
        }
        if channel.handle is not None:
            args["channel"] = channel.handle
            args["stable"] = self._source.stable
            args["partial"] = self._partial
        if self._offers is not None:
            args["gate"] = self._gate
        if push is not None:
            args["push"] = push
        try:
            channel.engine_cls.trainer_send_weights(feed, args)
            if feed.pull is not None and feed.handed == len(self._metadata):
                next(feed, None)  # the source is to be over, whether or not the engine asks
        finally:
            feed.finish()
        if feed.handed != len(self._metadata):
            raise ContractError(
                f"backend {channel.backend!r} sent {feed.handed} of {len(self._metadata)} tensors"
            )

    def _feed(self) -> None:
        if self._alone:
            self._feeds[0].pull = self._pull
            return
        for batch, temporary_bytes in self._batches():
            self._hand(batch, temporary_bytes, until_consumed=not self._source.stable)
            del batch
        for feed in self._feeds:
            feed.close()

    def _pull(self) -> Iterator[tuple[Batch, int]]:
        """The batches, for the thread that sends to make them itself."""
        try:
            yield from self._batches()
        except Exception as error:
            self._events.put(("feeder", 0, error))  # the source's fault, not the channel's
            raise

    def _batches(self) -> Iterator[tuple[Batch, int]]:
        """The source's tensors, some at a time, and how many bytes of them were made for this pass."""
        one_by_one = not self._source.stable
        clone = one_by_one and not all(c.engine_cls.copies_before_next for c in self._channels)
        batch: Batch = []
        batch_bytes = temporary_bytes = 0
        for meta, value, temporary in self._reading:
            if clone:
                value = value.clone()
            batch.append((meta.name, value))
            # what stays where it is, and is not digested meanwhile, may be handed on in any amount
            costs = clone or self.digests is not None or value.is_cpu
            batch_bytes += value.nbytes if costs else 0
            temporary_bytes += meta.num_bytes if temporary or clone else 0
            if (
                one_by_one
                or batch_bytes >= _BATCH_BYTES
                or temporary_bytes >= _BATCH_TEMPORARY_BYTES
                or len(batch) >= _BATCH_TENSORS
            ):
                del value
                full, made = batch, temporary_bytes
                batch, batch_bytes, temporary_bytes = [], 0, 0
                yield full, made
                del full
        if batch:
            yield batch, temporary_bytes

    def _hand(
        self, batch: list[tuple[str, torch.Tensor]], temporary_bytes: int, *, until_consumed: bool
    ) -> None:
        for feed in self._feeds:
            feed.put(batch, temporary_bytes)
        if until_consumed:
            for feed in self._feeds:
                feed.wait_consumed()

    # ---- calls to workers -----------------------------------------------------------------------

    def ask(self, link: Link, extra: dict[str, Any]) -> None:
        """One update call. Thread-safe."""
        self._count(link)
        future = link.call("update", {**self._base, "wait_s": SLICE_S, **extra})
        self._await(link, future)

    def _count(self, link: Link) -> None:
        with self._counting:
            if not self._outstanding[link.rank]:
                self._heard[link.rank] = time.monotonic()  # nothing was asked of it until now
            self._outstanding[link.rank] += 1

    def _await(self, link: Link, future: Future[dict[str, Any]]) -> None:
        future.add_done_callback(lambda done: self._events.put(("worker", link.rank, done)))

    # ---- the loop -------------------------------------------------------------------------------

    def run(self) -> Broken | None:
        first: list[Link] = []
        messages: list[dict[str, Any]] = []
        for index, channel in enumerate(self._channels):
            for link in channel.links:
                link.acked = 0
                if self._pushes[index] is None or not self._metadata:
                    self._count(link)
                    first.append(link)
                    # of workers that use one copy, one is enough to prove it
                    prove = self._prove_all or link is channel.prover(link)
                    message = {**self._base, "wait_s": SLICE_S, "prove": prove}
                    if self._offers is not None:
                        message |= {**self._offers[link.rank], "gate": self._gate}
                    messages.append(message)
        sending: list[_Step] = [
            ("channel", index, functools.partial(self._send, index))
            for index in range(len(self._channels))
        ]
        threads = [[step] for step in sending]
        if self._standing is not None:
            for feed in self._feeds:
                feed.stand(self._standing)
            self._fed = True
        elif self._alone:
            threads[0].insert(0, ("feeder", 0, self._feed))
        else:
            threads.append([("feeder", 0, self._feed)])
        if self._fed and self._little:
            # first: it is soon done, and then no worker has to wait for what it sends
            for steps in threads:
                self._spawn(*steps)
            threads = []
        calls = Calls(first, "update", messages)
        for steps in threads:
            self._spawn(*steps)
        for link, future in zip(first, calls.futures(), strict=True):
            self._await(link, future)
        while True:
            if self._complete():
                return None
            if self._cancelled is not None and self._cancelled.is_set():
                error = cancelled(self._version)
                return self._break(Broken(error, fatal=error))
            try:
                event = self._events.get(timeout=0.1)
            except queue.Empty:
                broken = self._overdue()
            else:
                broken = self._on(*event) or (self._overdue() if self._events.empty() else None)
            if broken is not None:
                return self._break(broken)

    def _complete(self) -> bool:
        return (
            self._fed
            and len(self._sent) == len(self._channels)
            and len(self.votes) == len(self._links)
        )

    def _on(self, kind: str, index: int, what: Any) -> Broken | None:
        if kind == "worker":
            return self._on_answer(index, what)
        if what is None:
            if kind == "feeder":
                self._fed = True
            else:
                self._sent.add(index)
                self._moved[index] = time.monotonic()
            return None
        error = (
            what
            if isinstance(what, RayxferError)
            else TransferError(
                f"{kind} failed: {type(what).__name__}: {what}",
                phase="update",
                weight_version=self._version,
                cause=portable_cause(what),
            )
        )
        if kind == "feeder" or isinstance(error, ContractError):
            return Broken(error, fatal=error)
        return Broken(error, channel=index)

    def _on_answer(self, rank: int, future: Future[dict[str, Any]]) -> Broken | None:
        link, index = self._links[rank], self._channel_of[rank]
        now = time.monotonic()
        with self._counting:
            self._outstanding[rank] -= 1
            self._heard[rank] = now
        answer = outcome(future, rank)
        push = self._pushes[index]
        if rank in self.votes:
            return None
        if isinstance(answer, RayxferError):
            answer.__dict__.setdefault("phase", "update")
            if isinstance(answer, WorkerLost):
                return Broken(answer, lost={rank: answer})
            if getattr(answer, "phase", None) in ("load", "verify"):
                return self._vote(Vote(rank, now, error=answer))  # drained: the channel is fine
            return Broken(answer, suspects={rank: answer})
        if "refused" in answer:
            error = TransferError(f"worker {rank} does not take the offer: {answer['refused']}")
            return Broken(error, refused=True)
        if not answer["done"]:
            if (
                answer["num_bytes"] != self._bytes[rank]
                or answer["busy"]
                or answer["acked"] > link.acked
                or (self._at_gate[rank] and not answer.get("at_gate"))
            ):
                self._moved[index] = now
            self._bytes[rank], self._busy[rank] = answer["num_bytes"], answer["busy"]
            self._at_gate[rank] = answer.get("at_gate", False)
            link.acked = max(link.acked, answer["acked"])
            if push is not None:
                push.notify()
            if answer["failed"] is not None:
                self._failed[rank] = answer["failed"]
                if len(self._failed) == len(self._links):
                    return Broken(answer["failed"])  # nobody is left to send to
            if (push is None or self._sent_all(index)) and self._outstanding[rank] == 0:
                self.ask(link, {})
            return None
        self._moved[index] = now
        digests = array.array("Q")
        digests.frombytes(answer["digests"])
        return self._vote(
            Vote(
                rank,
                now,
                None,
                digests,
                answer["verified"],
                answer["complete"],
                answer.get("shared", False),
                answer.get("shared_proof", False),
                answer["finish"],
                answer.get("casts", {}),
                answer.get("kept", []),
            )
        )

    def _sent_all(self, index: int) -> bool:
        return index in self._sent or self._feeds[index].handed == len(self._metadata)

    def _vote(self, vote: Vote) -> Broken | None:
        self.votes[vote.rank] = vote
        if vote.error is not None:
            self._failed[vote.rank] = vote.error
        push = self._pushes[self._channel_of[vote.rank]]
        if push is not None:
            push.notify()
        if vote.error is not None and len(self._failed) == len(self._links):
            return Broken(vote.error)  # nobody is left to send to
        return None

    def _overdue(self) -> Broken | None:
        """Which clock has run out, and whose fault that is."""
        now, stall = time.monotonic(), self._config.stall_timeout_s
        if now > self._deadline:
            error = self._timeout("sync_timeout_s", self._config.sync_timeout_s, None)
            return Broken(error, fatal=error)
        since = self._reading.in_source_since
        if since is not None and now - since > stall:
            error = self._timeout("stall_timeout_s", stall, None)
            return Broken(error, fatal=error)
        look = now - self._looked > _LOOK_EVERY_S  # at /proc: cheap, but not after every event
        if look:
            self._looked = now
        for rank, link in self._links.items():
            if look and rank not in self.votes and process_gone(link.facts):
                lost = lost_process(rank, "update")
                return Broken(lost, lost={rank: lost})
            if (
                rank not in self.votes
                and self._outstanding[rank]
                and now - self._heard[rank] > SLICE_S + stall
            ):
                error = self._timeout("stall_timeout_s", stall, rank)
                return Broken(error, lost={rank: error})
        for index, channel in enumerate(self._channels):
            waiting = [link for link in channel.links if link.rank not in self.votes]
            if index in self._sent and not waiting:
                continue
            handed, self._handed[index] = self._handed[index], self._feeds[index].handed
            read_on = not waiting and handed != self._handed[index]  # digests what all have got
            if read_on or (self._feeds[index].starved and index not in self._sent):
                self._moved[index] = now
                continue
            if any(self._busy[link.rank] for link in waiting):
                continue
            # whoever is at the gate waits for those that are not
            late = [link for link in waiting if not self._at_gate[link.rank]]
            if waiting and not late:
                self._moved[index] = now
                continue
            if now - self._moved[index] > stall + SLICE_S:
                if not waiting:  # every worker has it all, and the sending engine does not return
                    error = self._timeout("stall_timeout_s", stall, None)
                    return Broken(error, fatal=error)
                if self._config.load_mode == "mapped" and not self._partial:
                    late = channel.comparable(late)
                least = min(self._bytes[link.rank] for link in late)
                slow = channel.nearest([x for x in late if self._bytes[x.rank] == least])
                errors: dict[int, RayxferError] = {
                    link.rank: self._timeout("stall_timeout_s", stall, link.rank) for link in slow
                }
                return Broken(next(iter(errors.values())), lost=errors)
        return None

    def _timeout(self, key: str, seconds: float, rank: int | None) -> TransferTimeout:
        who = "the source" if rank is None else f"worker {rank}"
        name = self._reading.at_name
        return TransferTimeout(
            f"{who} made no progress at {name!r} of version {self._version} within {key}={seconds:g}",
            phase="update",
            weight_version=self._version,
            worker=rank,
            name=name,
        )

    def _break(self, broken: Broken) -> Broken:
        """Stop everything; then listen for a moment who else is gone, for that is the root."""
        for feed in self._feeds:
            feed.abort(broken.error)
        for push in self._pushes:
            if push is not None:
                push.abort(broken.error)
        # Whoever else fails in a channel that was whole until now fails because it was just broken off.
        torn = {broken.channel, *(self._channel_of[rank] for rank in broken.suspects)}
        if broken.fatal is None and not broken.lost and not broken.refused:
            until = time.monotonic() + _GRACE_S
            while time.monotonic() < until and not broken.lost:
                for rank, link in self._links.items():
                    if process_gone(link.facts):
                        broken.lost[rank] = lost_process(rank, "update")
                try:
                    kind, index, what = self._events.get(timeout=0.05)
                except queue.Empty:
                    continue
                if kind != "worker":
                    continue
                answer = outcome(what, index)
                if isinstance(answer, WorkerLost):
                    broken.lost[index] = answer
                elif isinstance(answer, RayxferError) and self._channel_of[index] in torn:
                    broken.suspects[index] = answer
        broken.failed = dict(self._failed)
        return broken

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; False if one is stuck (it is a daemon and holds only its channel)."""
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)
