"""`sync_weights_async`: the trainer waits for one copy of its weights, the workers get theirs behind it.

The copy is a `Snapshot`: an ordinary source whose tensors stay as they are until the sync has ended, so
that a retry reads the very bytes that the call was given. Its memory is kept from round to round.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from typing import TYPE_CHECKING, Any

import torch

from rayxfer.copying import copy_bits, copy_bytes, copy_spread, is_memory, streams
from rayxfer.daemons import daemon
from rayxfer.errors import (
    BackendUnavailable,
    ControllerBusy,
    PartialUpdate,
    TransferTimeout,
)
from rayxfer.memfile import MemoryFile
from rayxfer.metadata import Columns, ParamMeta
from rayxfer.packing import align
from rayxfer.reading import Reading
from rayxfer.report import SyncReport
from rayxfer.source import (
    Standing,
    WeightSource,
    addresses_of,
    all_memory,
    checked_metadata,
)
from rayxfer.threads import gpu_of_this_thread

if TYPE_CHECKING:
    from rayxfer.sender import Sender

__all__ = ["Snapshot", "Snapshots", "SyncHandle", "Turns", "start"]

_SLICE_S = 1.0

_log = logging.getLogger("rayxfer")


# ---- the copy ---------------------------------------------------------------------------------------


class Snapshot(WeightSource):
    """What a source held when it was copied."""

    stable = True

    def __init__(
        self,
        metadata: tuple[ParamMeta, ...],
        tensors: list[torch.Tensor],
        device: torch.device,
    ) -> None:
        self._metadata, self._tensors, self._device = metadata, tensors, device

    def metadata(self) -> list[ParamMeta]:
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for meta, tensor in zip(self._metadata, self._tensors, strict=True):
            yield meta.name, tensor

    def weights_device(self) -> torch.device:
        return self._device

    def _standing(self, known: Columns) -> Standing | None:
        tensors = self._tensors
        aliases = tuple([meta.aliases for meta in self._metadata])
        if aliases != known.aliases or not all_memory(tensors):
            return None
        if not known.fit([meta.name for meta in self._metadata], tensors):
            return None
        return Standing(known.names, tensors, addresses_of(tensors), known.num_bytes)


class Snapshots:
    """The memory of one snapshot, used again for the next one.

    Of weights on the CPU it is one memory file, from which `shm` workers read; of others, tensors on the
    same device. It grows when an offer needs more, and is let go by `close`.
    """

    def __init__(self) -> None:
        self._host: torch.Tensor | None = None
        self._views: tuple[tuple[ParamMeta, ...], list[torch.Tensor]] | None = None
        self._placed: dict[str, torch.Tensor] = {}

    def take(self, source: WeightSource) -> Snapshot:
        """Copy all that the source yields, in one pass. Nobody may be reading the last one any more.

        Raises:
            ContractError: bad metadata, or the source yields other than it declares.
            TransferError: the source raised, or there is no room.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self._take(source)

    def _take(self, source: WeightSource) -> Snapshot:
        metadata = checked_metadata(source)
        device = source.weights_device()
        places = self._places_on_host(metadata) if device.type == "cpu" else None
        if places is None:
            self._host = self._views = None
            wanted = {meta.name for meta in metadata}
            self._placed = {name: t for name, t in self._placed.items() if name in wanted}
        stream = streams(sum(meta.num_bytes for meta in metadata))
        if places is not None and (standing := source._standing(Columns(metadata))) is not None:
            targets, sources = addresses_of(places), standing.addresses
            # in one go, for the trainer waits
            copy_spread(targets, sources, standing.sizes, None, stream=stream)
            standing.check(slice(None))
            return Snapshot(metadata, places, device)
        tensors: list[torch.Tensor] = []
        touched: set[torch.device] = set()
        for index, (meta, value, _) in enumerate(Reading(source, metadata)):
            place = places[index] if places is not None else self._place(meta, value.device)
            if place.device.type == "cpu" and is_memory(value):
                copy_bytes(place.data_ptr(), value.data_ptr(), value.nbytes, stream=stream)
            elif place.device == value.device:
                copy_bits([place], [value])
            else:
                place.copy_(value)
            touched.update(t.device for t in (place, value) if t.device.type == "cuda")
            tensors.append(place)
        for one in touched:  # the caller may change its tensors now, on any stream
            torch.cuda.current_stream(one).synchronize()
        return Snapshot(metadata, tensors, device)

    def _places_on_host(self, metadata: tuple[ParamMeta, ...]) -> list[torch.Tensor]:
        if self._views is not None and self._views[0] == metadata:
            return self._views[1]
        self._placed = {}
        starts, end = [], 0
        for meta in metadata:
            starts.append(end)
            end = align(end + meta.num_bytes)
        if self._host is None or self._host.numel() < end:
            self._host = self._views = None  # before there is another
            self._host = _host_memory(end)
        host = self._host
        views = [
            host[start : start + meta.num_bytes].view(meta.dtype).view(meta.shape)
            if meta.num_bytes
            else torch.empty(meta.shape, dtype=meta.dtype)
            for start, meta in zip(starts, metadata, strict=True)
        ]
        self._views = (metadata, views)
        return views

    def _place(self, meta: ParamMeta, device: torch.device) -> torch.Tensor:
        place = self._placed.get(meta.name)
        fits = place is not None and (place.dtype, place.device) == (meta.dtype, device)
        if place is None or not fits or place.shape != meta.shape:
            self._placed.pop(meta.name, None)
            place = self._placed[meta.name] = torch.empty(
                meta.shape, dtype=meta.dtype, device=device
            )
        return place

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        host = 0 if self._host is None else self._host.numel()
        return host + sum(tensor.nbytes for tensor in self._placed.values())

    def close(self) -> None:
        """Let the memory go. Safe to call twice; `take` may be called again."""
        self._host = self._views = None
        self._placed = {}


