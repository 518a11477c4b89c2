"""The controller actor's plain class: membership, rounds, versions. No tensor passes through it.

It grants one round at a time, records commits, and keeps who is a member. Senders talk to workers
directly; they come here to begin, to renew their lease, to record and to settle. What it knows can be
rebuilt from the workers (`recover`), each of which stores its controller, the roster and its version.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass, field
from typing import Any

from rayxfer.client import SLICE_S, WorkerClient, client_for, outcome, start_all
from rayxfer.config import WeightTransferConfig
from rayxfer.errors import (
    ConfigError,
    ControllerBusy,
    ControllerClosed,
    RayxferError,
    StateError,
    TransferError,
    TransferTimeout,
    WorkerLost,
)
from rayxfer.report import KEEPER_RANK, Status, WorkerState, WorkerStatus
from rayxfer.topology import Facts, process_gone

__all__ = ["Coordinator", "RosterNeeded"]

_TELL_S = 0.1
_REJOIN_TIMEOUT_S = 2.0
"""How long a round's begin looks for workers that were lost before."""


class RosterNeeded(StateError):
    """This controller was restarted and no worker could tell it where it was: a handle has to
    (`Coordinator.present`)."""


@dataclass
class _Member:
    rank: int
    handle: Any
    client: WorkerClient
    requested: str
    backend: str
    state: WorkerState = WorkerState.CONNECTING
    version: int = 0
    incarnation: str = ""
    facts: dict[str, Any] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    error: RayxferError | None = None
    leaving: bool = False


@dataclass
class _Open:
    """The round under way."""

    round_id: int
    version: int
    renewed: float
    process: Facts
    committed: bool = False


