"""One operation that others wait for in slices, in a thread of its own or in that of its first caller."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

from rayxfer.daemons import daemon
from rayxfer.errors import RayxferError, TransferError, portable_cause

__all__ = ["Task"]


class Task:
    """Starts at once in a thread of its own (`call_off`: see `daemon`); with `own_thread=False` somebody
    has to `run` it.

    Attributes:
        key: what it is; its first part names the operation.
        done: set at its end.
        result: what `function` returned, or `{"error": …}`.
    """

    def __init__(
        self,
        key: tuple[Any, ...],
        function: Callable[[], dict[str, Any]],
        *,
        own_thread: bool = True,
        call_off: Callable[[], object] | None = None,
    ) -> None:
        self.key = key
        self.done = threading.Event()
        self.result: dict[str, Any] = {}
        self._function = function
        if own_thread:
            name = f"rayxfer-{key[0]}"
            first = _gpu()
            daemon(lambda: self.run(first), name, call_off)

    def run(self, first: Callable[[], object] = lambda: None) -> None:
        """Do it, here, after `first`. Raises nothing: see `result`."""
        try:
            first()
            self.result = self._function()
        except RayxferError as error:
            self.result = {"error": error}
        except BaseException as error:
            text = f"{self.key[0]} failed: {type(error).__name__}: {error}"
            self.result = {
                "error": TransferError(text, phase=self.key[0], cause=portable_cause(error))
            }
        finally:
            self.done.set()


def _gpu() -> Callable[[], None]:
    """For the new thread to be on the caller's GPU. Without torch (the controller's process, which is not
    to load it for this) there is none."""
    if "torch" not in sys.modules:
        return lambda: None
    from rayxfer.threads import gpu_of_this_thread

    return gpu_of_this_thread()
