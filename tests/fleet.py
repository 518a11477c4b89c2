"""Workers, models and sources that the end-to-end tests share.

The plain workers live as long as the session's Ray: a test binds what it needs to them, makes a
controller, and shuts that down again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from torch import nn

from rayxfer import Controller, ParamMeta, WeightSource, WeightTransferConfig, WorkerMixin
from rayxfer.source import ModuleSource, named_tensors
from tests.helpers import assert_same_bytes, poison, raw_bytes

CPU_BACKENDS = ("shm", "gloo", "object_store")


class Plain(WorkerMixin):
    """What a user writes: no concurrency groups, no base class of ours but the mixin."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Module()
        self.log: list[Any] = []
        self.kept: dict[str, torch.Tensor] = {}
        self.call_delay_s = 0.0

    def bind(
        self,
        build: Callable[[], nn.Module],
        hooks: Callable[[Plain], dict[str, Any]] = lambda self: {},
    ) -> None:
        """Serve what `build` makes, poisoned. `hooks(self)`: further arguments of rayxfer_bind."""
        self.model, self.log, self.kept, self.call_delay_s = build(), [], {}, 0.0
        poison(self.model)
        self.rayxfer_bind(lambda: self.model, **hooks(self))

    def run(self, function: Callable[[Plain], Any]) -> Any:
        return function(self)

    def rayxfer_call(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.call_delay_s)
        return super().rayxfer_call(op, message)


_pool: list[Any] = []


def plain_workers(
    count: int,
    build: Callable[[], nn.Module],
    hooks: Callable[[Plain], dict[str, Any]] = lambda self: {},
    *,
    first: int = 0,
) -> list[Any]:
    """`count` plain workers of the shared pool (from number `first` on), bound anew."""
    while len(_pool) < first + count:
        _pool.append(ray.remote(Plain).options(num_cpus=0).remote())
    workers = _pool[first : first + count]
    ray.get([worker.bind.remote(build, hooks) for worker in workers])
    return workers


@contextmanager
def controller_of(workers: list[Any], **settings: Any) -> Iterator[Controller]:
    controller = Controller(workers, WeightTransferConfig(**settings))
    try:
        yield controller
    finally:
        controller.shutdown()


_shared: dict[str, Controller] = {}


@contextmanager
def joined(workers: list[Any], backend: str | list[str], **settings: Any) -> Iterator[Controller]:
    """A shared controller with these settings; `workers` are its only members meanwhile.

    Making a controller takes a process; joining one takes milliseconds. Versions go on from where
    they were. After a failure it is not used again.
    """
    key = repr(sorted(settings.items()))
    if key not in _shared:
        _shared[key] = Controller([], WeightTransferConfig(**settings))
    controller = _shared[key]
    try:
        controller.add_workers(workers, backend=backend)
        yield controller
        controller.remove_workers([row.rank for row in controller.status().workers])
    except BaseException:
        _shared.pop(key).shutdown()
        raise


def close_shared() -> None:
    """The shared controllers' end: for a module's teardown."""
    while _shared:
        _shared.popitem()[1].shutdown()


def run_on(workers: list[Any], function: Callable[[Plain], Any]) -> list[Any]:
    return ray.get([worker.run.remote(function) for worker in workers])


def poison_all(workers: list[Any]) -> None:
    run_on(workers, lambda worker: poison(worker.model))


def held(module: nn.Module) -> dict[str, torch.Tensor]:
    """What a module holds now, as plain copies."""
    return {
        name: tensor.detach().resolve_conj().resolve_neg().contiguous().clone()
        for name, tensor in named_tensors(module).items()
    }


def held_by(worker: Any) -> dict[str, torch.Tensor]:
    """The same of a plain worker; as bytes, since Ray cannot carry every dtype."""

    def freeze(self: Plain) -> list[tuple[str, torch.dtype, torch.Size, bytes]]:
        return [(n, t.dtype, t.shape, raw_bytes(t)) for n, t in named_tensors(self.model).items()]

    return {
        name: torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
        .view(dtype)
        .view(shape)
        for name, dtype, shape, data in ray.get(worker.run.remote(freeze))
    }


def assert_exact(expected: nn.Module | dict[str, torch.Tensor], workers: list[Any]) -> None:
    """Every worker holds these names, dtypes, shapes and bytes."""
    want = held(expected) if isinstance(expected, nn.Module) else expected
    for rank, worker in enumerate(workers):
        try:
            assert_same_bytes(want, held_by(worker))
        except AssertionError as error:
            raise AssertionError(f"worker {rank}: {error}") from None


# ---- models -------------------------------------------------------------------------------------


class Net(nn.Module):
    """A few fp32 layers, a buffer, and a tied pair, random but the same for one seed."""

    def __init__(self, seed: int = 0, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.embedding = nn.Embedding(24, width)
        self.head = nn.Linear(width, 24, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.zeros(width))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in (*self.parameters(), self.scale):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


class Many(nn.Module):
    """`count` tensors of `num_bytes` each."""

    def __init__(self, count: int, num_bytes: int = 1024, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for index in range(count):
            data = torch.randn(num_bytes // 4, generator=generator)
            self.register_buffer(f"t{index:04d}", data)


def net() -> nn.Module:
    return Net(seed=99)


# ---- sources ------------------------------------------------------------------------------------


class Source(WeightSource):
    """Declares and yields what it is given."""

    def __init__(
        self, declared: list[ParamMeta], pairs: Callable[[], Iterator[tuple[str, Any]]]
    ) -> None:
        self._declared, self._pairs = declared, pairs
        self.passes = 0
        self.read: list[str] = []

    def metadata(self) -> list[ParamMeta]:
        return list(self._declared)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.passes += 1
        for name, tensor in self._pairs():
            self.read.append(name)
            yield name, tensor


def source_of(model: nn.Module) -> Source:
    return Source(ModuleSource(model).metadata(), lambda: iter(ModuleSource(model)))


def gated(model: nn.Module, entered: Any, go_on: Any) -> Source:
    """Sets `entered` before its first tensor, then waits there for `go_on` (threading events)."""

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        entered.set()
        assert go_on.wait(60)
        yield from ModuleSource(model)

    return Source(ModuleSource(model).metadata(), pairs)


def named_actors() -> set[str]:
    """Names in rayxfer's namespace."""
    actors = ray.util.list_named_actors(all_namespaces=True)
    return {actor["name"] for actor in actors if actor["namespace"] == "rayxfer"}
