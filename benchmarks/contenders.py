"""What is measured: rayxfer per backend, and what a user would pick instead."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import ray
import torch

from benchmarks.weights import (
    Shapes,
    StateDictSender,
    as_numpy,
    poison,
    spawn_workers,
    wrong_names,
)
from rayxfer import Controller, SyncReport, WeightTransferConfig

PEERS = ("memcpy", "ray_put", "ray_put_zero_copy")


class Contender(ABC):
    """One way to bring the weights to `workers` receivers. Made once, run many times."""

    name: str
    verify: str = ""

    @abstractmethod
    def run(self) -> float:
        """One transfer; its seconds."""

    @abstractmethod
    def poison(self) -> None:
        """Overwrite what the receivers hold."""

    @abstractmethod
    def wrong_names(self, expected: ray.ObjectRef) -> list[str]:
        """Names that some receiver does not hold byte for byte."""

    @abstractmethod
    def close(self) -> None:
        """Release everything."""

    @property
    def label(self) -> str:
        return f"{self.name}, verify {self.verify}" if self.verify else self.name


class _WithActors(Contender):
    """workers: actors that stay the caller's, or how many to make here."""

    def __init__(self, workers: int | list[Any], shapes: Shapes) -> None:
        self._own = isinstance(workers, int)
        self.workers = spawn_workers(workers, shapes) if isinstance(workers, int) else workers

    def poison(self) -> None:
        ray.get([worker.poison.remote() for worker in self.workers])

    def wrong_names(self, expected: ray.ObjectRef) -> list[str]:
        found = ray.get([worker.wrong_names.remote(expected) for worker in self.workers])
        return sorted({name for names in found for name in names})

    def close(self) -> None:
        for worker in self.workers if self._own else []:
            ray.kill(worker)


class Rayxfer(_WithActors):
    """`Controller.sync_weights(mapping)`, end to end."""

    def __init__(
        self,
        backend: str,
        verify: str,
        workers: int | list[Any],
        shapes: Shapes,
        weights: dict[str, torch.Tensor],
    ) -> None:
        super().__init__(workers, shapes)
        self.name = f"rayxfer {backend}"
        self.backend, self.verify = backend, "on" if verify == "digest" else "off"
        self.reports: list[SyncReport] = []
        self._weights = weights
        self._controller = Controller(
            self.workers, WeightTransferConfig(backend=backend, verify=verify)
        )

    def run(self) -> float:
        start = time.perf_counter()
        report = self._controller.sync_weights(self._weights)
        seconds = time.perf_counter() - start
        self.reports.append(report)
        return seconds

    def close(self) -> None:
        self._controller.shutdown()
        super().close()


class RayPut(_WithActors):
    """`ray.put(state_dict)` of torch tensors; each worker gets it and copies it in.

    zero_copy: with RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 in the sending process, Ray's documented
    setting for large tensors. Ray reads it when a process starts, so the sender is an actor then.
    """

    def __init__(
        self, workers: int, shapes: Shapes, weights: dict[str, torch.Tensor], *, zero_copy: bool
    ) -> None:
        super().__init__(workers, shapes)
        self.name = "ray_put_zero_copy" if zero_copy else "ray_put"
        self._local = None if zero_copy else StateDictSender(weights)
        self._remote: Any = None
        if zero_copy:
            env = {"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}
            actor_class = ray.remote(num_cpus=0, runtime_env=env)(StateDictSender)
            self._remote = actor_class.remote(shapes)

    def run(self) -> float:
        if self._local is not None:
            return self._local.send(self.workers)
        seconds: float = ray.get(self._remote.send.remote(self.workers))
        return seconds

    def close(self) -> None:
        if self._remote is not None:
            ray.kill(self._remote)
        super().close()


class Memcpy(Contender):
    """The limit: one thread of one process copies into warm memory, once per worker."""

    name = "memcpy"

    def __init__(self, workers: int, weights: dict[str, torch.Tensor]) -> None:
        self._weights = weights
        self._targets = [
            {name: torch.empty_like(tensor) for name, tensor in weights.items()}
            for _ in range(workers)
        ]
        self.poison()

    def run(self) -> float:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            start = time.perf_counter()
            for target in self._targets:
                for name, tensor in self._weights.items():
                    target[name].copy_(tensor)
            return time.perf_counter() - start
        finally:
            torch.set_num_threads(threads)

    def poison(self) -> None:
        for target in self._targets:
            poison(target)

    def wrong_names(self, expected: ray.ObjectRef) -> list[str]:
        arrays = as_numpy(self._weights)
        return sorted({name for target in self._targets for name in wrong_names(target, arrays)})

    def close(self) -> None:
        self._targets = []


def ping_all(workers: list[Any]) -> float:
    """Seconds for one call to each worker at once, and the answers: the least that Ray can do."""
    start = time.perf_counter()
    ray.get([worker.ping.remote() for worker in workers])
    return time.perf_counter() - start


def make_peer(
    name: str, workers: int, shapes: Shapes, weights: dict[str, torch.Tensor]
) -> Contender:
    if name == "memcpy":
        return Memcpy(workers, weights)
    return RayPut(workers, shapes, weights, zero_copy=name == "ray_put_zero_copy")


def copies_held(backends: int, peers: list[str], workers: int) -> int:
    """How many copies of the weights are in memory at once, for a check before the start."""
    copies = 1 + 2 * backends * workers + len(peers) * workers
    return copies + ("ray_put_zero_copy" in peers) + 2 * any(p != "memcpy" for p in peers)
