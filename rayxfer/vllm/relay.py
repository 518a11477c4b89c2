"""From outside: the sessions inside one vLLM, and its pause, resume and caches, as one worker.

Weights live in vLLM's worker processes, scheduling in its engine core. A round needs both in order, so
whoever stands in front of vLLM (an actor, an HTTP client) holds a `Relay`: it pauses before an update,
passes every message on to the session of each rank, and after the commit resets the cache and resumes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Protocol

from rayxfer.errors import ContractError, RayxferError, StateError, TransferError, portable_cause
from rayxfer.report import WorkerState
from rayxfer.tasks import Task

__all__ = ["Controls", "Relay"]

logger = logging.getLogger(__name__)

_SLICE_S = 0.05
"""Longest time that one message keeps vLLM's engine core from its other work."""

_CALL_OFF_S = 1.0
_RESET_TRIES = 5
_COMMIT_TIMEOUT_S = 600.0


class Controls(Protocol):
    """What vLLM does outside its workers. Each may block; a `pause` that is still waiting when `resume` is
    called may end early, and need not."""

    def pause(self, mode: str) -> None:
        """Return when nothing reads the weights. "keep", "wait" or "abort" running requests."""

    def resume(self) -> None:
        """Let requests go on. Safe to call twice."""

    def reset_cache(self) -> bool:
        """Forget cached keys and values, those of running requests too. False: refused, ask again."""

    def set_version(self, version: int) -> None:
        """Tell vLLM which weights it has."""


@dataclass
class _Settings:
    load_mode: str
    pause_mode: str
    cache_policy: str

    @classmethod
    def of(cls, config: dict[str, Any]) -> _Settings:
        return cls(**{field.name: config[field.name] for field in fields(cls)})


