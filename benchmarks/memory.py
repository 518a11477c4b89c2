"""How much memory a process, or several, hold beyond what they held before. Linux only."""

from __future__ import annotations

import threading
from collections.abc import Sequence

_KIB = 1024


def _field(path: str, key: str) -> int:
    with open(path) as file:
        for line in file:
            if line.startswith(key):
                return int(line.split()[1]) * _KIB
    raise OSError(f"{path} has no {key}")


def pss_bytes(pid: int) -> int:
    """Its proportional set: a page that n processes map counts 1/n. 0 for a process that ended."""
    try:
        return _field(f"/proc/{pid}/smaps_rollup", "Pss:")
    except (FileNotFoundError, ProcessLookupError):
        return 0


class Peak:
    """The most resident memory that one process had since this was made, above what it had then.
    Exact (the kernel's high-water mark); pages shared with others count in full."""

    def __init__(self, pid: int) -> None:
        self._status = f"/proc/{pid}/status"
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")  # sets the mark back to what is resident now
        self._before = _field(self._status, "VmRSS:")

    def extra_bytes(self) -> int:
        return max(0, _field(self._status, "VmHWM:") - self._before)


class HostPeak:
    """The most memory that several processes held together, above what they held at the start:
    proportional sets, summed every few milliseconds by a thread. A context manager."""

    def __init__(self, pids: Sequence[int], interval_s: float = 0.005) -> None:
        self._pids, self._interval_s = list(pids), interval_s
        self._before = self._peak = self.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def now(self) -> int:
        """Bytes held together at this moment."""
        return sum(pss_bytes(pid) for pid in self._pids)

    def _watch(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._peak = max(self._peak, self.now())

    def __enter__(self) -> HostPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._peak = max(self._peak, self.now())

    def extra_bytes(self) -> int:
        return max(0, self._peak - self._before)
