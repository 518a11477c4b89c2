"""What takes turns: rayxfer in each of its ways, and the memory copy that all are measured by. What a
user would pick instead is in `benchmarks.peers`."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import os
import time
from abc import ABC, abstractmethod
from typing import Any

import ray
import torch

import rayxfer
from benchmarks.shapes import Shapes
from benchmarks.weights import (
    as_numpy,
    make_weights,
    pieces,
    poison,
    poisoned_weights,
    spawn_workers,
    wrong_names,
)
from rayxfer import Controller, SyncReport, WeightTransferConfig

MODES = {"shm_placed": "placed", "shm_mapped": "mapped", "shm_async": "async"}
"""Ways of rayxfer that are more than a backend: `shm`, with

placed: the trainer's tensors in a memory file (`rayxfer.share_memory`), so workers copy once;
mapped: `load_mode="mapped"`, the workers of a host share one read-only copy;
async: `sync_weights_async(model)`, then `wait()`.
"""


_PIECE_BYTES = 256 << 20


class Unavailable(Exception):
    """This way cannot run here; the message says why."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """One row of a table.

    Attributes:
        way: a peer's name, a backend's, or one of MODES.
        verify: "on" or "off" for rayxfer, "" for all others.
        workers: receivers.
        case: which shapes, where a group has several.
    """

    way: str
    verify: str = ""
    workers: int = 1
    case: str = ""

    @property
    def name(self) -> str:
        if not self.verify:
            return self.way
        return f"rayxfer shm, {MODES[self.way]}" if self.way in MODES else f"rayxfer {self.way}"

    def __str__(self) -> str:
        parts = [self.name, f"verify {self.verify}" if self.verify else "", self.case]
        return ", ".join([*filter(None, parts), f"{self.workers} workers"])


class Stage:
    """One model's weights, and what the contenders over them share: a copy in a memory file, the
    peers' actors (see `benchmarks.peers`), and workers that one contender has given back."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.weights = make_weights(shapes)
        self.peers: dict[Any, list[Any]] = {}
        self._all: list[Any] = []
        self._free: dict[bool, list[Any]] = {True: [], False: []}
        self._placed: dict[str, torch.Tensor] | None = None
        self._keep: Any = None

    def placed(self) -> dict[str, torch.Tensor]:
        """The same bytes in tensors that lie in a memory file."""
        if not hasattr(rayxfer, "share_memory"):
            raise Unavailable("this rayxfer has no share_memory")
        if self._placed is None:
            self._placed = {name: tensor.clone() for name, tensor in self.weights.items()}
            self._keep = rayxfer.share_memory(self._placed)
        return self._placed

    def take(self, count: int, touch: bool) -> list[Any]:
        """`count` of rayxfer's workers that nobody uses; made if there are not enough."""
        free = self._free[touch]
        taken, free[:] = free[:count], free[count:]
        made = spawn_workers(count - len(taken), self.shapes, touch)
        self._all += made
        return taken + made

    def give(self, workers: list[Any], touch: bool) -> None:
        """They are free again."""
        self._free[touch] += workers

    def close(self) -> None:
        for actor in {*self._all, *(actor for actors in self.peers.values() for actor in actors)}:
            ray.kill(actor)
        self._all, self._free, self.peers = [], {True: [], False: []}, {}
        self.weights, self._placed, self._keep = {}, None, None
        gc.collect()
        # of ten thousand tensors malloc would keep a GiB for later
        ctypes.CDLL(None).malloc_trim(0)


