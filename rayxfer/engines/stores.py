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
from collections import deque
from collections.abc import Callable
from typing import Any

from rayxfer.copying import can_stream

__all__ = ["Stores"]

_LEAST_BYTES = 1 << 20
"""Copies of less say nothing, unless no slot holds twice as much."""

_FACTOR = 2.0
"""So much slower usual stores have to be: where they are only a little slower, the reader finds the bytes
in cache, which is worth more."""

_SAMPLES = 2
"""The better one of so many counts: a copy may be disturbed."""

_AGAIN = 256
"""After so many slots the other stores are tried, in `_SAMPLES` of them."""


class Stores:
    """Chooses for one ring, slot by slot, from the time that its writer's copies take.

    Args:
        slot_bytes: of the ring.
        clock: CPU time of the calling thread, in seconds: what else runs on its core is not its copies.

    Attributes:
        streamed: what is chosen now.
    """

    def __init__(self, slot_bytes: int, clock: Callable[[], float] = time.thread_time) -> None:
        self.streamed = False
        self._least_bytes = min(_LEAST_BYTES, slot_bytes // 2)
        self._clock = clock
        self._can = can_stream()
        self._seconds, self._num_bytes = 0.0, 0
        # seconds per byte of the last slots of each kind: usual, streamed
        self._costs = deque[float](maxlen=_SAMPLES), deque[float](maxlen=_SAMPLES)
        self._left, self._trying = _SAMPLES, 0
        self._slow = 0

    def begin(self) -> bool:
        """Whether the next slot is to be streamed."""
        self._seconds, self._num_bytes = 0.0, 0
        return self._now

    @property
    def _now(self) -> bool:
        """Whether this slot is streamed."""
        return self.streamed != bool(self._trying)

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
        if not self._can or self._num_bytes < self._least_bytes:
            return
        usual, other = self._costs
        cost = self._seconds / self._num_bytes
        (other if self._now else usual).append(cost)
        if self._trying:
            self._trying -= 1
            if not self._trying:
                self.streamed = min(usual) > _FACTOR * min(other)
                self._left, self._slow = _AGAIN, 0
            return
        self._left -= 1
        much = not self.streamed and bool(other) and cost > _FACTOR * min(other)
        self._slow = self._slow + 1 if much else 0
        if self._left <= 0 or self._slow >= _SAMPLES:
            self._trying = _SAMPLES
