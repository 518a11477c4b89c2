"""`load_mode="mapped"` over the wire: one copy of the weights for all workers of a host.

The member of the line there receives into the version file that nobody uses, passes the bytes on from
there, and tells its followers where they lie; all of them, itself included, go over to it at commit. The
files are kept by that worker from connect to connect, as those of `shm` are by the sender.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import LoadWeights
from rayxfer.engines.frames import version_frames
from rayxfer.engines.line import PARTS_IN_FLIGHT, Line, Receiver, cuts
from rayxfer.engines.ring import RingWriter
from rayxfer.engines.versions import Versions
from rayxfer.memfile import PAGE_BYTES, ForeignFile, MemoryFile, map_for_any_thread, populate
from rayxfer.packing import Bucket, Layout, unpack
from rayxfer.topology import Facts

__all__ = ["HostCopy", "receive_version"]


@dataclass(frozen=True)
class _Own:
    """This worker's own use of a file, told to the versions that it keeps itself."""

    versions: Versions
    inode: int
    own: bool = True

    def going(self) -> None:
        self.versions.learn([None], [(0, self.inode)])

    def live(self) -> None:
        self.versions.learn([None], [(self.inode, self.inode)])


class HostCopy:
    """The files, as one channel sees them.

    Args:
        kept: what outlives the channel at this worker.
        num_bytes: of a version.
        mates: the workers that read this one's ring, in the order of its readers.
    """

    def __init__(self, kept: dict[str, Any], num_bytes: int, mates: Sequence[Facts]) -> None:
        self.versions: Versions = kept.setdefault("versions", Versions())
        self._mates = tuple(mates)
        self._mapped: dict[int, tuple[torch.Tensor, ForeignFile]] = {}
        if num_bytes:
            self.versions.prepare(num_bytes)
            for file in self.versions.files:
                self.map(file)

    def learn(self, ring: RingWriter | None) -> None:
        """What the followers said until now; from a ring that is closed, for the last time."""
        if ring is not None:
            self.versions.learn(self._mates, ring.held())

    def pick(self, num_bytes: int) -> MemoryFile:
        """The file to be written. Raises TransferError: there is no room for one."""
        file = self.versions.pick(num_bytes)
        inodes = {one.about["inode"] for one in self.versions.files}
        self._mapped = {inode: both for inode, both in self._mapped.items() if inode in inodes}
        return file

    def map(self, file: MemoryFile) -> tuple[torch.Tensor, ForeignFile]:
        """Where to receive to (mapped once more, for gloo), and what the worker's weights are to be."""
        inode = int(file.about["inode"])
        if inode not in self._mapped:
            whole = map_for_any_thread(int(file.about["fd"]), int(file.about["file_bytes"]))
            populate(whole)
            foreign = ForeignFile(**file.about, private=True)  # type: ignore[arg-type]
            self._mapped[inode] = (whole[PAGE_BYTES:], foreign)
        return self._mapped[inode]


def receive_version(line: Line, copy: HostCopy, layout: Layout, load_weights: LoadWeights) -> None:
    """Worker: take one round into a version file, and go over to it once it is committed.

    Raises:
        TransferError: a peer was lost, the line was aborted, or there is no room. Nothing that anybody uses
            was written to.
    """
    _Writer(line, copy, layout, load_weights).run()


class _Writer(Receiver):
    def __init__(
        self, line: Line, copy: HostCopy, layout: Layout, load_weights: LoadWeights
    ) -> None:
        super().__init__(line, load_weights)
        self._copy, self._layout = copy, layout
        self._copy.learn(line.ring)
        self._file = self._copy.pick(layout.file_bytes)
        self._whole, self._mine = self._copy.map(self._file)
        self._claim = _Own(self._copy.versions, int(self._file.about["inode"]))
        self._told = None if line.ring is None else version_frames(line.ring)
        self._posted: deque[tuple[torch.Tensor, Any, Bucket | None]] = deque()
        self._passing: deque[Any] = deque()

    def run(self) -> None:
        try:
            for bucket in self._layout.plan.buckets:
                start = self._layout.starts[bucket.index]
                place = self._whole[start : start + bucket.num_bytes]
                if not bucket.num_bytes:
                    self._posted.append((place, None, bucket))
                for first, end in cuts(bucket.num_bytes, self._line.part_bytes):
                    while len(self._posted) >= PARTS_IN_FLIGHT:
                        self._take_one()
                    part = place[first:end]
                    last = bucket if end == bucket.num_bytes else None
                    self._posted.append((part, self._before.start(part), last))
            while self._posted:
                self._take_one()
        except BaseException:
            # nothing is to arrive in the file any more once this has returned
            self._before.abort()
            if not self._before.settle():
                self._copy.versions.forget(self._file)
            raise
        if self._told is not None:
            self._told.publish()
        self._wait_passed(self._passing)

    def _take_one(self) -> None:
        """The oldest part: wait for it, pass it on, and hand over the bucket that it completes."""
        part, work, bucket = self._posted.popleft()
        if work is not None:
            self._before.wait(work)
            self._passing.append(self._pass_on(part))
            while len(self._passing) > PARTS_IN_FLIGHT:
                self._wait_passed([self._passing.popleft()])
        if bucket is None:
            self._progress(part.numel())
            return
        # what was seen to move is counted when it is handed over
        self._progress(part.numel() - bucket.num_bytes)
        start = self._layout.starts[bucket.index]
        mine = self._mine.bytes[start : start + bucket.num_bytes]
        views = unpack(bucket, self._layout.metadata, mine)
        self._load.keep(views, self._mine, self._claim)  # type: ignore[attr-defined]
        if self._told is not None and bucket.num_bytes:
            self._told.add(self._file.about, self._layout.in_file(bucket), bucket.num_bytes)
