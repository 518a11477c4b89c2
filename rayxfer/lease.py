"""How a coordinator knows that a trainer in the middle of a round is alive."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from collections.abc import Callable
from typing import Any

from rayxfer.daemons import daemon
from rayxfer.errors import RayxferError

__all__ = ["Lease"]

_IDLE_S = 60.0


class Lease:
    """Tells the coordinator every second that this trainer lives, while there is a claim.

    One thread for all rounds, which looks once a second: starting one costs a round more than many of
    its messages do. It ends with a minute of idleness, and with `close`.
    """

    def __init__(self, renew: Callable[[dict[str, Any]], None]) -> None:
        self._renew = renew
        self._changed = threading.Condition()
        self._claim: dict[str, Any] | None = None
        self._context = contextvars.copy_context()
        self._used = 0.0
        self._running = self._closed = False

    def start(self, claim: dict[str, Any]) -> None:
        with self._changed:
            self._claim, self._used = claim, time.monotonic()
            self._context = contextvars.copy_context()
            if not self._running:
                self._running, self._closed = True, False
                daemon(self._run, "rayxfer-lease", self.close)

    def stop(self) -> None:
        self._claim = None

    def close(self) -> None:
        with self._changed:
            self._claim, self._closed = None, True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(1.0)
                claim, idle = self._claim, time.monotonic() - self._used
                if self._closed or (claim is None and idle > _IDLE_S):
                    self._running = False
                    return
            if claim is not None:
                # A refusal, or a controller that restarts: the main thread finds out what it means.
                with contextlib.suppress(RayxferError):
                    self._context.run(self._renew, claim)