class Relay:
    """Takes the messages that a `WorkerSession` takes.

    Args:
        rpc: passes one message to every rank's session; their answers in order of rank, each a dict
            (`{"raised": error}` for one that raised).
        controls: vLLM's own.
        on_state: told the worker's state after every message.

    Attributes:
        sleeping: what of vLLM is out of memory: its weights; anything. See `asleep`.
    """

    def __init__(
        self,
        rpc: Callable[[str, dict[str, Any]], list[dict[str, Any]]],
        controls: Controls,
        on_state: Callable[[WorkerState], Any] | None = None,
    ) -> None:
        self._rpc, self._controls, self._on_state = rpc, controls, on_state
        self._settings: _Settings | None = None
        self._task: Task | None = None
        self._paused_for: tuple[Any, ...] | None = None
        self._called_off: deque[tuple[Any, ...]] = deque(maxlen=16)
        self.sleeping = (False, False)
        self._owner: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self.state = WorkerState.CONNECTING
        self.version = 0

    def handle(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out one message; as `WorkerSession.handle`."""
        until = time.monotonic() + float(message.get("wait_s", 0.0))
        if op == "connect" and "config" in message:
            self._settings = _Settings.of(message["config"])
        if op == "prepare" and self.sleeping[0]:
            raise StateError("this vLLM sleeps: wake it up (at least its weights) before a sync")
        if op == "attach":
            # handles of other workers are not plain data: the roster stays on this side
            self._owner = dict(message["owner"])
            message = {**message, "owner": {**self._owner, "roster": []}}
        if op == "update":
            return self._update(message, until)
        if op == "commit":
            # every controller counts its rounds from one
            key = ("commit", message.get("controller_id"), message["round_id"])
            return self._drive(key, lambda: self._commit(message), until)
        if op == "abort":
            return self._abort(message, until)
        if op in ("attach", "detach", "connect", "prepare"):
            return self._take_over(op, message, until)
        return self._ask(op, message, until)

    def asleep(self, weights: bool, anything: bool | None = None) -> None:
        """What of vLLM is out of memory. Without its weights no round may begin; while anything is
        missing (None: as the weights), its requests are not resumed."""
        self.sleeping = (weights, weights if anything is None else anything)

    def in_round(self) -> bool:
        """Whether a round is open on vLLM's workers. Asks them."""
        return self._open_round() is not None

    def forget(self) -> None:
        """The weights are gone: CONNECTING until the next sync."""
        self._ask("forget", {}, 0.0)

    def refresh(self) -> None:
        """Ask for state and version anew."""
        self._ask("snapshot", {}, 0.0)

    # ---- inside --------------------------------------------------------------------------------

    def _update(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        key = (message.get("controller_id"), message["round_id"], message.get("attempt", 0))
        settings = self._known_settings()
        if settings.load_mode == "in_place" and self._paused_for != key:
            paused = self._drive(("pause", *key), lambda: self._pause(settings, key), until)
            if not paused["done"] or "error" in paused:
                return paused
            if key in self._called_off:  # by an abort, which may not have reached the workers yet
                raise StateError(f"round {message['round_id']} is over on this worker")
        return self._ask("update", message, until)

    def _pause(self, settings: _Settings, key: tuple[Any, ...] | None) -> dict[str, Any]:
        try:
            self._controls.pause(settings.pause_mode)
        except BaseException:
            # it may have been paused all the same, and nobody else would undo that
            if key is not None and self.state == WorkerState.READY:
                _try(self._resume, "resume")
            raise
        with self._lock:
            over = key is not None and key in self._called_off
            latest = self._task is None or self._task.key == ("pause", *(key or ()))
            if not over:
                self._paused_for = key
        if over and latest:
            self._resume()  # its round ended before the pause did
        return {}

    def _commit(self, message: dict[str, Any]) -> dict[str, Any]:
        settings = self._known_settings()
        if settings.load_mode == "staged":
            try:
                self._pause(settings, None)
            except BaseException:
                # The version is recorded, and is not live here.
                self._ask("hold", {}, 0.0)
                _try(lambda: self._controls.pause("keep"), "pause")
                raise
        answer = self._ask("commit", message, time.monotonic() + _COMMIT_TIMEOUT_S)
        if not answer.get("done") or isinstance(answer.get("error"), RayxferError):
            return answer
        try:
            self._controls.set_version(int(answer["version"]))
            if settings.cache_policy == "reset":
                self._reset_cache()
        except Exception as error:
            # The version stands. Stale cache entries beside new weights would answer wrongly.
            self._ask("hold", {}, 0.0)
            text = f"failed after commit: {type(error).__name__}: {error}"
            raise TransferError(text, phase="commit", cause=portable_cause(error)) from error
        self._resume()
        return answer

    def _reset_cache(self) -> None:
        for attempt in range(_RESET_TRIES):
            if self._controls.reset_cache():
                return
            time.sleep(0.05 * (attempt + 1))
        raise StateError(f"vLLM refused {_RESET_TRIES} times to reset its prefix cache")

    def _abort(self, message: dict[str, Any], until: float) -> dict[str, Any]:
        round_id = message.get("round_id")
        whose = (message.get("controller_id"), round_id)
        with self._lock:
            task = self._task
            pausing = task is not None and task.key[:3] == ("pause", *whose)
            if task is not None and pausing:
                self._called_off.append(task.key[1:])
        if task is not None and pausing and not task.done.is_set():
            self._controls.resume()  # calls the pause off
            # vLLM may go on waiting for its requests; that thread is left to itself
            if not task.done.wait(min(_CALL_OFF_S, float(message.get("timeout_s", 5.0)))):
                with self._lock:
                    if self._task is task:
                        self._task = None
        # where it was paused through another relay, the open round tells
        paused = self._paused_for is not None and self._paused_for[:2] == whose
        mine = paused or (round_id is not None and round_id == self._open_round())
        answer = self._ask("abort", message, until)
        if mine:
            self._resume_ready()
        return answer

    def _take_over(self, op: str, message: dict[str, Any], until: float) -> dict[str, Any]:
        """Pass on what may end a round that nobody will abort any more."""
        was_open = self.in_round()
        answer = self._ask(op, message, until)
        if op == "connect":  # an update pauses vLLM first, and that should wait for all to agree
            answer.pop("gated", None)
        if was_open and not self.in_round():
            self._resume_ready()
        return answer

    def _open_round(self) -> int | None:
        opened = self._ask("snapshot", {}, 0.0).get("open")
        return None if opened is None else int(opened)

    def _resume_ready(self) -> None:
        """Its round is over: go on, unless the weights are torn, or a commit does so in its turn."""
        task = self._task
        committing = task is not None and task.key[0] == "commit" and not task.done.is_set()
        if self.state == WorkerState.READY and not committing:
            self._resume()

    def _resume(self) -> None:
        self._paused_for = None
        if not self.sleeping[1]:
            self._controls.resume()

    def _known_settings(self) -> _Settings:
        if self._settings is None:  # this relay is not the one that connected
            self._settings = _Settings.of(self._ask("settings", {}, 0.0))
        return self._settings

    def _drive(
        self, key: tuple[Any, ...], function: Callable[[], dict[str, Any]], until: float
    ) -> dict[str, Any]:
        with self._lock:
            task = self._task
            if task is None or task.key != key:
                if task is not None and not task.done.is_set():
                    raise StateError(f"{task.key[0]} is still under way on this worker")
                task = self._task = Task(key, function)
        if not task.done.wait(max(0.0, until - time.monotonic())):
            # waiting for vLLM: not a stall, and nothing to tell yet
            idle = {"acked": 0, "num_bytes": 0, "name": None, "failed": None}
            return {"done": False, "busy": True, "at": time.monotonic(), **idle}
        if "error" in task.result:
            with self._lock:
                if self._task is task:
                    self._task = None
        return {"done": True, **task.result}

    def _ask(self, op: str, message: dict[str, Any], until: float) -> dict[str, Any]:
        """One message, in slices short enough for vLLM's engine core, until `until`."""
        payload = message.get("payload") is not None
        while True:
            left = max(0.0, until - time.monotonic())
            wait_s = left if payload else min(left, _SLICE_S)
            answer = merged(self._rpc(op, {**message, "wait_s": wait_s}))
            self._note(answer)
            told, kept = answer.get("owner"), self._owner
            if told and kept and told["controller_id"] == kept["controller_id"]:
                answer = {**answer, "owner": {**told, "roster": kept["roster"]}}
            if answer.get("done", True) or payload or time.monotonic() >= until:
                return answer
            if answer.get("done") is False and wait_s < _SLICE_S:
                return answer

    def _note(self, answer: dict[str, Any]) -> None:
        if "version" in answer:
            self.version = int(answer["version"])
        if "state" in answer:
            state = WorkerState(answer["state"])
            changed, self.state = state != self.state, state
            if changed and self._on_state is not None:
                self._on_state(state)


def _try(function: Callable[[], Any], what: str) -> None:
    """While another error is on its way: what fails beside it is told, not raised."""
    try:
        function()
    except Exception:
        logger.warning("vLLM could not %s after a failure", what, exc_info=True)


_WORST = ("LOST", "TORN", "CONNECTING", "UPDATING", "READY")


def merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What several ranks of one vLLM said, as one worker's answer.

    Raises:
        RayxferError: what the first rank that raised has raised.
        ContractError: the ranks were given different bytes.
    """
    for answer in answers:
        if isinstance(answer.get("raised"), RayxferError):
            raise answer["raised"]
    if not answers:
        raise StateError("vLLM has no worker that answers")
    if len(answers) == 1:
        return answers[0]
    for telling in ("error", "need", "behind"):
        for answer in answers:
            if telling in answer:
                return answer
    out = dict(answers[0])
    for key in answers[0]:
        values = [answer[key] for answer in answers if key in answer]
        if key in ("done", "plain", "exact"):
            out[key] = all(values)
        elif key == "complete":
            out[key] = None if None in values else all(values)
        elif key in ("busy", "finish", "stuck"):
            out[key] = any(values)
        elif key in ("num_bytes", "acked", "version"):
            out[key] = min(values)
        elif key == "state":
            out[key] = min(values, key=_WORST.index)
        elif key == "failed":
            out[key] = next((v for v in values if v is not None), None)
        elif key in ("incarnation", "fingerprint"):
            out[key] = "+".join(values)
        elif key == "facts":
            out[key] = {**values[0], "num_ranks": len(values)}
        elif key == "digests" and len(set(values)) > 1:
            raise ContractError("the ranks of this vLLM were given different bytes")
    problems = [p for answer in answers for p in answer.get("problems", ())]
    if problems:
        first = next(answer for answer in answers if answer.get("problems"))
        out = {"problems": list(dict.fromkeys(problems)), "name": first.get("name")}
    return out