class Coordinator:
    """Plain and thread-safe; `controller.py` wraps it as a Ray actor.

    Args:
        name: the controller's name, unique in its namespace.
        workers: handles (or clients), in rank order.
        config: the user's settings.
        entries: what senders need to ship engines; relayed as bytes, never unpickled here.
        keeper: the handle of a `Keeper`, for retain="host".
        controller_id: identifies this controller through restarts; default random.
        owner_alive: tells whether the controller of an owner record (name, controller_id) lives;
            a worker whose owner is dead may be taken over.
    """

    def __init__(
        self,
        name: str,
        workers: list[Any],
        config: WeightTransferConfig,
        entries: bytes = b"",
        controller_id: str | None = None,
        owner_alive: Callable[[dict[str, Any]], bool] = lambda owner: True,
        keeper: Any = None,
    ) -> None:
        self._name = name
        self._config = config
        self._entries = [entries] if entries else []
        self._owner_alive = owner_alive
        self._controller_id = controller_id or secrets.token_hex(8)
        self._epoch = 1
        self._lock = threading.RLock()
        self._members: dict[int, _Member] = {}
        self._next_rank = 0
        self._roster_sequence = 0
        self._version = 0
        self._next_round = 1
        self._open: _Open | None = None
        self._settled_round = -1
        self._recovered = False
        self._unsure = False
        self._closed = False
        self._roster = ""
        self._survey: dict[int, Future[dict[str, Any]]] = {}
        self._requested = [self.key_of(worker) for worker in workers]
        for index, worker in enumerate(workers):
            self._add(self._next_rank, worker, config.backend_of(index))
        if keeper is not None:
            self._add(KEEPER_RANK, keeper, "auto")

    # ---- membership -----------------------------------------------------------------------------

    @staticmethod
    def key_of(worker: Any) -> str:
        """The same for two handles of one actor, or two clients of one address."""
        if isinstance(worker, WorkerClient) and worker.key is not None:
            return worker.key
        actor_id = getattr(worker, "_actor_id", None)
        return str(id(worker)) if actor_id is None else str(actor_id.hex())

    def _add(self, rank: int, worker: Any, backend: str) -> _Member:
        client = client_for(worker)
        client.check()
        if any(self.key_of(m.handle) == self.key_of(worker) for m in self._members.values()):
            raise ConfigError(f"worker {rank} is already a member: a worker has one rank")
        member = _Member(rank, worker, client, backend, backend)
        self._members[rank] = member
        self._next_rank = max(self._next_rank, rank + 1)
        self._roster_sequence += 1
        self._touch_roster()
        return member

    def _touch_roster(self) -> None:
        self._roster = secrets.token_hex(4)

    def _owner_record(self) -> dict[str, Any]:
        """What every worker stores: enough to rebuild this controller from any of them."""
        return {
            "name": self._name,
            "controller_id": self._controller_id,
            "epoch": self._epoch,
            "version": self._version,
            "next_rank": self._next_rank,
            "roster_sequence": self._roster_sequence,
            "roster": [
                {"rank": m.rank, "handle": m.handle, "backend": m.requested}
                for m in self._members.values()
                if not m.leaving
            ],
        }

    def open(self) -> None:
        """Reach every member and become its controller. The highest version that any of them holds
        is the committed one; those that do not hold it catch up from one that does.

        Raises:
            ConfigError: one is no inference worker, or belongs to a live controller.
            BackendUnavailable: one cannot run the backend asked for.
            TransferTimeout, WorkerLost: one does not answer within connect_timeout_s.
        """
        with self._lock:
            self._unsure = False
            members = list(self._members.values())
            for error in self._welcome(members, self._config.connect_timeout_s).values():
                raise error
            # a TORN worker holds its version no more, but that version was committed all the same
            self._version = max([self._version, *(m.version for m in members)])
            for member in members:
                member.state = self._judge(WorkerState(member.about["state"]), member.version)
            self._catch_up(members)

    def recover(self, *, vouched: bool = False) -> None:
        """After a restart: rebuild members, version and round ids from the workers. Never raises for
        workers that are gone: they are LOST.

        If none of them remembers this controller, it does nothing until one does, or a handle
        vouches for what it knows (`present`): it would begin at version 0 again.
        """
        with self._lock:
            self._recovered = True
            described: dict[int, dict[str, Any] | RayxferError] = {}
            latest = (-1, -1)
            while todo := [m for m in self._members.values() if m.rank not in described]:
                answers = self._ask_all(todo, "describe", {}, _REJOIN_TIMEOUT_S)
                described |= answers
                for answer in answers.values():
                    owner = None if isinstance(answer, RayxferError) else answer["owner"]
                    if owner is None or owner["controller_id"] != self._controller_id:
                        continue
                    assert isinstance(answer, dict)
                    self._version = max(self._version, owner["version"], answer["version"])
                    self._next_round = max(self._next_round, answer["last_round"] + 1)
                    self._next_rank = max(self._next_rank, owner["next_rank"])
                    self._epoch = max(self._epoch, owner["epoch"] + 1)
                    written = (owner["epoch"], owner["roster_sequence"])
                    if written > latest and owner["roster"]:
                        latest = written
                        self._follow(owner["roster"], described)
            self._unsure = not vouched and latest < (0, 0)
            if self._unsure:
                return
            self._roster_sequence = max(self._roster_sequence, latest[1] + 1)
            self._welcome(list(self._members.values()), _REJOIN_TIMEOUT_S, described)

    def present(self, told: dict[str, Any]) -> None:
        """What a handle remembers (`rayxfer.memory`): taken by a controller that knows less. Any worker
        among those that remembers this controller counts for more.

        Raises:
            ControllerBusy: a round is under way.
        """
        with self._lock:
            if not self._unsure and told["version"] <= self._version:
                return
            self._check_open()
            self._version = max(self._version, told["version"])
            self._next_round = max(self._next_round, told["round"] + 1)
            self._next_rank = max(self._next_rank, told["next_rank"])
            self._epoch = max(self._epoch, told["epoch"] + 1)
            vouched = told["roster"] is not None or not self._unsure
            if self._unsure and vouched:  # the constructor's list is older than any handle's
                self._members = {r: m for r, m in self._members.items() if r == KEEPER_RANK}
            known = {self.key_of(m.handle) for m in self._members.values()}
            for entry in told["roster"] or ():
                if self.key_of(entry["handle"]) not in known:
                    taken = entry["rank"] in self._members
                    rank = self._next_rank if taken else entry["rank"]
                    self._add(rank, entry["handle"], entry["backend"])
            self.recover(vouched=vouched)

    def _follow(
        self, roster: list[dict[str, Any]], described: dict[int, dict[str, Any] | RayxferError]
    ) -> None:
        """Make the members those of a stored roster: it is newer than the constructor's list."""
        by_key = {self.key_of(m.handle): m for m in self._members.values()}
        answers = {self.key_of(m.handle): described.get(m.rank) for m in by_key.values()}
        self._members = {}
        described.clear()
        for entry in roster:
            key = self.key_of(entry["handle"])
            member = self._add(entry["rank"], entry["handle"], entry["backend"])
            answer = answers.get(key)
            if answer is not None:
                described[member.rank] = answer

    def _ask_all(
        self, members: Iterable[_Member], op: str, message: dict[str, Any], timeout_s: float
    ) -> dict[int, dict[str, Any] | RayxferError]:
        """One urgent message to each, all at once; an answer or an error for each."""
        chosen = list(members)
        futures = {m.rank: m.client.signal(op, {**message, "backend": m.requested}) for m in chosen}
        if futures:
            wait_futures(futures.values(), timeout=timeout_s)
        answers: dict[int, dict[str, Any] | RayxferError] = {}
        for member in chosen:
            future = futures[member.rank]
            if future.done():
                answers[member.rank] = outcome(future, member.rank)
            else:
                answers[member.rank] = TransferTimeout(
                    f"worker {member.rank} did not answer {op!r} within {timeout_s:g} s",
                    phase="connect",
                    worker=member.rank,
                )
        return answers

    def _welcome(
        self,
        members: list[_Member],
        timeout_s: float,
        described: dict[int, dict[str, Any] | RayxferError] | None = None,
    ) -> dict[int, RayxferError]:
        """Describe and attach members, all at once. Those that fail are LOST, with the reason."""
        deadline = time.monotonic() + timeout_s
        errors: dict[int, RayxferError] = {}

        def hear(answers: dict[int, dict[str, Any] | RayxferError]) -> None:
            for rank, answer in answers.items():
                member = self._members[rank]
                if isinstance(answer, RayxferError):
                    errors[rank] = _not_a_worker(answer, rank)
                    member.state, member.error = WorkerState.LOST, errors[rank]
                else:
                    member.about |= answer
                    self._learn(member, answer)

        def left_s() -> float:
            return max(0.05, deadline - time.monotonic())

        if described is None:
            described = self._ask_all(members, "describe", {}, left_s())
        hear(described)
        by_owner: dict[str | None, list[_Member]] = {}
        for member in members:
            if member.rank not in errors:
                by_owner.setdefault(self._dead_owner(member), []).append(member)
        for replace, group in by_owner.items():
            message = {"owner": self._owner_record(), "replace": replace}
            hear(self._ask_all(group, "attach", message, left_s()))
        return errors

    def _dead_owner(self, member: _Member) -> str | None:
        """The id of the controller that this worker belonged to, if that one is gone."""
        owner = member.about.get("owner")
        if owner is None or owner["controller_id"] == self._controller_id:
            return None
        return None if self._owner_alive(owner) else str(owner["controller_id"])

    def _learn(self, member: _Member, answer: dict[str, Any]) -> None:
        if answer["incarnation"] != member.incarnation:
            member.incarnation = answer["incarnation"]
            self._touch_roster()
        member.facts = answer.get("facts", member.facts)
        member.version = int(answer["version"])
        member.error = None
        member.state = self._judge(WorkerState(answer["state"]), member.version)

    def _judge(self, state: WorkerState, version: int) -> WorkerState:
        """A worker that is READY with another version than the fleet's is not ready for the fleet."""
        behind = state == WorkerState.READY and version != self._version
        return WorkerState.CONNECTING if behind else state

    def add_workers(
        self, workers: list[Any], backends: list[str], entries: bytes = b""
    ) -> list[int]:
        """New members, at the next ranks. They catch up from a peer where one can give the version;
        else they are CONNECTING until the next sync. Waits for a round under way to end.

        Raises:
            ControllerBusy: the round did not end within connect_timeout_s. ConfigError, WorkerLost,
                TransferTimeout: one of them cannot join; then none does.
        """
        self._wait_idle()
        with self._lock:
            self._check_idle()
            added: list[_Member] = []
            try:
                for worker, backend in zip(workers, backends, strict=True):
                    added.append(self._add(self._next_rank, worker, backend))
                errors = self._welcome(added, self._config.connect_timeout_s)
                if errors:
                    raise next(iter(errors.values()))
            except RayxferError:
                for member in added:
                    self._drop(member)
                raise
            if entries:
                self._entries.append(entries)
            self._catch_up(added)
            self._share_roster()
            return [member.rank for member in added]

    def _wait_idle(self) -> None:
        deadline = time.monotonic() + self._config.connect_timeout_s
        while self._open is not None and time.monotonic() < deadline:
            time.sleep(0.02)
            self.tick()

    def remove_workers(self, ranks: list[int], workers: list[Any]) -> None:
        """Members no more: they keep the weights they hold. During a round they finish it first.

        Raises:
            ConfigError: no such member; then none is removed.
        """
        with self._lock:
            if self._closed:
                raise ControllerClosed(f"controller {self._name!r} was shut down")
            self._check_known()
            chosen: dict[int, _Member] = {}
            for rank in ranks:
                if rank not in self._members or rank == KEEPER_RANK:
                    known = sorted(r for r in self._members if r != KEEPER_RANK)
                    raise ConfigError(f"no worker {rank}: members are {known}")
                chosen[rank] = self._members[rank]
            for worker in workers:
                key = self.key_of(worker)
                found = [m for m in self._members.values() if self.key_of(m.handle) == key]
                if not found:
                    raise ConfigError(f"{worker!r} is not a member")
                chosen[found[0].rank] = found[0]
            for member in chosen.values():
                member.leaving = True
            if self._open is None:
                self._drop_leaving()

    def _drop_leaving(self) -> None:
        leaving = [m for m in self._members.values() if m.leaving]
        for member in leaving:
            self._drop(member)
        if leaving:
            self._share_roster()

    def _drop(self, member: _Member) -> None:
        del self._members[member.rank]
        self._roster_sequence += 1
        self._touch_roster()
        member.client.signal("detach", {"controller_id": self._controller_id})

    def _share_roster(self) -> None:
        """Let every member store the new roster. One is waited for: a restart would forget it."""
        message = {"owner": self._owner_record()}
        futures = [m.client.signal("attach", message) for m in self._members.values()]
        if futures:
            wait_futures(futures, timeout=1.0, return_when=FIRST_COMPLETED)

    # ---- catching up without the trainer ----------------------------------------------------------

    def _catch_up(self, members: Iterable[_Member]) -> None:
        """Bring members to the committed version from a peer that holds it, where one can."""
        for member in members:
            if member.state not in (WorkerState.CONNECTING, WorkerState.TORN):
                continue
            if self._version == 0:
                member.error = None
                continue
            peers = [
                m
                for m in self._members.values()
                if m is not member and m.state == WorkerState.READY and m.version == self._version
            ]
            able = [peer for peer in peers if can_donate(peer.about, member.about)]
            if not able:
                why = (
                    "no other worker holds it"
                    if not peers
                    else "its model differs from every worker that holds it"
                )
                member.error = StateError(
                    f"worker {member.rank} does not hold version {self._version} yet, and {why}: the "
                    "next sync brings it"
                )
                continue
            for peer in able:
                member.error = self._donate(peer, member)
                if member.error is None:
                    break

    def _donate(self, peer: _Member, member: _Member) -> RayxferError | None:
        round_id = self._next_round
        self._next_round += 1
        message = {
            "controller_id": self._controller_id,
            "round_id": round_id,
            "version": self._version,
            "owner": self._owner_record(),
            "config": self._config,
            "raw": not peer.about["keeper"]
            and peer.about["fingerprint"] == member.about["fingerprint"],
            "newcomer": {
                "rank": member.rank,
                "handle": member.handle,
                "facts": member.facts,
                "incarnation": member.incarnation,
            },
            "wait_s": SLICE_S,
        }
        deadline = time.monotonic() + self._config.connect_timeout_s + self._config.sync_timeout_s
        while True:
            future = peer.client.call("donate", message)
            wait_futures([future], timeout=SLICE_S + self._config.stall_timeout_s)
            if not future.done() or time.monotonic() > deadline:
                return TransferTimeout(
                    f"worker {peer.rank} did not bring worker {member.rank} to version "
                    f"{self._version} in time",
                    phase="connect",
                    worker=peer.rank,
                )
            answer = outcome(future, peer.rank)
            if isinstance(answer, RayxferError):
                return TransferError(
                    f"worker {member.rank} could not catch up from worker {peer.rank}: {answer}",
                    phase="connect",
                    worker=member.rank,
                    cause=answer,
                )
            if answer["done"]:
                break
        errors = self._welcome([member], _REJOIN_TIMEOUT_S)
        return errors.get(member.rank)

    # ---- rounds ---------------------------------------------------------------------------------

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Grant a round: its id, its version, and the members (only if the caller's are stale).

        Raises:
            ControllerBusy: another round is under way and its trainer is alive.
            StateError: the version is not above the committed one.
            ControllerClosed: after shutdown.
        """
        with self._lock:
            self._check_known(request.get("seen_version", 0))
            process = Facts.from_wire(request["process"])
            if self._open is not None and self._open.process == process:
                self._expire(
                    self._open
                )  # its reply was lost with a controller, or it was cut short
            self._check_idle()
            version = self._version + 1 if request["version"] is None else request["version"]
            if isinstance(version, bool) or not isinstance(version, int):
                raise ConfigError(f"version={version!r}: expected an int")
            if version <= self._version:
                raise StateError(
                    f"version {version} is not above the committed version {self._version}: "
                    "versions only go up"
                )
            members = list(self._members.values())
            away = [m for m in members if m.state == WorkerState.LOST or m.facts is None]
            lost = self._welcome(away, min(_REJOIN_TIMEOUT_S, self._config.connect_timeout_s))
            if request["partial"]:
                # a part builds on the committed version: give that to whoever can have it first
                self._catch_up([m for m in members if m.rank not in lost])
            self._open = _Open(self._next_round, version, time.monotonic(), process)
            self._next_round += 1
            grant: dict[str, Any] = {
                "round_id": self._open.round_id,
                "version": version,
                "base": self._version,
                "versions": {m.rank: m.version for m in members},
                "lost": {m.rank: lost[m.rank] for m in members if m.rank in lost},
                "members": None,
            }
            if request["roster"] != self._roster:
                grant |= {
                    "roster": self._roster,
                    "config": self._config,
                    "owner": self._owner_record(),
                    "members": [
                        {
                            "rank": m.rank,
                            "handle": m.handle,
                            "backend": m.requested,
                            "facts": m.facts,
                            "incarnation": m.incarnation,
                        }
                        for m in members
                    ],
                }
            for member in members:
                if member.rank not in lost:
                    member.state = WorkerState.UPDATING
            return grant

    def controller_id(self) -> str:
        """Identifies this very controller, whatever its name."""
        return self._controller_id

    def config(self) -> WeightTransferConfig:
        """The settings that it was made with."""
        return self._config

    def entries(self) -> list[bytes]:
        """What the creator registered, and what came with later workers, as it was given."""
        return list(self._entries)

    def renew(self, claim: dict[str, Any]) -> None:
        """The trainer of this round is alive."""
        with self._lock:
            self._current(claim).renewed = time.monotonic()

    def commit(
        self,
        claim: dict[str, Any],
        rows: list[dict[str, Any]] | None = None,
        message: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The commit point: from here on the round's version is the fleet's. Safe to repeat.

        With `rows` (as `settle` takes them, for the case that all goes well) and `message` it also
        tells the workers, and settles the round if all of them say at once that they are ready: three
        steps of the trainer in one.

        Returns:
            `answers`: rank → what that worker said, or its error; who is slow is not in there.
            `settled`: nothing is left to do.

        Raises:
            StateError: the round is not open (any more), so nothing may be committed.
        """
        with self._lock:
            self._check_known()
            done: dict[str, Any] = {"answers": {}, "settled": False}
            # those that are to commit; others may be READY too, with the version that they had
            ranks = [row["rank"] for row in rows or () if row["version"] == claim["version"]]
            if claim["round_id"] == self._settled_round:  # the reply to this very call was lost
                return {"answers": {rank: {"done": True} for rank in ranks}, "settled": True}
            opened = self._current(claim) if not self._was_committed(claim) else self._reopen(claim)
            if claim["version"] != opened.version:
                raise StateError(
                    f"round {opened.round_id} is about version {opened.version}, not "
                    f"{claim['version']}"
                )
            self._version, opened.committed = opened.version, True
            if rows is None or message is None:
                return done
            answers = done["answers"] = self._tell(ranks, message)
            said = [answers.get(rank) for rank in ranks]
            if all(isinstance(one, dict) and one.get("done") for one in said):
                self.settle(claim, rows)
                self._settled_round, done["settled"] = claim["round_id"], True
            return done

    def _tell(
        self, ranks: list[int], message: dict[str, Any]
    ) -> dict[int, dict[str, Any] | RayxferError]:
        """Have the workers of a committed round go on. Whoever takes longer than a moment is the
        trainer's to wait for."""
        members = {rank: self._members[rank] for rank in ranks if rank in self._members}
        message = {**message, "wait_s": _TELL_S}
        clients = [member.client for member in members.values()]
        futures = start_all(clients, "commit", [message] * len(clients))(_TELL_S)
        wait_futures(futures, timeout=_TELL_S)
        return {
            rank: outcome(future, rank)
            for rank, future in zip(members, futures, strict=True)
            if future.done()
        }

    def _was_committed(self, claim: dict[str, Any]) -> bool:
        """Whether a controller that was restarted since had committed this very round: its version is
        the fleet's, and no round came after it."""
        return (
            self._open is None
            and self._recovered
            and claim["version"] == self._version
            and claim["round_id"] == self._next_round - 1
            and not self._closed
        )

    def settle(self, claim: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        """The round is over: what became of each worker."""
        with self._lock:
            self._current(claim)
            self._open = None
            for row in rows:
                member = self._members.get(row["rank"])
                if member is None:
                    continue
                member.version, member.backend = row["version"], row["backend"]
                member.error = row["error"]
                if row["incarnation"] != member.incarnation:
                    member.incarnation = row["incarnation"]
                    self._touch_roster()
                member.state = self._judge(WorkerState(row["state"]), member.version)
                if not row["partial"]:
                    member.about["exact"] = not row["casts"]
            self._drop_leaving()

    def _current(self, claim: dict[str, Any]) -> _Open:
        self._check_known()
        opened = self._open
        if opened is not None and opened.round_id == claim["round_id"]:
            return opened
        adoptable = opened is None and self._recovered and claim["version"] > self._version
        if adoptable and claim["round_id"] >= self._next_round - 1 and not self._closed:
            return self._reopen(claim)
        raise StateError(
            f"round {claim['round_id']} is over: another trainer or the controller ended it"
        )

    def _reopen(self, claim: dict[str, Any]) -> _Open:
        """A round that was granted before this controller was restarted: the trainer goes on with it."""
        self._open = _Open(
            claim["round_id"],
            claim["version"],
            time.monotonic(),
            Facts.from_wire(claim["process"]),
        )
        self._next_round = max(self._next_round, claim["round_id"] + 1)
        return self._open

    def _check_known(self, seen_version: int = 0) -> None:
        if (self._unsure or seen_version > self._version) and not self._closed:
            raise RosterNeeded(
                f"controller {self._name!r} was restarted, and none of the workers that it was made with "
                "remembers its version: use it once through a handle that knows (its creator's, or "
                "one that has synced), or shut it down and make a new one"
            )

    def _check_idle(self) -> None:
        self._check_known()
        self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise ControllerClosed(f"controller {self._name!r} was shut down")
        opened = self._open
        if opened is None:
            return
        if not self._lapsed(opened):
            raise ControllerBusy(
                f"controller {self._name!r} is busy with round {opened.round_id} (version "
                f"{opened.version}): one round at a time"
            )
        self._expire(opened)

    def _lapsed(self, opened: _Open) -> bool:
        """The round's trainer is gone: its process ended on this machine, or its lease ran out."""
        idle = time.monotonic() - opened.renewed
        return idle > self._config.stall_timeout_s or process_gone(opened.process)

    def _expire(self, opened: _Open) -> None:
        """The trainer is gone: free its workers. A committed round is completed, another aborted."""
        try:
            self._free_workers(opened)
        finally:
            self._open = None
        self._drop_leaving()

    def _free_workers(self, opened: _Open) -> None:
        timeout = self._config.stall_timeout_s
        message = {
            "controller_id": self._controller_id,
            "round_id": opened.round_id,
            "timeout_s": timeout,
            "wait_s": timeout,
        }
        op = "commit" if opened.committed else "abort"
        members = list(self._members.values())
        answers = self._ask_all(members, op, message, timeout + 1.0)
        for member in members:
            answer = answers[member.rank]
            if isinstance(answer, StateError):  # it was not in this round, or not that far
                answer = self._ask_all([member], "abort", message, timeout + 1.0)[member.rank]
            if isinstance(answer, RayxferError):
                member.state, member.error = WorkerState.LOST, answer
            else:
                self._learn_again(member)

    def _learn_again(self, member: _Member) -> None:
        answer = self._ask_all([member], "snapshot", {}, _REJOIN_TIMEOUT_S)[member.rank]
        if isinstance(answer, RayxferError):
            member.state, member.error = WorkerState.LOST, answer
        else:
            self._learn(member, answer)

    def tick(self) -> None:
        """Called about once a second: ends a round whose trainer is gone, and looks after members
        that died, came back, or have to catch up."""
        if not self._lock.acquire(timeout=0.01):
            return
        try:
            if self._closed:
                return
            if self._unsure:
                self.recover()  # a worker that did not answer then may do so now
                return
            if self._open is not None and self._lapsed(self._open):
                self._expire(self._open)
            if self._open is None:
                self._look_around()
        finally:
            self._lock.release()

    def _look_around(self) -> None:
        """Without waiting: judge the answers to the last tick's question, and ask again."""
        back: list[_Member] = []
        for rank, future in list(self._survey.items()):
            if not future.done():
                continue
            del self._survey[rank]
            member = self._members.get(rank)
            if member is None:
                continue
            answer = outcome(future, rank)
            if isinstance(answer, WorkerLost):
                member.state, member.error = WorkerState.LOST, answer
            elif isinstance(answer, dict):
                renewed = answer["incarnation"] != member.incarnation
                if renewed or answer["controller"] is None or member.state == WorkerState.LOST:
                    back.append(member)
        if back:
            self._welcome(back, _REJOIN_TIMEOUT_S)
            self._catch_up(back)
        for rank, member in self._members.items():
            if rank not in self._survey:
                self._survey[rank] = member.client.signal("snapshot", {})

    # ---- the rest -------------------------------------------------------------------------------

    def status(self) -> Status:
        """The committed version, and every member as last seen. Waits for nothing."""
        self._check_known()
        return Status(
            version=self._version,
            workers=tuple(
                WorkerStatus(m.rank, m.state, m.version, m.backend, m.error)
                for m in list(self._members.values())
                if m.rank != KEEPER_RANK
            ),
            busy=self._open is not None,
            name=self._name,
        )

    def same_request(self, workers: list[Any] | None, config: WeightTransferConfig | None) -> None:
        """Refuse to be mistaken for a controller with other workers or settings.

        Raises:
            ConfigError: naming the difference.
        """
        if workers is not None and [self.key_of(worker) for worker in workers] != self._requested:
            raise ConfigError(
                f"controller {self._name!r} is running with other workers: attach with the name "
                "alone, or choose another name"
            )
        if config is not None and config != self._config:
            raise ConfigError(f"controller {self._name!r} is running with another config")

    def close(self) -> None:
        """Let the workers go; they keep their weights. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            message = {"controller_id": self._controller_id, "timeout_s": 5.0}
            futures = [m.client.signal("detach", message) for m in self._members.values()]
        if futures:
            wait_futures(futures, timeout=10.0)


def can_donate(peer: dict[str, Any], newcomer: dict[str, Any]) -> bool:
    """Whether `peer` can bring `newcomer` up exactly (see `rayxfer.catchup`); both are answers to
    "describe"."""
    if peer["keeper"] or peer["fingerprint"] == newcomer["fingerprint"]:
        return True
    return bool(peer["plain"] and newcomer["plain"] and peer["exact"])


def _not_a_worker(error: RayxferError, rank: int) -> RayxferError:
    """What a refused describe or attach means to whoever listed that worker."""
    if isinstance(error, (StateError, ConfigError)):
        return ConfigError(f"worker {rank} cannot join: {error}", cause=error)
    text = str(error)
    if "AttributeError" in text or "no attribute" in text:
        return ConfigError(
            f"worker {rank} is no inference worker: its class has to inherit rayxfer.WorkerMixin",
            cause=error,
        )
    return error
