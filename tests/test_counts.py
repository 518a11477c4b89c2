"""What a warm round costs, in counts: calls, bytes copied, memory made. No clocks."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

import rayxfer.copying as copying
from rayxfer import WeightTransferConfig, share_memory
from rayxfer.session import WorkerSession
from rayxfer.source import named_tensors
from rayxfer.stream import Stream
from rayxfer.testing.local import LocalController
from tests.helpers import assert_same_bytes, poison

BUCKET_BYTES = 256 << 10
SMALL_TENSORS, SMALL_ELEMENTS = 40, 24 << 10  # 48 KiB each: five to a bucket
LARGE_ELEMENTS = 512 << 10  # 1 MiB: travels alone
WORKERS = 2
ROUNDS = 3

CALLS = {"update": 1, "commit": 1}
"""Per worker and round, where the round takes less than a second and the offer is known."""
CONTROLLER_CALLS = {"begin": 1, "commit": 1}

COPIES = {
    # backend: of small tensors at the sender, at each worker; of large ones likewise
    "shm": ((1, 1), (1, 1)),
    "gloo": ((1, 1), (0, 1)),
}
"""Copies per byte of the model within a process, at most. What a transport does inside is not seen."""
PLACED_SENDER_COPIES = 0
SNAPSHOT_COPIES = 1


class Model(nn.Module):
    def __init__(self, *, small: bool = True, large: bool = True) -> None:
        super().__init__()
        sizes = [SMALL_ELEMENTS] * SMALL_TENSORS * small + [LARGE_ELEMENTS] * 2 * large
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(size).to(torch.bfloat16), requires_grad=False)
            for size in sizes
        )

    @property
    def num_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


class Books:
    """What was copied and made, by thread: "sender", "worker", or "caller"."""

    def __init__(self) -> None:
        self.copied: Counter[str] = Counter()
        self.made: dict[str, list[int]] = defaultdict(list)
        self._lock = threading.Lock()
        self._side = threading.local()

    @property
    def side(self) -> str:
        return getattr(self._side, "name", "caller")

    def copy(self, num_bytes: int) -> None:
        with self._lock:
            self.copied[self.side] += num_bytes

    def make(self, num_bytes: int) -> None:
        with self._lock:
            self.made[self.side].append(num_bytes)

    @contextlib.contextmanager
    def on(self, side: str) -> Iterator[None]:
        self._side.name = side
        try:
            with _Watch(self):
                yield
        finally:
            del self._side.name


class _Watch(TorchDispatchMode):
    """Every operation of torch's in this thread."""

    def __init__(self, books: Books) -> None:
        super().__init__()
        self._books = books

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "copy_":
            self._books.copy(args[0].nbytes)
        elif name == "_foreach_copy_":
            self._books.copy(sum(one.nbytes for one in args[0]))
        known = {_storage(t) for t in _tensors((args, kwargs))}
        for tensor in _tensors(out):
            if _storage(tensor) not in known:
                self._books.make(tensor.untyped_storage().nbytes())
                if name in ("clone", "_to_copy"):
                    self._books.copy(tensor.nbytes)
        return out


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


SIZES: dict[str, Callable[..., int]] = {
    "copy_bytes": lambda target, source, num_bytes, hasher=None, stream=False: num_bytes,
    "copy_many": lambda targets, sources, sizes, digests, stream=False: sum(sizes),
    "copy_spread": lambda targets, sources, sizes, digests, stream=False: sum(sizes),
}
"""The copies of ours that torch does not see (`rayxfer.copying`), and how much each is."""


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> Books:
    """Everything that is copied and made from here on. Costs the product nothing: it is put in from
    outside."""
    books = Books()

    def counted(function: Any, size: Callable[..., int]) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            books.copy(size(*args, **kwargs))
            return function(*args, **kwargs)

        return call

    for backend in COPIES:  # loaded now, so that their names for these functions are found
        importlib.import_module(f"rayxfer.engines.{backend}")
    homes = [module for name, module in sys.modules.items() if name.startswith("rayxfer.")]
    homes.remove(copying)  # what it asks of itself is part of what it was asked for
    for name, size in SIZES.items():
        original = getattr(copying, name)
        for home in homes:
            if getattr(home, name, None) is original:
                monkeypatch.setattr(home, name, counted(original, size))

    def on(owner: Any, name: str, side: str) -> None:
        original = getattr(owner, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            with books.on(side):
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, run)

    on(Stream, "_send", "sender")
    on(Stream, "_feed", "sender")
    on(WorkerSession, "_receive_all", "worker")
    return books


def files() -> list[str]:
    """Mappings of memory files in this process."""
    with open("/proc/self/maps") as maps:
        return sorted(line for line in maps if "memfd:" in line)


