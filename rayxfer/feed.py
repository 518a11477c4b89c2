"""From one pass over the source to every channel: bounded queues, and a way to break them off."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import torch

from rayxfer.copying import PIECE_BYTES, Hasher, copy_bytes, copy_many
from rayxfer.digest import XXH3, Digest, digest, digest_paced
from rayxfer.errors import RayxferError
from rayxfer.packing import Packed
from rayxfer.source import Standing

__all__ = ["Batch", "Feed"]

_SLICE_S = 1.0
"""Waits end by `abort` or `close`; they look again this often all the same."""

Batch = list[tuple[str, torch.Tensor]]


class Feed:
    """One channel's end of the pass: the iterator that `trainer_send_weights` is given.

    At most one batch waits while one is consumed. `next` raises the error of `abort`.

    Args:
        digesting: keep this digest of every tensor that is handed out. An engine that copies with `take`
            has it taken on the way; else the tensor is read once more when the next one is asked for.
        stays: tensors keep their values until `finish`.

    Attributes:
        starved: the consumer is waiting for the source (so the channel is not what is slow).
        last_name: the last name handed out.
        handed: how many tensors were handed out.
        digests: of the tensors handed out, complete once the end was reached, and `finish` called.
        temporary_bytes: of what was handed out, and was made for this pass alone: whoever holds on to
            many tensors holds on to that as well.
    """

    def __init__(self, *, digesting: Digest | None = None, stays: bool = False) -> None:
        self.digests: list[int] | None = None if digesting is None else []
        self._digesting, self._stays = digesting, stays
        # on the host, from addresses, or on the way; or else by whoever has the tensor
        self._by_address = digesting is None or digesting is XXH3
        self._later: list[int | torch.Tensor] = []
        self._current: torch.Tensor | None = None
        self._hasher: Hasher | None = None
        self._changed = threading.Condition()
        self._batches: deque[tuple[Batch, int]] = deque()
        self._local: Batch = []
        self._at = 0
        self._standing: Standing | None = None
        self._closed = False
        self._finished = False
        self._error: RayxferError | None = None
        self.pull: Callable[[], Iterator[tuple[Batch, int]]] | None = None
        """Where the batches come from, if not by `put` from another thread."""
        self._pulled: Iterator[tuple[Batch, int]] | None = None
        self.starved = False
        self.last_name: str | None = None
        self.handed = 0
        self.temporary_bytes = 0

    def put(self, batch: Batch, temporary_bytes: int = 0) -> None:
        """Hand over a batch once there is room. Raises the error of `abort`."""
        with self._changed:
            self._wait(lambda: not self._batches)
            if self._finished:
                return
            self._batches.append((batch, temporary_bytes))
            self._changed.notify_all()

    def stand(self, standing: Standing) -> None:
        """All of the pass at once, instead of `put` and `close`: before the consumer asks for anything."""
        self._standing = standing
        self._closed = True

    def wait_consumed(self) -> None:
        """Return once all that was put is done with: the next one was asked for. Raises as `put`."""
        with self._changed:
            self._wait(lambda: not self._batches and self.starved)

    def _wait(self, ready: Callable[[], bool]) -> None:
        while not ready() and not self._finished:
            if self._error is not None:
                raise self._error
            self._changed.wait(_SLICE_S)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """The pass is over."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def finish(self) -> None:
        """The consumer wants no more: let a waiting `put` go."""
        try:
            self._digest_current()
            if self._later and self._digesting is not None:
                self.digests, self._later = self._digesting.settle(self._later), []
        finally:
            with self._changed:
                self._finished = True
                self._changed.notify_all()

    def abort(self, error: RayxferError) -> None:
        """Make both sides raise `error`."""
        with self._changed:
            if self._error is None:
                self._error = error
            self._changed.notify_all()

    def __iter__(self) -> Feed:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        if self._error is not None:
            raise self._error
        self._digest_current()
        standing = self._standing
        if standing is not None:
            if self.handed == len(standing.names):
                raise StopIteration
            item = standing.names[self.handed], standing.tensors[self.handed].detach()
        else:
            while self._at >= len(self._local):
                self._local, self._at = [], 0
                self._local = self._next_batch()
            item = self._local[self._at]
            self._at += 1
        self.last_name = item[0]
        self.handed += 1
        if self.digests is not None:
            self._current = item[1]
        return item

    def take(self, target: int, source: int, num_bytes: int, stream: bool = False) -> None:
        """Copy the next bytes of the tensor handed out last, in its order, from `source` (an address in
        it) to `target`; with `stream` past the caches. The tensor's memory has to be its dense bytes, on
        the host."""
        current = self._current
        if current is None or not self._by_address:
            copy_bytes(target, source, num_bytes, stream=stream)
            return
        hasher = self._hasher
        if hasher is None:
            hasher = self._hasher = Hasher()
        copy_bytes(target, source, num_bytes, hasher, stream=stream)

    def places(self, packed: Packed) -> Sequence[int] | None:
        """The addresses of these tensors, which are to be handed out next or later: dense memory of the
        host, which stays as it is until the pass is over. None where that is not known."""
        standing = self._standing
        if standing is None or not self._by_address or packed.first < self.handed:
            return None
        if not self._as_offered(standing, packed):
            return None
        return standing.check(slice(packed.first, packed.first + len(packed.sizes)))

    def skip(
        self,
        packed: Packed,
        pace: Callable[[int], None] | None = None,
        digests: Sequence[int] | None = None,
    ) -> None:
        """What `places` told of, and comes next, counts as handed out: somebody reads it where it lies.
        `pace` is asked before so many more bytes of it are read here, to be digested; `digests` are of
        what was read already."""
        if self._error is not None:
            raise self._error
        self._digest_current()
        standing = self._standing
        if standing is None or not self._comes_next(standing, packed, 0):
            raise ValueError("skip without places")
        places = standing.check(slice(self.handed, self.handed + len(packed.sizes)))
        if self.digests is not None:
            if digests is None:
                digests = digest_paced(places, packed.sizes, pace)
            self.digests += digests
        self._count(packed, len(packed.sizes))

    def pack(self, address: int, packed: Packed, start: int, stream: bool = False) -> int:
        """Copy to their places from `address` on those of `packed`'s tensors that come next, from `start`
        on, as long as they are small, and known to be dense memory of the host. Returns how many; they
        count as handed out."""
        if self._error is not None:
            raise self._error
        self._digest_current()
        standing = self._standing
        if (
            standing is None
            or not self._by_address
            or not self._comes_next(standing, packed, start)
        ):
            return 0
        stop = packed.until(start, PIECE_BYTES)
        if stop > start:
            targets = [address + offset for offset in packed.offsets[start:stop]]
            sources = standing.check(slice(self.handed, self.handed + stop - start))
            copy_many(targets, sources, packed.sizes[start:stop], self.digests, stream=stream)
            self._count(packed, stop)
        return stop - start

    def _comes_next(self, standing: Standing, packed: Packed, start: int) -> bool:
        return packed.first + start == self.handed and self._as_offered(standing, packed)

    @staticmethod
    def _as_offered(standing: Standing, packed: Packed) -> bool:
        here = slice(packed.first, packed.first + len(packed.sizes))
        return standing.names[here] == packed.names and standing.sizes[here] == packed.sizes

    def _count(self, packed: Packed, stop: int) -> None:
        self.handed = packed.first + stop
        self.last_name = packed.names[stop - 1]

    def _digest_current(self) -> None:
        current, hasher = self._current, self._hasher
        if current is None or self.digests is None or self._digesting is None:
            return
        self._current = self._hasher = None
        if not self._by_address:
            found = self._digesting.later if self._stays else self._digesting.of
            self._later.append(found(current))
            return
        taken = hasher is not None and hasher.num_bytes == current.nbytes
        self.digests.append(hasher.value() if hasher is not None and taken else digest(current))

    def _next_batch(self) -> Batch:
        if self.pull is not None:
            if self._pulled is None:
                self._pulled = self.pull()
            batch, temporary_bytes = next(self._pulled)
            self.temporary_bytes += temporary_bytes
            return batch
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._batches:
                    self.starved = False
                    batch, temporary_bytes = self._batches.popleft()
                    self.temporary_bytes += temporary_bytes
                    self._changed.notify_all()
                    return batch
                if self._closed:
                    self.starved = False
                    raise StopIteration
                self.starved = True
                self._changed.notify_all()
                self._changed.wait(_SLICE_S)
