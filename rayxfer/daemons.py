"""Threads that do not keep the process alive, and are in the middle of nothing when it ends.

A daemon thread that comes back from torch (or gloo, or CUDA) when the interpreter is gone takes the process
down with it: "terminate called without an active exception", SIGABRT, after all of the user's work is done.
So the end of the process calls off what these threads do, and waits for them a moment.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["daemon", "ending", "waited_for"]

_END_S, _CLOSE_S = 5.0, 2.0
"""How long the end of the process waits for what was called off, and for what ends by itself. Whoever is
stuck is so in the user's code, or in a transport that lost its peer."""

_SLICE_S = 0.05

_log = logging.getLogger("rayxfer")
_running: dict[threading.Thread, Callable[[], object] | None] = {}
_ending = threading.Event()


def daemon(
    function: Callable[[], object], name: str, call_off: Callable[[], object] | None = None
) -> threading.Thread:
    """Run `function` in a daemon thread, for which the end of the process waits a moment.

    call_off: has `function` return soon, and returns at once itself. Called when the process ends, from
        another thread; None: it ends by itself.
    """

    def run() -> None:
        try:
            function()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=name, daemon=True)
    _running[thread] = call_off
    try:
        thread.start()
    except BaseException:
        del _running[thread]
        raise
    return thread


@contextlib.contextmanager
def waited_for(call_off: Callable[[], object]) -> Iterator[None]:
    """The same for what is done in here by whichever thread this is, the user's daemon maybe."""
    thread = threading.current_thread()
    mine = thread not in _running
    if mine:
        _running[thread] = call_off
    try:
        yield
    finally:
        if mine:
            _running.pop(thread, None)


def ending() -> bool:
    """Whether the process is about to end: nothing is to be begun any more."""
    return _ending.is_set()


@atexit.register
def _end() -> None:
    _ending.set()
    began = time.monotonic()
    called: set[threading.Thread] = set()
    while True:  # what is called off may start others, to close what it had open
        spent = time.monotonic() - began
        threads = list(_running.items())
        awaited = [thread for thread, off in threads if spent < (_END_S if off else _CLOSE_S)]
        if not awaited:
            return
        for thread, call_off in threads:
            if call_off is not None and thread not in called:
                called.add(thread)
                try:
                    call_off()
                except Exception:
                    _log.warning("%s could not be called off", thread.name, exc_info=True)
        for thread in awaited:
            with contextlib.suppress(RuntimeError):  # another thread is about to start it
                thread.join(_SLICE_S)


# A forked child has none of these threads, and what would be called off is its parent's.
os.register_at_fork(after_in_child=_running.clear)
