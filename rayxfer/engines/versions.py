"""The memory files of `load_mode="mapped"`: two versions of the weights, which the workers of a host use
where they lie. They belong to the sender on its own host, elsewhere to the worker that the bytes reach.

A file may be written again only when nobody uses what it holds. What a worker uses is the file that it
said it went over to last (and that which it said it would), and that stands until it says otherwise or
its process is gone, whatever became of the channel meanwhile: a worker that was stopped and given up may
wake up and go on serving. What was said in a channel has to be learned when it closes; from then on
nobody can go over to what it carried.
Where both files are in use a third is made, and the oldest is left to those who use it; the kernel
frees it with the last of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from rayxfer.memfile import MemoryFile
from rayxfer.topology import Facts, process_gone

__all__ = ["Versions"]

_KEPT = 2


class Versions:
    """The files, and who uses which. Outlives channels (see `kept` of sessions' plans and of engines)."""

    def __init__(self) -> None:
        self._files: list[MemoryFile] = []
        self._uses: dict[Facts | None, set[int]] = {}
        self._lock = threading.Lock()

    @property
    def files(self) -> tuple[MemoryFile, ...]:
        return tuple(self._files)

    def prepare(self, num_bytes: int) -> None:
        """Have two files of this size, so that no round pays for a new one."""
        self._files = [file for file in self._files if file.num_bytes == num_bytes]
        while len(self._files) < _KEPT:
            self._files.append(MemoryFile(num_bytes, name="rayxfer-version"))

    def learn(self, workers: Sequence[Facts | None], said: Sequence[tuple[int, int]]) -> None:
        """What each worker said in its channel: the inode of the file that it uses, and of that to which it
        was to go over last; 0: nothing yet. None: this process itself."""
        by_process: dict[Facts | None, list[tuple[int, int]]] = {}
        for worker, inodes in zip(workers, said, strict=True):
            by_process.setdefault(worker, []).append(inodes)
        with self._lock:
            for process, pairs in by_process.items():
                found = {inode for pair in pairs for inode in pair if inode}
                if not all(uses for uses, _ in pairs):  # what it used before, it still does
                    found |= self._uses.get(process, set())
                self._uses[process] = found

    def pick(self, num_bytes: int) -> MemoryFile:
        """A file that nobody uses, to be written.

        Raises:
            TransferError: there is no room for a new one.
        """
        with self._lock:
            self._uses = {w: inodes for w, inodes in self._uses.items() if not process_gone(w)}
            used = {inode for inodes in self._uses.values() for inode in inodes}
        for file in self._files:
            if file.num_bytes == num_bytes and file.about["inode"] not in used:
                self._files.remove(file)
                self._files.append(file)
                return file
        file = MemoryFile(num_bytes, name="rayxfer-version")
        self._files = [*self._files, file][-_KEPT:]
        return file

    def forget(self, file: MemoryFile) -> None:
        """Never give this one out again: it may still be written to."""
        self._files = [one for one in self._files if one is not file]
