"""Endings that may block: in threads of their own, for which the end of the process waits a moment."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

__all__ = ["close_later"]

_closing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def close_later(function: Callable[[], object], name: str) -> threading.Thread:
    """Run `function` in a daemon thread. It must come to an end, but may take its time."""
    thread = threading.Thread(target=function, name=name, daemon=True)
    _closing.add(thread)
    thread.start()
    return thread


@atexit.register
def _finish_closing() -> None:
    """A process that ends inside a transport's destructor aborts: give those a moment."""
    deadline = time.monotonic() + 2.0
    for thread in list(_closing):
        thread.join(max(0.0, deadline - time.monotonic()))
