"""How to reach a worker: messages in, futures out. The sender and the coordinator know only this."""

from __future__ import annotations

import re
import sys
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

from rayxfer.daemons import daemon
from rayxfer.errors import ConfigError, RayxferError, TransferError, WorkerLost, portable_cause
from rayxfer.topology import Facts, process_gone

if TYPE_CHECKING:
    from rayxfer.session import WorkerSession

SLICE_S = 1.0
"""Longest time that one control call waits on a worker before it answers with its progress."""

__all__ = ["InProcessClient", "RayClient", "WorkerClient", "client_for", "start_all"]


class WorkerClient(ABC):
    """One worker's control plane.

    Attributes:
        key: the same for every client of one worker, where that can be told.
    """

    key: str | None = None

    @abstractmethod
    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """A message that may take up to about a second to be answered."""

    def signal(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        """An urgent message, which must not wait behind `call`."""
        return self.call(op, message)

    def check(self) -> None:  # noqa: B027 - a client without a check is fine
        """Raise ConfigError if this cannot be a worker at all."""


class RayClient(WorkerClient):
    """A Ray actor that is a `WorkerMixin`."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def check(self) -> None:
        if not hasattr(self.handle, "rayxfer_call"):
            raise ConfigError(
                f"{self.handle!r} is no inference worker: its class has to inherit rayxfer.WorkerMixin "
                "and call rayxfer_bind(model)"
            )

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._send(self.handle.rayxfer_call, op, message)

    def signal(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._send(self.handle.rayxfer_signal, op, message)

    @staticmethod
    def _send(method: Any, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        try:
            # By keyword: Ray's stand-in for a class that this process does not import takes no others.
            future: Future[dict[str, Any]] = method.remote(op=op, message=message).future()
        except Exception as error:  # Ray raises at once for an actor that it knows to be dead
            future = Future()
            future.set_exception(error)
        return future


class InProcessClient(WorkerClient):
    """A session in this process: for tests, benchmarks and checks without Ray."""

    def __init__(self, session: WorkerSession) -> None:
        self.session = session

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return spawn(lambda: self.session.handle(op, message), f"rayxfer-client-{op}")


def client_for(worker: Any) -> WorkerClient:
    """The client for what a user put in the list of workers."""
    return worker if isinstance(worker, WorkerClient) else RayClient(worker)


def start_all(
    clients: Sequence[WorkerClient], op: str, messages: Sequence[dict[str, Any]]
) -> Callable[[float], list[Future[dict[str, Any]]]]:
    """`call` on each at once. The result, called once, gives their futures: at once, or, where all
    are Ray actors, after fetching their answers together for as long as it is told.

    A future of its own for each answer costs Ray twice the processor time and twice the latency.
    """
    pairs = list(zip(clients, messages, strict=True))
    if len(pairs) < 2 or any(type(client) is not RayClient for client in clients):
        futures = [client.call(op, message) for client, message in pairs]
        return lambda wait_s: futures
    started: list[Any] = []
    for client, message in pairs:
        try:
            started.append(client.handle.rayxfer_call.remote(op=op, message=message))  # type: ignore[attr-defined]
        except Exception as error:  # Ray raises at once for an actor that it knows to be dead
            started.append(error)

    def gather(wait_s: float) -> list[Future[dict[str, Any]]]:
        import ray

        answers: list[Any] = started
        if not any(isinstance(one, Exception) for one in started):
            try:
                answers = ray.get(started, timeout=wait_s)
            except Exception:
                answers = started  # one is slow, or gone, or raised: its own future says so
        return [_future(one) for one in answers]

    return gather


def _future(one: Any) -> Future[dict[str, Any]]:
    """Of an answer, an error, or a reference to an answer."""
    if not isinstance(one, (dict, Exception)):
        waiting: Future[dict[str, Any]] = one.future()
        return waiting
    future: Future[dict[str, Any]] = Future()
    if isinstance(one, dict):
        future.set_result(one)
    else:
        future.set_exception(one)
    return future


def spawn(function: Callable[[], Any], name: str) -> Future[Any]:
    """Run `function` in a daemon thread of its own; a future for its outcome."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    daemon(run, name)
    return future


def outcome(future: Future[dict[str, Any]], rank: int | None) -> dict[str, Any] | RayxferError:
    """A finished call's answer, or its error as one of ours, with the worker's rank filled in."""
    error = future.exception(timeout=0)
    result: dict[str, Any] | RayxferError
    if error is None:
        answer = future.result(timeout=0)
        result = answer["error"] if isinstance(answer.get("error"), RayxferError) else answer
    else:
        result = mapped_error(error, rank)
    if (
        isinstance(result, RayxferError)
        and rank is not None
        and getattr(result, "worker", 0) is None
    ):
        result.worker = rank  # type: ignore[attr-defined]
        result.message = f"worker {rank}: {result.message}"
    return result


def mapped_error(error: BaseException, rank: int | None) -> RayxferError:
    """Ray's exceptions in our words: what the callee raised, or a `WorkerLost`."""
    inner = getattr(error, "cause", None)
    if isinstance(inner, RayxferError) and type(error).__name__.startswith("RayTaskError"):
        return inner
    if isinstance(error, RayxferError):
        return error
    if is_lost(error):
        who = "the actor" if rank is None else f"worker {rank}"
        return WorkerLost(
            f"{who} is gone: {type(error).__name__}: {_gist(error)}",
            worker=rank,
            cause=portable_cause(error),
        )
    shown = inner if isinstance(inner, BaseException) else error
    return TransferError(
        f"{type(shown).__name__}: {shown}", worker=rank, cause=portable_cause(shown)
    )


_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_LAST_LINE = re.compile(r"^(?:[\w.]+\.)?[A-Za-z_]\w*(?:Error|Exception|Unavailable|Backend)\b.*")


def _gist(error: BaseException) -> str:
    """What Ray says, in a line; where a constructor raised, what it raised."""
    lines = [_ANSI.sub("", line).strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line]
    if not lines:
        return ""
    raised = [line for line in lines[1:] if _LAST_LINE.match(line)]
    if "creation task" in lines[0] and raised:
        return f"its constructor raised {raised[-1]}"
    return lines[0]


def wait_answers(
    futures: dict[int, Future[dict[str, Any]]], facts: dict[int, Facts | None], timeout_s: float
) -> dict[int, dict[str, Any] | RayxferError | None]:
    """Answers by rank: ours, an error, or None for one that did not answer in time. A worker whose
    process is seen to be gone is not waited for."""
    answers: dict[int, dict[str, Any] | RayxferError | None] = dict.fromkeys(futures)
    deadline = time.monotonic() + timeout_s
    pending = dict(futures)
    while pending:
        done, _ = wait(pending.values(), timeout=min(0.1, max(0.0, deadline - time.monotonic())))
        for rank, future in list(pending.items()):
            if future in done or future.done():
                answers[rank] = outcome(pending.pop(rank), rank)
            elif process_gone(facts[rank]):
                answers[rank] = lost_process(rank, "connect")
                del pending[rank]
        if time.monotonic() >= deadline:
            break
    return answers


def lost_process(rank: int, phase: str) -> WorkerLost:
    """The worker's process ran on this host and is no more."""
    return WorkerLost(f"worker {rank}: its process is gone", phase=phase, worker=rank)


def is_lost(error: BaseException) -> bool:
    """Whether an exception of Ray's means that the actor cannot be reached."""
    exceptions = sys.modules.get("ray.exceptions")
    if exceptions is None:
        return False
    return isinstance(
        error,
        (
            exceptions.ActorDiedError,
            exceptions.ActorUnavailableError,
            exceptions.RayActorError,
            exceptions.WorkerCrashedError,
            exceptions.NodeDiedError,
            exceptions.TaskCancelledError,
        ),
    )


def reconstructed() -> bool:
    """Whether Ray has restarted the actor that this process is."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray warns about its own implementation of this property
        try:
            return bool(ray.get_runtime_context().was_current_actor_reconstructed)
        except (AssertionError, RuntimeError):  # not in an actor
            return False
