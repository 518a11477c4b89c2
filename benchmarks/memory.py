"""How much memory processes hold beyond what they held before. Linux only."""

from __future__ import annotations

import threading
from collections.abc import Iterable

_KIB = 1024


def pss_bytes(pid: int) -> dict[str, int]:
    """Its proportional set, where a page that n processes map counts 1/n: "all", and of it
    "shared" (memory files, tmpfs, Ray's object store). Zero for a process that has ended."""
    found = {"all": 0, "shared": 0}
    keys = {"Pss:": "all", "Pss_Shmem:": "shared"}
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            for line in file:
                key, value, *_ = line.split()
                if key in keys:
                    found[keys[key]] = int(value) * _KIB
    except (FileNotFoundError, ProcessLookupError):
        pass
    return found


class Peaks:
    """The most that each of several processes held, and all of them together, above what they held
    at the start; read again and again by a thread. A context manager."""

    def __init__(self, pids: Iterable[int], interval_s: float = 0.001) -> None:
        self._pids, self._interval_s = list(dict.fromkeys(pids)), interval_s
        self._before = self._read()
        self._peaks = dict(self._before)
        self._peak = sum(self._before.values())
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _read(self) -> dict[int, int]:
        return {pid: pss_bytes(pid)["all"] for pid in self._pids}

    def _look(self) -> None:
        # One process is read after the other, and a page moves from one's share to another's meanwhile,
        # when somebody maps a file: then it would count twice. What a second reading does not find either
        # was never held by all of them at one moment.
        first, second = self._read(), self._read()
        found = {pid: min(value, second[pid]) for pid, value in first.items()}
        self._peaks = {pid: max(self._peaks[pid], value) for pid, value in first.items()}
        self._peak = max(self._peak, sum(found.values()))

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._look()

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._look()

    def of(self, pid: int) -> int:
        """Bytes that this one held at the most, above what it held at the start."""
        return self._peaks[pid] - self._before[pid]

    def together(self) -> int:
        """Bytes that all of them held at one moment, at the most, above the start."""
        return self._peak - sum(self._before.values())