@contextlib.contextmanager
def warm(trainer: nn.Module, workers: list[Model], backend: str) -> Iterator[LocalController]:
    for worker in workers:
        poison(worker)
    config = WeightTransferConfig(backend=backend, bucket_size_bytes=BUCKET_BYTES)
    with LocalController(workers, config) as controller:
        for _ in range(2):
            controller.sync_weights(trainer)
        yield controller
    for worker in workers:
        assert_same_bytes(named_tensors(trainer), named_tensors(worker))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_calls_of_a_round(backend: str) -> None:
    trainer, workers = Model(), [Model() for _ in range(WORKERS)]
    with warm(trainer, workers, backend) as controller:
        calls: Counter[str] = Counter()
        inner = controller._coordinator

        class Counting:
            def __getattr__(self, name: str) -> Any:
                calls[name] += 1
                return getattr(inner, name)

        controller._sender._coordinator = Counting()  # type: ignore[assignment]
        for session in controller.sessions:
            session.calls.clear()
        for _ in range(ROUNDS):
            report = controller.sync_weights(trainer)
            assert report.control_calls == sum(CALLS.values())
        for session in controller.sessions:
            assert session.calls == {op: ROUNDS * n for op, n in CALLS.items()}
        assert calls == {op: ROUNDS * n for op, n in CONTROLLER_CALLS.items()}


@pytest.mark.parametrize("kind", ["small", "large"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_bytes_copied(backend: str, kind: str, books: Books) -> None:
    shape = {"small": kind == "small", "large": kind == "large"}
    trainer, workers = Model(**shape), [Model(**shape) for _ in range(WORKERS)]
    with warm(trainer, workers, backend) as controller:
        books.copied.clear()
        for _ in range(ROUNDS):
            controller.sync_weights(trainer)
        at_sender, at_worker = COPIES[backend][kind == "large"]
        size = ROUNDS * trainer.num_bytes
        assert books.copied["sender"] <= at_sender * size
        assert books.copied["worker"] <= at_worker * size * WORKERS
        assert books.copied["caller"] == 0
        if at_worker:
            assert books.copied["worker"] >= size * WORKERS, "it does not see all"
        if kind == "small":
            assert books.copied["sender"] > 0, "it sees none at all"


def test_bytes_copied_from_where_they_are_placed(books: Books) -> None:
    trainer, workers = share_memory(Model()), [Model() for _ in range(WORKERS)]
    with warm(trainer, workers, "shm") as controller:
        books.copied.clear()
        for _ in range(ROUNDS):
            controller.sync_weights(trainer)
        size = ROUNDS * trainer.num_bytes
        frames = ROUNDS * trainer.num_bytes // BUCKET_BYTES * 4096  # that say where, not what
        assert books.copied["sender"] <= PLACED_SENDER_COPIES * size + frames
        assert books.copied["worker"] <= size * WORKERS


def test_bytes_copied_of_a_snapshot(books: Books) -> None:
    trainer, workers = Model(), [Model() for _ in range(WORKERS)]
    with warm(trainer, workers, "shm") as controller:
        controller.sync_weights_async(trainer).wait(100)
        books.copied.clear()
        for _ in range(ROUNDS):
            controller.sync_weights_async(trainer).wait(100)
        size = ROUNDS * trainer.num_bytes
        frames = ROUNDS * trainer.num_bytes // BUCKET_BYTES * 4096
        assert books.copied["caller"] == SNAPSHOT_COPIES * size
        assert books.copied["sender"] <= frames
        assert books.copied["worker"] <= size * WORKERS


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_warm_round_makes_no_buckets(backend: str, how: str, books: Books) -> None:
    trainer, workers = Model(), [Model() for _ in range(WORKERS)]
    with warm(trainer, workers, backend) as controller:

        def sync() -> None:
            if how == "sync":
                controller.sync_weights(trainer)
            else:
                controller.sync_weights_async(trainer).wait(100)

        sync()
        books.made.clear()
        before = files()
        with books.on("caller"):
            for _ in range(ROUNDS):
                sync()
        smallest = min(BUCKET_BYTES, SMALL_ELEMENTS * 2)
        assert {side: [n for n in made if n >= smallest] for side, made in books.made.items()} == {
            side: [] for side in books.made
        }
        assert files() == before


def test_what_is_made_would_be_seen(books: Books) -> None:
    """A loader that keeps what it is given is handed memory of its own."""
    from rayxfer.binding import Binding

    kept: list[Any] = []
    trainer, worker = Model(large=False), Model(large=False)

    def load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        kept.extend(weights)
        with torch.no_grad():
            for name, tensor in weights:
                model.get_parameter(name).copy_(tensor)
        return {name for name, _ in weights}

    config = WeightTransferConfig(backend="shm", bucket_size_bytes=BUCKET_BYTES)
    with LocalController([Binding(worker, load_weights=load)], config) as controller:
        controller.sync_weights(trainer)
    assert sum(n for n in books.made["worker"] if n >= SMALL_ELEMENTS * 2) >= trainer.num_bytes
    assert books.copied["worker"] >= 2 * trainer.num_bytes
