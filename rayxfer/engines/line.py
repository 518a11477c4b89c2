"""One member's end of a line: bytes come from the one before it, and go on to the one after.

Every member waits for the one part that it needs next and passes it on while it loads, so a line is
hardly slower than its slowest link, and no link carries a byte twice. Between neighbours there is a
`Group` of two. A member that leads others of its host receives into the slots of a ring, from which they
read.

What travels are the buckets of the layout, in order, those larger than `part_bytes` in parts of that
size. A bucket is staged; but a tensor that travels alone is sent from where it lies, and received in its
place where the loader has one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rayxfer.base import LoadWeights
from rayxfer.copying import copy_bytes, is_memory
from rayxfer.engines.collective import (
    IN_FLIGHT,
    Group,
    Staging,
    deliver,
    deliver_alone,
    expect_end,
    fill,
    landing_of,
    next_tensor,
)
from rayxfer.engines.frame_reader import FrameReader
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.errors import TransferError
from rayxfer.memfile import map_for_any_thread
from rayxfer.packing import Bucket, Layout, as_bytes, plain

if TYPE_CHECKING:
    from rayxfer.engines.host_copy import HostCopy

__all__ = ["PARTS_IN_FLIGHT", "SLOTS", "Line", "Receiver", "cuts", "receive_line", "send_line"]

PARTS_IN_FLIGHT = 8
SLOTS = 4
"""Of a leader's ring."""


class Line(Group):
    """Where a member's bytes come from, and where they go.

    Attributes:
        part_bytes: the longest that travels in one piece; the same along the line.
        before, after: the groups with its neighbours: it is rank 1 in the one and 0 in the other.
        ring: what its followers read.
        slots: the whole of that memory file, mapped once more, for gloo.
        reader: in place of all these, what reads its leader's ring.
        copy: what makes its host's one copy of the weights, if there is to be one.
    """

    def __init__(self, part_bytes: int) -> None:
        self.device = torch.device("cpu")
        self.part_bytes = part_bytes
        self.before: Group | None = None
        self.after: Group | None = None
        self.ring: RingWriter | None = None
        self.slots: torch.Tensor | None = None
        self.reader: FrameReader | None = None
        self.copy: HostCopy | None = None
        self._aborted = False

    def lead(self, ring: RingWriter) -> None:
        """Receive into this ring from now on."""
        about = ring.describe()
        self.ring = ring
        self.slots = map_for_any_thread(int(about["fd"]), int(about["file_bytes"]))

    def follow(self, ring: RingReader) -> None:
        """Read this ring from now on."""
        self.reader = FrameReader(ring)

    def unlead(self) -> None:
        """There is nobody to read the ring."""
        ring, self.ring, self.slots = self.ring, None, None
        if ring is not None:
            ring.close()
            if self.copy is not None:
                self.copy.learn(ring)
            ring.release()

    def start(self, buffer: torch.Tensor) -> Any:
        """Begin to send to the next."""
        if self.after is None or self._aborted:
            raise TransferError("the line was aborted", phase="update")
        return self.after.start(buffer)

    def wait(self, work: Any) -> None:
        if self.after is None:
            raise TransferError("the line was aborted", phase="update")
        self.after.wait(work)

    def abort(self) -> None:
        self._aborted = True
        for end in (self.before, self.after, self.ring, self.reader):
            if end is not None:
                end.abort()

    def close(self) -> None:
        self._aborted = True
        ends = self.before, self.after
        for group in ends:
            if group is not None:
                group.close()
        if self.reader is not None:
            self.reader.abort()
            self.reader.close()
        self.unlead()
        self.before = self.after = self.reader = self.copy = None


def cuts(num_bytes: int, part_bytes: int) -> Iterator[tuple[int, int]]:
    """The parts in which so many bytes travel."""
    for start in range(0, num_bytes, part_bytes):
        yield start, min(start + part_bytes, num_bytes)


