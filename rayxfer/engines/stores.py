"""Which stores fill a ring's slots: usual ones, which leave the bytes in the writer's cache, or streamed
ones, which leave them in memory.

Usual ones are faster where writer and reader share a cache, and far slower where they do not (other
sockets, and other groups of cores in one socket): every line that is written has to be fetched from the
other's cache first. Measured between two threads that meet in a ring of 4 x 2 MiB, for 1 GiB: 78 ms with
usual stores and 86 streamed where a line goes there and back in 52 ns; 370 to 420 and 65 where it takes
330. Which of the two it is nobody says (in a virtual machine it changes by the second), so copies are
timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rayxfer.copying import can_stream

__all__ = ["Stores"]

_LEAST_BYTES = 1 << 20
"""Copies of less say nothing."""

_FACTOR = 2.0
"""So much slower usual stores have to be: where they are only a little slower, the reader finds the bytes
in cache, which is worth more."""

_PATIENCE = 2
"""So often in a row, for a copy that was disturbed once is no sign."""

_AGAIN = 256
"""After so many streamed slots usual stores are tried in one."""


class Stores:
    """Chooses for one ring, slot by slot, from the time that its writer's copies take.

    Args:
        clock: CPU time of the calling thread, in seconds: what else runs on its core is not its copies.

    Attributes:
        streamed: what is chosen now.
    """

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self.streamed = False
        self._clock = clock
        self._can = can_stream()
        self._seconds, self._num_bytes = 0.0, 0
        # of the last slot of each kind, in seconds per byte
        self._usual, self._other = 0.0, 0.0
        self._slow, self._left = 0, 0
        self._trying = False

    def begin(self) -> bool:
        """Whether the next slot is to be streamed."""
        self._seconds, self._num_bytes = 0.0, 0
        self._trying = self._left <= 0 if self.streamed else self._slow >= _PATIENCE
        return self.streamed != self._trying

    def timed(self, copy: Callable[..., Any], *args: Any) -> Any:
        """Call `copy`, which fills some of the slot; follow up with `count`."""
        if not self._can:
            return copy(*args)
        start = self._clock()
        result = copy(*args)
        self._seconds += self._clock() - start
        return result

    def count(self, num_bytes: int) -> None:
        """So much was filled by what was `timed`."""
        self._num_bytes += num_bytes

    def end(self) -> None:
        """The slot is full."""
        if not self._can or self._num_bytes < _LEAST_BYTES:
            return
        cost = self._seconds / self._num_bytes
        if self.streamed != self._trying:
            self._other = cost
            self._left -= 1
        else:
            self._usual = cost
        slow = self._usual > _FACTOR * self._other
        if self._trying:
            self.streamed, self._slow, self._left = slow, 0, _AGAIN
        elif not self.streamed:
            self._slow = self._slow + 1 if slow else 0
