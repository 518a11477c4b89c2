"""What a handle remembers of its controller, for one that was restarted and has lost its workers.

A restarted controller rebuilds itself from the workers it was made with. If none of those can tell (all
were removed, or died), it knows neither its later workers nor the version; its handles do.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from rayxfer.coordinator import Coordinator

__all__ = ["Memory"]


class Memory:
    """Roster and version as one handle saw them last. Thread-safe.

    Copies in other processes start with the numbers alone: a handle of a worker keeps that worker
    alive, which is the creator's business.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._roster: dict[int, dict[str, Any]] | None = None
        self._numbers = {"version": 0, "round": 0, "epoch": 0, "next_rank": 0}

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._numbers)

    def __setstate__(self, numbers: dict[str, Any]) -> None:
        self.__init__()  # type: ignore[misc]
        self._numbers.update(numbers)

    @property
    def version(self) -> int:
        """The highest committed version that was seen."""
        return self._numbers["version"]

    def see(self, **numbers: int) -> None:
        """A version, a round, an epoch, a next rank: the highest counts."""
        with self._lock:
            for key, value in numbers.items():
                self._numbers[key] = max(self._numbers[key], value)

    def see_owner(self, owner: dict[str, Any]) -> None:
        """The record that every worker stores: the whole roster."""
        self.see(**{key: owner[key] for key in ("version", "epoch", "next_rank")})
        with self._lock:
            self._roster = {entry["rank"]: entry for entry in owner["roster"]}

    def add(self, ranks: Sequence[int], workers: Sequence[Any], backends: Sequence[str]) -> None:
        """Members that this handle brought. Knows the roster from here on."""
        with self._lock:
            roster = self._roster if self._roster is not None else {}
            for rank, worker, backend in zip(ranks, workers, backends, strict=True):
                roster[rank] = {"rank": rank, "handle": worker, "backend": backend}
            self._roster = roster
        self.see(next_rank=max(ranks, default=-1) + 1)

    def remove(self, workers: Sequence[Any]) -> None:
        """Ranks or handles that are members no more."""
        gone = {w if isinstance(w, int) else Coordinator.key_of(w) for w in workers}
        with self._lock:
            for rank, entry in list((self._roster or {}).items()):
                if not gone.isdisjoint((rank, Coordinator.key_of(entry["handle"]))):
                    assert self._roster is not None
                    del self._roster[rank]

    def told(self) -> dict[str, Any]:
        """What `Coordinator.present` is told; roster None: not known."""
        with self._lock:
            roster = None if self._roster is None else list(self._roster.values())
            return {**self._numbers, "roster": roster}