def send_line(
    line: Line,
    staging: Staging,
    iterator: Iterator[tuple[str, torch.Tensor]],
    layout: Layout,
    *,
    stable: bool,
) -> None:
    """Sender: send every bucket to the first of the line. Returns when all bytes are out.

    `stable`: yielded tensors keep memory and values until then, so several may be on their way.

    Raises:
        TransferError: a peer was lost, or the line was aborted.
    """
    pending: deque[tuple[Any, int]] = deque()  # with the staging buffer in use, or -1
    turn = temporary_bytes = 0

    def wait_one() -> None:
        line.wait(pending.popleft()[0])

    def staged(num_bytes: int) -> torch.Tensor:
        while any(used == turn % len(staging) for _, used in pending):
            wait_one()
        return staging.get(turn, layout.shared_bytes)[:num_bytes]

    def start_staged(buffer: torch.Tensor) -> None:
        nonlocal turn
        pending.append((line.start(buffer), turn % len(staging)))
        turn += 1

    for bucket in layout.plan.buckets:
        if not bucket.alone:
            buffer = staged(bucket.num_bytes)
            fill(layout, bucket, iterator, buffer)
            if bucket.num_bytes:
                start_staged(buffer)
            continue
        for piece in bucket.pieces:
            tensor = next_tensor(iterator, layout.metadata[piece.tensor])
            if not piece.num_bytes:
                continue
            flat = as_bytes(plain(tensor).to(line.device))
            made = int(getattr(iterator, "temporary_bytes", 0))
            # its owner may change it as soon as the next one is asked for, or it is memory of this pass, of
            # which there is not to be more than one
            passing = not stable or made != temporary_bytes or flat.data_ptr() != tensor.data_ptr()
            temporary_bytes = made
            if passing and piece.num_bytes <= layout.shared_bytes:
                buffer = staged(piece.num_bytes)
                take = getattr(iterator, "take", None) if is_memory(tensor) else None
                (take or copy_bytes)(buffer.data_ptr(), flat.data_ptr(), piece.num_bytes)
                start_staged(buffer)
            else:
                for start, end in cuts(flat.numel(), line.part_bytes):
                    while len(pending) >= PARTS_IN_FLIGHT:
                        wait_one()
                    pending.append((line.start(flat[start:end]), -1))
                while passing and pending:
                    wait_one()
            del tensor, flat
    expect_end(iterator)
    while pending:
        wait_one()


def receive_line(
    line: Line,
    staging: Staging,
    layout: Layout,
    load_weights: LoadWeights,
) -> None:
    """Worker: take one round from wherever it comes, hand it over, and pass it on.

    Raises:
        TransferError: a peer was lost, or the line was aborted. What was handed over until then stays
            with the loader.
    """
    if line.reader is not None:
        line.reader.receive(layout, load_weights)
    elif line.ring is not None:
        _Leader(line, layout, load_weights).run()
    else:
        _Member(line, staging, layout, load_weights).run()


class Receiver:
    """What those in the line have in common."""

    def __init__(self, line: Line, load_weights: LoadWeights) -> None:
        before = line.before
        if before is None:
            raise TransferError("the line was aborted", phase="update")
        self._line, self._before, self._load = line, before, load_weights
        self._progress = getattr(load_weights, "progress", lambda num_bytes: None)

    def _pass_on(self, buffer: torch.Tensor) -> Any:
        return self._line.start(buffer) if self._line.after is not None else None

    def _wait_passed(self, works: list[Any] | deque[Any]) -> None:
        for work in works:
            if work is not None:
                self._line.wait(work)
        works.clear()


@dataclass
class _Arriving:
    """One bucket on its way. `works`: the parts that were passed on, in order."""

    bucket: Bucket
    buffer: torch.Tensor | None
    landed: bool
    staged: bool
    works: list[Any] = field(default_factory=list)
    left: int = 0


