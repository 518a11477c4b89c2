"""The memory files of `load_mode="mapped"`: two versions of the weights, which the workers of the sender's
host use where they lie.

A file may be written again only when nobody uses what it holds. What a worker uses is the file that it
said it went over to last, and that stands until it says otherwise or its process is gone, whatever
became of the channel meanwhile: a worker that was stopped and given up may wake up and go on serving.
Where both files are in use a third is made, and the oldest is left to those who use it; the kernel
frees it with the last of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rayxfer.memfile import MemoryFile
from rayxfer.topology import Facts, process_gone

__all__ = ["Versions"]

_KEPT = 2


class Versions:
    """The sender's files, and who uses which. Outlives channels (`SessionPlan.kept`)."""

    def __init__(self) -> None:
        self._files: list[MemoryFile] = []
        self._uses: dict[Facts, int] = {}

    def prepare(self, num_bytes: int) -> None:
        """Have two files of this size, so that no round pays for a new one."""
        self._files = [file for file in self._files if file.num_bytes == num_bytes]
        while len(self._files) < _KEPT:
            self._files.append(MemoryFile(num_bytes, name="rayxfer-version"))

    def learn(self, workers: Sequence[Facts], inodes: Sequence[int]) -> None:
        """What each worker said last in its channel; 0: nothing yet."""
        for worker, inode in zip(workers, inodes, strict=True):
            if inode:
                self._uses[worker] = inode

    def pick(self, num_bytes: int) -> MemoryFile:
        """A file that nobody uses, to be written.

        Raises:
            TransferError: there is no room for a new one.
        """
        self._uses = {w: inode for w, inode in self._uses.items() if not process_gone(w)}
        used = set(self._uses.values())
        for file in self._files:
            if file.num_bytes == num_bytes and file.about["inode"] not in used:
                self._files.remove(file)
                self._files.append(file)
                return file
        file = MemoryFile(num_bytes, name="rayxfer-version")
        self._files = [*self._files, file][-_KEPT:]
        return file