def _host_memory(num_bytes: int) -> torch.Tensor:
    try:
        return MemoryFile(max(1, num_bytes), name="rayxfer-snapshot").bytes
    except BackendUnavailable:  # no memory files on this system, and then no `shm` either
        return torch.empty(num_bytes, dtype=torch.uint8)


# ---- whose turn it is -------------------------------------------------------------------------------


class Turns:
    """One sync of a process at a time: the next waits for one in the background, and is refused while
    somebody else is in the middle of theirs."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._holder: str | None = None

    @property
    def in_background(self) -> bool:
        return self._holder == "background"

    def try_take(self) -> bool:
        """Without waiting for anybody."""
        with self._changed:
            if self._holder is not None:
                return False
            self._holder = "caller"
            return True

    def take(self, *, background: bool, timeout_s: float, who: str) -> None:
        """Raises ControllerBusy: another caller is at it, or the background takes longer than that."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._holder is not None:
                left = deadline - time.monotonic()
                if not self.in_background or left <= 0:
                    late = f", for more than {timeout_s:g} s" if self.in_background else ""
                    raise ControllerBusy(f"{who} is busy with another sync of this process{late}")
                self._changed.wait(min(left, _SLICE_S))
            self._holder = "background" if background else "caller"

    def give_back(self) -> None:
        with self._changed:
            self._holder = None
            self._changed.notify_all()

    def wait_free(self, timeout_s: float) -> bool:
        """Whether nobody is at it, in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._holder is None, timeout_s)


# ---- the sync behind the trainer --------------------------------------------------------------------


class _Outcome:
    """How it ended, and whether anybody has looked."""

    def __init__(self) -> None:
        self.future: Future[SyncReport] = Future()
        self.future.set_running_or_notify_cancel()  # nobody can cancel it by cancelling the wait
        self._lock = threading.Lock()
        self._dropped = self._seen = False

    def seen(self) -> None:
        self._seen = True

    def dropped(self) -> None:
        """The handle is gone."""
        with self._lock:
            self._dropped = True
        self._complain()

    def end(self, report: SyncReport | None, error: BaseException | None) -> None:
        with self._lock:
            if report is not None:
                self.future.set_result(report)
            else:
                self.future.set_exception(error or RuntimeError("no report"))
        self._complain()

    def _complain(self) -> None:
        with self._lock:
            if not self._dropped or self._seen or not self.future.done():
                return
            self._seen = True
        error = self.future.exception(timeout=0)
        if error is not None:
            _log.warning("a sync_weights_async that nobody waited for failed: %s", error)


class SyncHandle:
    """A sync that goes on behind the trainer. Await it, or call `wait`.

    Whoever drops it without a look at how it ended finds an error in the log ("rayxfer").

    Attributes:
        stall_s: how long the trainer was held: from the call until the copy was made, in seconds.
    """

    def __init__(self, outcome: _Outcome, stall_s: float) -> None:
        self._outcome = outcome
        self.stall_s = stall_s

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.future.done()

    def wait(self, timeout_s: float | None = None) -> SyncReport:
        """The report, once every worker that takes part serves the version.

        Args:
            timeout_s: how long to wait; None: as long as it takes, which the configuration bounds.

        Raises:
            as `Controller.sync_weights`, once it has ended; TransferTimeout: it has not, in time, and
                goes on.
        """
        future = self._outcome.future
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not future.done():
            left = _SLICE_S if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TransferTimeout(
                    f"the sync was not over within timeout_s={timeout_s:g}; it goes on"
                )
            wait_futures([future], timeout=min(left, _SLICE_S))
        self._outcome.seen()
        return future.result(timeout=0)

    @property
    def report(self) -> SyncReport | None:
        """The report, or None while it goes on and where it failed. Of a partial update: its report."""
        future = self._outcome.future
        if not future.done():
            return None
        error = future.exception(timeout=0)
        if error is None:
            return future.result(timeout=0)
        if isinstance(error, PartialUpdate) and isinstance(error.report, SyncReport):
            return error.report
        return None

    def __await__(self) -> Generator[Any, None, SyncReport]:
        return self._awaited().__await__()

    async def _awaited(self) -> SyncReport:
        try:
            return await asyncio.wrap_future(self._outcome.future)
        finally:
            if self.done():
                self._outcome.seen()

    def __repr__(self) -> str:
        state = "under way"
        if self.done():
            error = self._outcome.future.exception(timeout=0)
            state = "done" if error is None else f"failed: {type(error).__name__}"
        return f"SyncHandle({state})"

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        outcome = getattr(self, "_outcome", None)
        if outcome is not None and not finalizing():
            outcome.dropped()


def start(
    sender: Sender,
    source: WeightSource,
    *,
    version: int | None,
    partial: bool,
    timeout_s: float,
    who: str,
) -> SyncHandle:
    """Copy the source, and sync the copy in a thread of its own.

    Raises:
        what `Snapshots.take` raises; ControllerBusy as `Turns.take`. Nothing was begun then.
    """
    began = time.monotonic()
    sender.turns.take(background=True, timeout_s=timeout_s, who=who)
    try:
        snapshot = sender.snapshots.take(source)
        outcome = _Outcome()
        take_over_gpu = gpu_of_this_thread()

        def run() -> None:
            report: SyncReport | None = None
            error: BaseException | None = None
            try:
                take_over_gpu()
                report = sender.sync(snapshot, version=version, partial=partial)
            except BaseException as caught:
                error = caught
            outcome.end(report, error)
            sender.turns.give_back()

        daemon(run, "rayxfer-background", sender.cancel)
    except BaseException:
        sender.turns.give_back()
        raise
    return SyncHandle(outcome, time.monotonic() - began)


def end(sender: Sender, grace_s: float, abort_s: float) -> bool:
    """Have no sync of this sender's in the background: let it end, else call it off. False if it is stuck
    all the same (in the user's code; it is a daemon)."""
    if not sender.turns.in_background or sender.turns.wait_free(grace_s):
        return True
    sender.cancel()
    return sender.turns.wait_free(abort_s)