class Contender(ABC):
    """One way to bring the stage's weights to `spec.workers` receivers. Made once, run many times.

    Attributes:
        workers: actors that receive.
        sender: the actor that sends; None: this process does.

    Raises:
        Unavailable: from the constructor, which leaves nothing behind.
    """

    imports: tuple[str, ...] = ()
    """Modules that it needs in every process, beyond those of the benchmark."""

    workers: list[Any]
    sender: Any = None

    def __init__(self, stage: Stage, spec: Spec) -> None:
        self.stage, self.spec = stage, spec
        self.workers = []

    @abstractmethod
    def run(self) -> float:
        """One transfer; its seconds."""

    def poison(self) -> None:
        """Overwrite what the receivers hold."""
        ray.get([worker.poison.remote() for worker in self.workers])

    def wrong_names(self) -> list[str]:
        """Names that some receiver does not hold byte for byte. What to compare with goes there a
        piece at a time, so that it takes little memory."""
        arrays = as_numpy(self.stage.weights)
        names = ray.get([worker.names.remote() for worker in self.workers])
        wrong = {name for held in names for name in held ^ arrays.keys()}
        for piece in pieces(arrays, _PIECE_BYTES):
            expected = ray.put(piece)
            found = ray.get([worker.wrong_names.remote(expected) for worker in self.workers])
            wrong |= {name for held in found for name in held}
        return sorted(wrong)

    def pids(self) -> tuple[int, list[int]]:
        """Of the sender's process, and of the workers'."""
        workers = ray.get([worker.pid.remote() for worker in self.workers])
        return os.getpid() if self.sender is None else ray.get(self.sender.pid.remote()), workers

    def close(self) -> None:
        """Release what is not the stage's."""
        return


class Memcpy(Contender):
    """One thread of one process copies into warm memory, once per worker: torch's own copy."""

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        self._targets = [
            {name: torch.empty_like(tensor) for name, tensor in stage.weights.items()}
            for _ in range(spec.workers)
        ]
        self.poison()

    def run(self) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            start = time.perf_counter()
            for target in self._targets:
                for name, tensor in self.stage.weights.items():
                    target[name].copy_(tensor)
            return time.perf_counter() - start
        finally:
            torch.set_num_threads(threads)

    def poison(self) -> None:
        for target in self._targets:
            poison(target)

    def wrong_names(self) -> list[str]:
        arrays = as_numpy(self.stage.weights)
        return sorted({name for target in self._targets for name in wrong_names(target, arrays)})

    def close(self) -> None:
        self._targets = []


class Rayxfer(Contender):
    """`Controller.sync_weights(mapping)`, end to end.

    Attributes:
        reports: of every run.
        stalls_s: async only: seconds until the call returned, per run.
    """

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        mode = MODES.get(spec.way)
        if mode == "async" and not hasattr(Controller, "sync_weights_async"):
            raise Unavailable("this rayxfer has no sync_weights_async")
        self._mapped = mode == "mapped"
        self._async = mode == "async"
        self._weights = stage.placed() if mode == "placed" else stage.weights
        self.reports: list[SyncReport] = []
        self.stalls_s: list[float] = []
        config: dict[str, Any] = {"load_mode": "mapped"} if self._mapped else {}
        # Mapped workers give up their own copy at the first load, so they are made without one.
        self.workers = stage.take(spec.workers, touch=not self._mapped)
        try:
            self._controller = Controller(
                self.workers,
                WeightTransferConfig(
                    backend="shm" if mode else spec.way,
                    verify="digest" if spec.verify == "on" else "off",
                    **config,
                ),
            )
        except (rayxfer.ConfigError, rayxfer.BackendUnavailable) as error:
            stage.give(self.workers, touch=not self._mapped)
            raise Unavailable(str(error)) from error

    def run(self) -> float:
        start = time.perf_counter()
        if self._async:
            handle = self._controller.sync_weights_async(self._weights)
            self.stalls_s.append(time.perf_counter() - start)
            report = handle.wait()
        else:
            report = self._controller.sync_weights(self._weights)
        seconds = time.perf_counter() - start
        self.reports.append(report)
        return seconds

    def forget(self, keep: int = 0) -> None:
        """Drop what was recorded of all runs (they were to warm up) but the first few."""
        del self.reports[keep:], self.stalls_s[keep:]

    def poison(self) -> None:
        if self._mapped:  # read-only in the workers
            self._controller.sync_weights(poisoned_weights(self.stage.shapes))
        else:
            super().poison()

    def close(self) -> None:
        self._controller.shutdown()
        self.stage.give(self.workers, touch=not self._mapped)


def ping_all(workers: list[Any]) -> float:
    """Seconds for one call to each worker at once, and the answers: the least that Ray can do."""
    start = time.perf_counter()
    ray.get([worker.ping.remote() for worker in workers])
    return time.perf_counter() - start
