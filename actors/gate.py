"""The gate between generation and weight updates: nothing reads weights while they change.

A request is *admitted* once and then takes *steps* (one forward pass each). Pausing closes the gate in
one of vLLM's three ways: "keep" freezes requests between two steps and lets them go on later, "wait"
lets those that run end first, "abort" ends them at their next step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rayxfer.errors import ConfigError, StateError, TransferTimeout

__all__ = ["Gate", "RequestAborted"]

_SLICE_S = 1.0


class RequestAborted(Exception):
    """The request was ended by pause mode "abort"."""


class Gate:
    """Thread-safe. Opens open."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._draining = False
        self._shut = False
        self._refusal: str | None = None
        self._requests = 0
        self._steps = 0
        self._generation = 0  # rises with every abort; a request remembers its own

    def pause(self, mode: str) -> None:
        """Close the gate and return when nothing reads the weights. Safe to call twice; `resume`
        from another thread calls it off."""
        if mode not in ("keep", "wait", "abort"):
            raise ConfigError(f"pause mode {mode!r}: expected 'keep', 'wait' or 'abort'")
        with self._changed:
            if self._closed:
                return
            if mode == "keep":
                self._closed = True
                self._await(lambda: self._steps == 0)
                return
            self._draining = True
            if mode == "abort":
                self._generation += 1
            self._changed.notify_all()
            self._await(lambda: self._requests == 0)
            if self._draining:
                self._closed, self._draining = True, False

    def _await(self, ready: object) -> None:
        assert callable(ready)
        while not ready() and (self._closed or self._draining):
            self._changed.wait(_SLICE_S)

    def resume(self) -> None:
        """Open the gate. Safe to call twice."""
        with self._changed:
            self._closed = self._draining = False
            self._changed.notify_all()

    def refuse(self, reason: str | None) -> None:
        """From now on every new request fails at once with `reason`; None: admit again."""
        with self._changed:
            self._refusal = reason
            self._changed.notify_all()

    def shut(self) -> None:
        """For good: whoever waits, and whoever comes, fails."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def ticket(self) -> int:
        """What a request that is admitted now would be given: it changes with every abort."""
        with self._changed:
            return self._generation

    @contextmanager
    def request(self, deadline: float) -> Iterator[int]:
        """One request, from admission to its end; yields a ticket for `step`.

        Raises:
            TransferTimeout: the gate stayed closed until `deadline`. StateError: refused or shut.
        """
        with self._changed:
            self._wait_open(deadline, lambda: self._closed or self._draining)
            self._requests += 1
            ticket = self._generation
        try:
            yield ticket
        finally:
            with self._changed:
                self._requests -= 1
                self._changed.notify_all()

    @contextmanager
    def step(self, ticket: int, deadline: float) -> Iterator[None]:
        """One reading of the weights; waits while the gate is closed.

        Raises:
            RequestAborted: a pause in mode "abort" came. TransferTimeout, StateError: as `request`.
        """
        with self._changed:
            if ticket != self._generation:
                raise RequestAborted
            self._wait_open(deadline, lambda: self._closed)
            if ticket != self._generation:
                raise RequestAborted
            self._steps += 1
        try:
            yield
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    def _wait_open(self, deadline: float, barred: object) -> None:
        assert callable(barred)
        while True:
            if self._shut:
                raise StateError("this worker was shut down")
            if self._refusal is not None:
                raise StateError(self._refusal)
            if not barred():
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    "the request's own deadline passed while the weights were being updated"
                )
            self._changed.wait(min(left, _SLICE_S))