class _Member(Receiver):
    """Receives into places and staging buffers, several parts at a time, of which two may be buckets
    that take memory of their own."""

    def __init__(
        self,
        line: Line,
        staging: Staging,
        layout: Layout,
        load_weights: LoadWeights,
    ) -> None:
        super().__init__(line, load_weights)
        self._staging, self._layout = staging, layout
        self._part_bytes = line.part_bytes
        self._turn = 0
        self._pending: deque[tuple[_Arriving, int, int, Any]] = deque()
        # in buffers of ours: not delivered, or not passed on
        self._open: deque[_Arriving] = deque()
        # from places in the model: to be waited for at the end
        self._passing: deque[Any] = deque()

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            # Nothing is to arrive in the model any more once this has returned: a process that was
            # stopped still finds bytes of its old round in its sockets.
            self._before.abort()
            self._before.settle()
            raise

    def _run(self) -> None:
        for bucket in self._layout.plan.buckets:
            if not bucket.num_bytes:
                while self._pending:
                    self._take_one()
                deliver_alone(self._layout, bucket, None, self._load, landed=False)
                continue
            one = self._room_for(bucket)
            for start, end in cuts(bucket.num_bytes, self._part_bytes):
                while len(self._pending) >= PARTS_IN_FLIGHT:
                    self._take_one()
                assert one.buffer is not None
                work = self._before.start(one.buffer[start:end])
                self._pending.append((one, start, end, work))
        while self._pending:
            self._take_one()
        for one in self._open:
            self._wait_passed(one.works)
        self._wait_passed(self._passing)

    def _room_for(self, bucket: Bucket) -> _Arriving:
        parts = -(-bucket.num_bytes // self._part_bytes)
        staged = not bucket.alone
        if not staged:
            place = landing_of(self._load, self._layout, bucket, self._line.device)
            if place is not None:
                return _Arriving(bucket, place, landed=True, staged=False, left=parts)
        limit = len(self._staging) if staged else IN_FLIGHT
        while sum(one.staged == staged for one in self._open) >= limit:
            if self._open[0].left:
                self._take_one()
            else:
                self._wait_passed(self._open.popleft().works)
        if staged:
            whole = self._staging.get(self._turn, self._layout.shared_bytes)
            buffer = whole[: bucket.num_bytes]
            self._turn += 1
        else:
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._line.device)
        one = _Arriving(bucket, buffer, landed=False, staged=staged, left=parts)
        self._open.append(one)
        return one

    def _take_one(self) -> None:
        """The oldest part: wait for it, pass it on, and hand over the bucket that it completes."""
        one, start, end, work = self._pending.popleft()
        self._before.wait(work)
        assert one.buffer is not None
        passed = self._pass_on(one.buffer[start:end])
        if passed is not None:
            (self._passing if one.landed else one.works).append(passed)
        one.left -= 1
        if one.left:
            self._progress(end - start)
            return
        if start:
            self._progress(-start)  # they are counted when they are handed over
        if one.staged:
            deliver(self._layout, one.bucket, one.buffer, self._load)
            return
        if not one.landed:
            self._wait_passed(one.works)  # it is the loader's from then on
        buffer, one.buffer = one.buffer, None
        deliver_alone(self._layout, one.bucket, buffer, self._load, landed=one.landed)


class _Leader(Receiver):
    """Receives into the slots of its ring, and reads them as its followers do."""

    def __init__(self, line: Line, layout: Layout, load_weights: LoadWeights) -> None:
        super().__init__(line, load_weights)
        ring, slots = line.ring, line.slots
        if ring is None or slots is None:
            raise TransferError("the line was aborted", phase="update")
        self._ring, self._slots, self._layout = ring, slots, layout
        self._part_bytes = line.part_bytes
        self._passing: deque[Any] = deque()  # of the frames whose slots are not in use again
        self._posted: deque[tuple[Bucket, int, int, torch.Tensor, Any]] = deque()
        self._target: torch.Tensor | None = None
        self._landed = False

    def run(self) -> None:
        for bucket in self._layout.plan.buckets:
            if not bucket.num_bytes:
                while self._posted:
                    self._take_one()
                deliver_alone(self._layout, bucket, None, self._load, landed=False)
                continue
            for start, end in cuts(bucket.num_bytes, self._part_bytes):
                if len(self._posted) == SLOTS - 1:
                    self._take_one()
                self._post(bucket, start, end)
        while self._posted:
            self._take_one()
        self._wait_passed(self._passing)

    def _post(self, bucket: Bucket, start: int, end: int) -> None:
        """Receive into the next slot, once all are done with what was in it."""
        ahead = len(self._posted)
        while len(self._passing) + ahead >= SLOTS:
            work = self._passing.popleft()
            if work is not None:
                self._line.wait(work)
        first = int(self._ring.slot(ahead).storage_offset())
        buffer = self._slots[first : first + end - start]
        self._posted.append((bucket, start, end, buffer, self._before.start(buffer)))

    def _take_one(self) -> None:
        """The oldest part: wait for it, let the followers have it, pass it on, and read it."""
        bucket, start, end, buffer, work = self._posted.popleft()
        self._before.wait(work)
        self._ring.publish()
        self._passing.append(self._pass_on(buffer))
        self._read(bucket, start, end, buffer)

    def _read(self, bucket: Bucket, start: int, end: int, buffer: torch.Tensor) -> None:
        if bucket.num_bytes <= self._part_bytes:
            deliver(self._layout, bucket, buffer, self._load)
            return
        if not start:
            place = landing_of(self._load, self._layout, bucket, self._line.device)
            self._landed = place is not None
            self._target = (
                place if place is not None else torch.empty(bucket.num_bytes, dtype=torch.uint8)
            )
        assert self._target is not None
        target, stream = self._target[start:end], self._layout.streams
        copy_bytes(target.data_ptr(), buffer.data_ptr(), end - start, stream=stream)
        if end < bucket.num_bytes:
            self._progress(end - start)
            return
        self._progress(-start)
        target, self._target = self._target, None
        deliver_alone(self._layout, bucket, target, self._load, landed=self._landed)
