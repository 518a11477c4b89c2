"""Workers in processes of their own, without Ray: for what threads cannot show (memory handles, kills)."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle  # between our own processes; not multiprocessing's, which shares tensors in files
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from rayxfer.client import WorkerClient
from rayxfer.errors import WorkerLost

__all__ = ["ProcessWorker"]


class ProcessWorker(WorkerClient):
    """A worker session in a spawned process; give it to `LocalController` as a worker.

    The process ends with `close`, or when this one does.

    Args:
        build: makes the model, or a `Binding`, there. Importable by name.
        arguments: for `build`.
        environ: set there before anything of torch runs.
    """

    def __init__(
        self,
        build: Callable[..., Any],
        *arguments: Any,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(
            target=_serve, args=(theirs, build, arguments, dict(environ or {})), daemon=True
        )
        self._process.start()
        theirs.close()
        self._ids = itertools.count()
        self._futures: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._gone = False
        self._listener = threading.Thread(target=self._listen, name="process-worker", daemon=True)
        self._listener.start()

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (f"the worker in process {self.pid}",)  # no process but this one can reach it

    @property
    def pid(self) -> int:
        """Of the worker's process."""
        return int(self._process.pid or 0)

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return self._send(("handle", op, message))

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """`function(model, *arguments)` there; importable by name. Raises what it raises."""
        return self.start(function, *arguments).result(timeout=120)

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """As `run`, without waiting."""
        return self._send(("run", function, arguments))

    def _send(self, what: tuple[Any, ...]) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._ids)
            self._futures[number] = future
            try:
                if self._gone:
                    raise OSError("the pipe is closed")
                self._connection.send_bytes(_packed(number, what))
            except OSError as error:
                del self._futures[number]
                future.set_exception(WorkerLost(f"the worker's process is gone: {error}"))
        return future

    def _listen(self) -> None:
        while True:
            try:
                data = self._connection.recv_bytes()
            except (EOFError, OSError):
                break
            number = int.from_bytes(data[:_NUMBER_BYTES])
            try:
                good, value = pickle.loads(data[_NUMBER_BYTES:])
            except Exception as error:  # not everything that can be pickled can be unpickled
                good, value = False, error
            with self._lock:
                future = self._futures.pop(number)
            if good:
                future.set_result(value)
            else:
                future.set_exception(value)
        with self._lock:
            self._gone = True
            left, self._futures = self._futures, {}
        for future in left.values():
            future.set_exception(WorkerLost("the worker's process is gone"))

    def close(self) -> None:
        """End the process. Safe to call twice."""
        with contextlib.suppress(OSError):
            # shut down, not closed alone: a thread reads it, and the other end would not be told
            with socket.socket(fileno=os.dup(self._connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
            # it may be about to read again, of what would be closed then
            self._listener.join(5.0)
            self._connection.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5.0)

    def __enter__(self) -> ProcessWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NUMBER_BYTES = 8


def _packed(number: int, what: Any) -> bytes:
    return number.to_bytes(_NUMBER_BYTES) + pickle.dumps(what)


def _serve(
    connection: Connection, build: Callable[..., Any], arguments: Any, environ: dict[str, str]
) -> None:
    os.environ.update(environ)
    from rayxfer.binding import Binding
    from rayxfer.session import WorkerSession

    made = build(*arguments)
    binding = made if isinstance(made, Binding) else Binding(made)
    session = WorkerSession(binding)
    sending = threading.Lock()

    def answer(number: int, kind: str, what: Any, given: Any) -> None:
        try:
            if kind == "handle":
                reply = _packed(number, (True, session.handle(what, given)))
            else:
                reply = _packed(number, (True, what(binding.live_model(), *given)))
        except Exception as error:  # the caller's, who gets it
            reply = _packed(number, (False, error))
        with sending, contextlib.suppress(OSError):
            connection.send_bytes(reply)

    while True:
        try:
            data = connection.recv_bytes()
        except (EOFError, OSError):
            return
        number = int.from_bytes(data[:_NUMBER_BYTES])
        message = pickle.loads(data[_NUMBER_BYTES:])
        threading.Thread(target=answer, args=(number, *message), daemon=True).start()
