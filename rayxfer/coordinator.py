"""The controller actor's plain class: membership, rounds, versions. No tensor passes through it.

It grants one round at a time, records commits, and keeps who is a member. Senders talk to workers
directly; they come here to begin, to renew their lease, to record and to settle.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any

from rayxfer.client import WorkerClient, client_for, outcome
from rayxfer.config import WeightTransferConfig
from rayxfer.errors import (
    ConfigError,
    ControllerBusy,
    ControllerClosed,
    RayxferError,
    StateError,
    TransferTimeout,
    WorkerLost,
)
from rayxfer.report import Status, WorkerState, WorkerStatus

__all__ = ["Coordinator"]

_REJOIN_TIMEOUT_S = 2.0
"""How long a round's begin looks for workers that were lost before."""


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
    error: RayxferError | None = None


@dataclass
class _Open:
    """The round under way."""

    round_id: int
    version: int
    renewed: float
    committed: bool = False


class Coordinator:
    """Plain and thread-safe; `controller.py` wraps it as a Ray actor.

    Args:
        name: the controller's name, unique in its namespace.
        workers: handles (or clients), in rank order.
        config: the user's settings.
        entries: what senders need to ship engines; relayed as bytes, never unpickled here.
        owner_alive: tells whether the controller of an owner record (name, controller_id) lives;
            a worker whose owner is dead may be taken over.
    """

    def __init__(
        self,
        name: str,
        workers: list[Any],
        config: WeightTransferConfig,
        entries: bytes = b"",
        owner_alive: Callable[[dict[str, Any]], bool] = lambda owner: True,
    ) -> None:
        self._name = name
        self._config = config
        self._entries = entries
        self._owner_alive = owner_alive
        self._controller_id = secrets.token_hex(8)
        self._lock = threading.RLock()
        self._members: dict[int, _Member] = {}
        self._next_rank = 0
        self._version = 0
        self._next_round = 1
        self._open: _Open | None = None
        self._closed = False
        self._roster = ""
        self._requested = {
            "workers": [self._key(worker) for worker in workers],
            "config": config,
        }
        for index, worker in enumerate(workers):
            self._add(worker, config.backend_of(index))

    # ---- membership -----------------------------------------------------------------------------

    @staticmethod
    def _key(worker: Any) -> str:
        actor_id = getattr(worker, "_actor_id", None)
        return str(id(worker)) if actor_id is None else str(actor_id.hex())

    def _add(self, worker: Any, backend: str) -> _Member:
        client = client_for(worker)
        client.check()
        if any(self._key(m.handle) == self._key(worker) for m in self._members.values()):
            raise ConfigError(
                f"worker {self._next_rank} is already a member: a worker has one rank"
            )
        member = _Member(self._next_rank, worker, client, backend, backend)
        self._members[member.rank] = member
        self._next_rank += 1
        self._roster = secrets.token_hex(4)
        return member

    def open(self) -> None:
        """Reach every member and become its controller.

        Raises:
            ConfigError: one is no inference worker, or belongs to a live controller.
            TransferTimeout, WorkerLost: one does not answer within connect_timeout_s.
        """
        with self._lock:
            members = list(self._members.values())
        for error in self._welcome(members, self._config.connect_timeout_s).values():
            raise error

    def _welcome(self, members: list[_Member], timeout_s: float) -> dict[int, RayxferError]:
        """Describe and attach members, all at once. Those that fail are LOST, with the reason."""
        owner = {"name": self._name, "controller_id": self._controller_id}
        deadline = time.monotonic() + timeout_s
        errors: dict[int, RayxferError] = {}
        dead: dict[int, str] = {}
        for op in ("describe", "attach"):
            todo = [m for m in members if m.rank not in errors]
            futures = {
                m.rank: m.client.signal(
                    op,
                    {
                        "owner": {**owner, "rank": m.rank},
                        "replace": dead.get(m.rank),
                        "backend": m.requested,
                    },
                )
                for m in todo
            }
            if futures:
                wait_futures(futures.values(), timeout=max(0.0, deadline - time.monotonic()))
            for member in todo:
                future = futures[member.rank]
                answer: dict[str, Any] | RayxferError
                if future.done():
                    answer = outcome(future, member.rank)
                else:
                    answer = TransferTimeout(
                        f"worker {member.rank} did not answer {op!r} within {timeout_s:g} s",
                        phase="connect",
                        worker=member.rank,
                    )
                if isinstance(answer, RayxferError):
                    errors[member.rank] = _not_a_worker(answer, member.rank)
                    member.state, member.error = WorkerState.LOST, errors[member.rank]
                    continue
                self._learn(member, answer)
                previous = answer.get("owner")
                if previous is None or previous["controller_id"] == self._controller_id:
                    continue
                if not self._owner_alive(previous):
                    dead[member.rank] = previous["controller_id"]
        return errors

    def _learn(self, member: _Member, answer: dict[str, Any]) -> None:
        with self._lock:
            if answer["incarnation"] != member.incarnation:
                member.incarnation = answer["incarnation"]
                self._roster = secrets.token_hex(4)
            member.facts = answer.get("facts", member.facts)
            member.version = int(answer["version"])
            member.error = None
            state = WorkerState(answer["state"])
            behind = state == WorkerState.READY and member.version != self._version
            member.state = WorkerState.CONNECTING if behind else state

    def add_workers(self, workers: list[Any], backends: list[str]) -> list[int]:
        """New members, at the next ranks. They hold the committed version after the next sync.

        Raises:
            ControllerBusy: a round is under way. ConfigError, WorkerLost, TransferTimeout: one of
                them cannot join; then none does.
        """
        with self._lock:
            self._check_idle()
            added = []
            try:
                for worker, backend in zip(workers, backends, strict=True):
                    added.append(self._add(worker, backend))
                errors = self._welcome(added, self._config.connect_timeout_s)
                if errors:
                    raise next(iter(errors.values()))
            except RayxferError:
                for member in added:
                    self._drop(member)
                raise
            return [member.rank for member in added]

    def remove_workers(self, ranks: list[int], workers: list[Any]) -> None:
        """Members no more: they keep the weights they hold. Unknown ranks are errors.

        Raises:
            ControllerBusy: a round is under way. ConfigError: no such member.
        """
        with self._lock:
            self._check_idle()
            chosen: dict[int, _Member] = {}
            for rank in ranks:
                if rank not in self._members:
                    raise ConfigError(f"no worker {rank}: members are {sorted(self._members)}")
                chosen[rank] = self._members[rank]
            for worker in workers:
                found = [
                    m for m in self._members.values() if self._key(m.handle) == self._key(worker)
                ]
                if not found:
                    raise ConfigError(f"{worker!r} is not a member")
                chosen[found[0].rank] = found[0]
            for member in chosen.values():
                self._drop(member)

    def _drop(self, member: _Member) -> None:
        del self._members[member.rank]
        self._roster = secrets.token_hex(4)
        member.client.signal("detach", {"controller_id": self._controller_id})

    # ---- rounds ---------------------------------------------------------------------------------

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        """Grant a round: its id, its version, and the members (only if the caller's are stale).

        Raises:
            ControllerBusy: another round is under way and its trainer's lease is fresh.
            StateError: the version is not above the committed one.
            ControllerClosed: after shutdown.
        """
        with self._lock:
            self._check_idle()
            version = self._version + 1 if request["version"] is None else request["version"]
            if isinstance(version, bool) or not isinstance(version, int):
                raise ConfigError(f"version={version!r}: expected an int")
            if version <= self._version:
                raise StateError(
                    f"version {version} is not above the committed version {self._version}: versions "
                    "only go up"
                )
            self._open = opened = _Open(self._next_round, version, time.monotonic())
            self._next_round += 1
            members = list(self._members.values())
        try:
            away = [m for m in members if m.state == WorkerState.LOST or m.facts is None]
            lost = self._welcome(away, min(_REJOIN_TIMEOUT_S, self._config.connect_timeout_s))
        except BaseException:
            self._open = None
            raise
        with self._lock:
            opened.renewed = time.monotonic()
            grant: dict[str, Any] = {
                "round_id": opened.round_id,
                "version": version,
                "versions": {m.rank: m.version for m in members},
                "lost": lost,
                "members": None,
            }
            if request["roster"] != self._roster:
                grant |= {
                    "roster": self._roster,
                    "config": self._config,
                    "owner": {"name": self._name, "controller_id": self._controller_id},
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

    def entries(self) -> bytes:
        """What the creator registered, as it was given."""
        return self._entries

    def renew(self, round_id: int) -> None:
        """The trainer of this round is alive."""
        with self._lock:
            self._current(round_id).renewed = time.monotonic()

    def commit(self, round_id: int, version: int) -> None:
        """The commit point: from here on `version` is the fleet's version."""
        with self._lock:
            opened = self._current(round_id)
            if version != opened.version:
                raise StateError(
                    f"round {round_id} is about version {opened.version}, not {version}"
                )
            self._version, opened.committed = version, True

    def settle(self, round_id: int, rows: list[dict[str, Any]]) -> None:
        """The round is over: what became of each worker."""
        with self._lock:
            self._current(round_id)
            self._open = None
            for row in rows:
                member = self._members.get(row["rank"])
                if member is None:
                    continue
                member.state = WorkerState(row["state"])
                member.version, member.backend = row["version"], row["backend"]
                member.error = row["error"]
                if row["incarnation"] and row["incarnation"] != member.incarnation:
                    member.incarnation = row["incarnation"]
                if member.state == WorkerState.READY and member.version != self._version:
                    member.state = WorkerState.CONNECTING

    def _current(self, round_id: int) -> _Open:
        if self._open is None or self._open.round_id != round_id:
            raise StateError(
                f"round {round_id} is over: another trainer or the controller ended it"
            )
        return self._open

    def _check_idle(self) -> None:
        if self._closed:
            raise ControllerClosed(f"controller {self._name!r} was shut down")
        opened = self._open
        if opened is None:
            return
        if time.monotonic() - opened.renewed <= self._config.stall_timeout_s:
            raise ControllerBusy(
                f"controller {self._name!r} is busy with round {opened.round_id} (version "
                f"{opened.version}): one round at a time"
            )
        self._expire(opened)

    def _expire(self, opened: _Open) -> None:
        """The trainer's lease ran out: free its workers; the round is over."""
        self._open = None
        message = {
            "controller_id": self._controller_id,
            "round_id": opened.round_id,
            "timeout_s": self._config.stall_timeout_s,
        }
        futures = {m.rank: m.client.signal("abort", message) for m in self._members.values()}
        wait_futures(futures.values(), timeout=self._config.stall_timeout_s + 1.0)
        for member in self._members.values():
            future = futures[member.rank]
            answer = outcome(future, member.rank) if future.done() else None
            if isinstance(answer, dict):
                self._learn(member, answer)
            else:
                member.state = WorkerState.LOST
                member.error = answer or WorkerLost(f"worker {member.rank} does not answer")

    def tick(self) -> None:
        """Called about once a second: ends a round whose trainer is gone."""
        with self._lock:
            opened = self._open
            if opened and time.monotonic() - opened.renewed > self._config.stall_timeout_s:
                self._expire(opened)

    # ---- the rest -------------------------------------------------------------------------------

    def status(self) -> Status:
        """The committed version, and every member as last seen."""
        return Status(
            version=self._version,
            workers=tuple(
                WorkerStatus(m.rank, m.state, m.version, m.backend, m.error)
                for m in list(self._members.values())
            ),
            busy=self._open is not None,
            name=self._name,
        )

    def same_request(self, workers: list[Any] | None, config: WeightTransferConfig | None) -> None:
        """Refuse to be mistaken for a controller with other workers or settings.

        Raises:
            ConfigError: naming the difference.
        """
        if workers is not None:
            keys = [self._key(worker) for worker in workers]
            if keys != self._requested["workers"]:
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
