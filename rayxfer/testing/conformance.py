"""The conformance kit: what every engine must do, run on yours.

Each check is a small program around real sessions in one process (`LocalController`). Receivers are
poisoned before every transfer, and bytes are compared, not values.
"""

from __future__ import annotations

import dataclasses
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from rayxfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from rayxfer.binding import Binding
from rayxfer.config import WeightTransferConfig
from rayxfer.errors import PartialUpdate, RayxferError, UnknownBackend
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.report import WorkerState
from rayxfer.source import ModuleSource, ParamMeta, WeightSource, named_tensors
from rayxfer.testing.local import LocalController
from rayxfer.testing.tensors import assert_same_bytes, poison

__all__ = ["ConformanceReport", "EngineCheckError", "check_engine"]

EngineClass = type[WeightTransferEngine[Any, Any]]


class EngineCheckError(AssertionError):
    """The engine failed at least one check; `report` has them all."""

    def __init__(self, message: str, report: ConformanceReport) -> None:
        super().__init__(message)
        self.report = report


@dataclass
class ConformanceReport:
    """What `check_engine` found.

    Attributes:
        engine: the name that was checked.
        passed: names of the checks that passed.
        failed: name of the check → what went wrong.
    """

    engine: str
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        rows = [f"{self.engine}: {len(self.passed)} checks passed, {len(self.failed)} failed"]
        rows += [f"  passed {name}" for name in self.passed]
        rows += [f"  FAILED {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(rows)


@dataclass
class _Kit:
    name: str
    engine_cls: EngineClass
    config: WeightTransferConfig
    workers: int
    place: Callable[[Any], Any]
    place_receivers: Callable[[Any], Any]

    def controller(
        self, workers: list[Any], *, bucket_size_bytes: int | None = None, **settings: Any
    ) -> LocalController:
        config = dataclasses.replace(
            self.config, backend=self.name, bucket_size_bytes=bucket_size_bytes, **settings
        )
        return LocalController(workers, config)

    def receivers(self, model: torch.nn.Module) -> list[torch.nn.Module]:
        return [self.place_receivers(_clone(model)) for _ in range(self.workers)]


def check_engine(
    engine: str | EngineClass,
    *,
    config: WeightTransferConfig | None = None,
    workers: int = 2,
    only: str | None = None,
    place: Callable[[Any], Any] = lambda model: model,
    place_receivers: Callable[[Any], Any] = lambda model: model,
) -> ConformanceReport:
    """Run the kit on an engine: a registered name, or a class.

    Args:
        engine: what to check. A class that is not registered is registered for the duration.
        config: settings it needs (`init_info`, `update_info`, `trainer_args`); its timeouts bound
            the checks that make a round fail, so keep `stall_timeout_s` at a few seconds.
        workers: how many receivers.
        only: run only the checks whose name contains this.
        place: moves a model to where the engine is meant to find it (a GPU), in place; called on each
            model that is sent. Receivers are deep copies of it, unless moved on:
        place_receivers: the same for each receiver.

    Returns:
        the report, all passed.

    Raises:
        EngineCheckError: (an AssertionError) at least one check failed.
        BackendUnavailable: the engine cannot run in this process.
        UnknownBackend, ConfigError: it is no engine.
    """
    config = config if config is not None else WeightTransferConfig(stall_timeout_s=5.0)
    name, registered = _name_of(engine)
    try:
        engine_cls = WeightTransferEngineFactory.get_engine_class(name)
        engine_cls.check_available()
        kit = _Kit(name, engine_cls, config, workers, place, place_receivers)
        report = ConformanceReport(name)
        for check in _CHECKS:
            title = check.__name__.removeprefix("_check_")
            if only is not None and only not in title:
                continue
            try:
                check(kit)
            except Exception as error:  # every check is run; the failure is what is reported
                report.failed[title] = f"{type(error).__name__}: {error}"
            else:
                report.passed.append(title)
    finally:
        if registered:
            WeightTransferEngineFactory._direct.pop(name, None)
    if report.failed:
        raise EngineCheckError(str(report), report)
    return report


def _name_of(engine: str | EngineClass) -> tuple[str, bool]:
    if isinstance(engine, str):
        if engine not in WeightTransferEngineFactory.registered():
            raise UnknownBackend(
                f"unknown backend {engine!r}: registered are "
                f"{', '.join(WeightTransferEngineFactory.registered())}"
            )
        return engine, False
    for name, known in WeightTransferEngineFactory._direct.items():
        if known is engine:
            return name, False
    name = f"checked:{engine.__name__}"
    WeightTransferEngineFactory.register_engine(name, engine)
    return name, True


# ---- models to send -----------------------------------------------------------------------------

_DTYPES = [
    torch.bool,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def _bytes(seed: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def _random(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bits, so NaN payloads and negative zeros are among them (bool: 0 or 1)."""
    count = 1
    for size in shape:
        count *= size
    if dtype == torch.bool:
        return (_bytes(seed, count) & 1).view(torch.bool).view(shape)
    return _bytes(seed, count * dtype.itemsize).view(dtype).view(shape)


class _Zoo(torch.nn.Module):
    """Every dtype and every odd shape and stride, as buffers and parameters."""

    def __init__(self) -> None:
        super().__init__()
        for index, dtype in enumerate(_DTYPES):
            label = str(dtype).removeprefix("torch.")
            self.register_buffer(f"{label}_matrix", _random(dtype, (7, 5), index))
            self.register_buffer(f"{label}_scalar", _random(dtype, (), 100 + index))
            self.register_buffer(f"{label}_empty", torch.empty((0, 3), dtype=dtype))
        base = torch.randn(12, 10, generator=torch.Generator().manual_seed(1))
        self.register_buffer("transposed", base.t())
        self.register_buffer("strided", base[::2, 1::3])
        self.register_buffer("offset", base.flatten()[17:43])
        self.register_buffer("expanded", torch.tensor([1.5, -0.0, 2.0]).expand(4, 3))
        image = torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(2))
        self.register_buffer("channels_last", image.contiguous(memory_format=torch.channels_last))
        self.register_buffer(
            "nan", torch.tensor([0x7FC01234, 0x7F800001]).to(torch.int32).view(torch.float32)
        )
        self.register_buffer("conjugate", torch.complex(base, base + 1).conj())
        self.large = torch.nn.Parameter(torch.randn(64, 33))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


class _Plain(torch.nn.Module):
    """Some layers of fp32, with a tied pair."""

    def __init__(self, layers: int = 4, width: int = 16) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(layers * width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))
        self.embedding = torch.nn.Embedding(32, width)
        self.head = torch.nn.Linear(width, 32, bias=False)
        self.head.weight = self.embedding.weight
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def _clone(model: torch.nn.Module) -> torch.nn.Module:
    """A receiver of the same shape, holding nothing of the original's values."""
    import copy

    clone = copy.deepcopy(model)
    for owner in clone.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:  # views become plain memory, as in a real worker
                owner._buffers[name] = torch.empty_like(
                    buffer, memory_format=torch.contiguous_format
                )
    poison(clone)
    return clone


def _state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().resolve_conj().clone() for name, t in named_tensors(model).items()}


def _expect_same(model: torch.nn.Module, receivers: list[torch.nn.Module]) -> None:
    for rank, receiver in enumerate(receivers):
        try:
            assert_same_bytes(_state(model), _state(receiver))
        except AssertionError as error:
            raise AssertionError(f"worker {rank}: {error}") from None


# ---- the checks ---------------------------------------------------------------------------------


def _check_contract(kit: _Kit) -> None:
    """Shape of the class: four methods, static sending, typed infos."""
    cls = kit.engine_cls
    abstract: frozenset[str] = getattr(cls, "__abstractmethods__", frozenset())
    assert not abstract, f"abstract methods are left: {sorted(abstract)}"
    static = inspect.getattr_static(cls, "trainer_send_weights")
    assert isinstance(static, staticmethod), "trainer_send_weights must be a staticmethod"
    for attribute, base in (
        ("init_info_cls", WeightTransferInitInfo),
        ("update_info_cls", WeightTransferUpdateInfo),
    ):
        info = getattr(cls, attribute, None)
        assert isinstance(info, type), f"{attribute} is not set"
        assert issubclass(info, base), f"{attribute} must extend {base.__name__}"
        assert dataclasses.is_dataclass(info), f"{attribute} must be a dataclass"
    engine = cls(WeightTransferConfig(), None)
    try:
        engine.parse_update_info({"no_such_field_of_any_engine": 1})
    except ValueError as error:
        assert cls.__name__ in str(error), f"the error must name the engine: {error}"
        assert "no_such_field_of_any_engine" in str(error), (
            f"the error must name the field: {error}"
        )
    else:
        raise AssertionError("parse_update_info accepts unknown fields")


def _check_shutdown_is_idempotent(kit: _Kit) -> None:
    engine = kit.engine_cls(dataclasses.replace(kit.config, backend=kit.name), None)
    engine.shutdown()
    engine.shutdown()


def _check_every_tensor_at_every_bucket_size(kit: _Kit) -> None:
    model = kit.place(_Zoo())
    before = _state(model)
    for bucket_size_bytes in (1, 100, 4096, 1 << 20):
        receivers = kit.receivers(model)
        with kit.controller(receivers, bucket_size_bytes=bucket_size_bytes) as controller:
            report = controller.sync_weights(model)
        assert all(row.verified == "loaded" for row in report.workers), "not verified"
        _expect_same(model, receivers)
    assert_same_bytes(before, _state(model))


def _check_tensor_of_eight_buckets(kit: _Kit) -> None:
    model = torch.nn.Module()
    model.register_buffer("small", _random(torch.bfloat16, (11,), 1))
    model.register_buffer("huge", _random(torch.bfloat16, (8 * 256 * 1024 // 2,), 2))
    model.register_buffer("last", _random(torch.int16, (3,), 3))
    model = kit.place(model)
    receivers = kit.receivers(model)
    with kit.controller(receivers, bucket_size_bytes=256 * 1024) as controller:
        controller.sync_weights(model)
    _expect_same(model, receivers)


def _check_many_rounds(kit: _Kit) -> None:
    model: _Plain = kit.place(_Plain())
    receivers = kit.receivers(model)
    with kit.controller(receivers) as controller:
        for version in range(1, 6):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            for receiver in receivers:
                poison(receiver)
            report = controller.sync_weights(model)
            assert report.version == version, f"version {report.version}, expected {version}"
            _expect_same(model, receivers)
            for receiver in receivers:
                head, embedding = receiver.head, receiver.embedding
                assert head.weight is embedding.weight, "the tie was broken"  # type: ignore[union-attr]


def _check_tensors_belong_to_the_loader(kit: _Kit) -> None:
    """A loader may keep what it is given, and change it."""
    model: _Plain = kit.place(_Plain())
    kept: list[dict[str, torch.Tensor]] = [{} for _ in range(kit.workers)]
    calls: list[int] = []

    def loader(rank: int) -> Callable[[Any, list[tuple[str, torch.Tensor]]], set[str]]:
        def load(module: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
            calls.append(sum(t.numel() * t.element_size() for _, t in weights))
            for name, tensor in weights:
                kept[rank][name] = tensor
                tensor.view(-1).view(torch.uint8).bitwise_not_()  # ours to change
            return {name for name, _ in weights}

        return load

    receivers = kit.receivers(model)
    bindings = [Binding(r, load_weights=loader(i)) for i, r in enumerate(receivers)]
    before = _state(model)
    with kit.controller(bindings, bucket_size_bytes=2048) as controller:
        controller.sync_weights(model)  # the first time, an opaque loader is fed one by one
        calls.clear()
        report = controller.sync_weights(model)
    assert all(row.verified == "delivered" for row in report.workers), "not verified"
    assert_same_bytes(before, _state(model))
    expected = {m.name: before[m.name] for m in ModuleSource(model).metadata()}
    for mine in kept:
        undone = {
            name: t.view(-1).view(torch.uint8).bitwise_not().view(t.dtype).view(t.shape)
            for name, t in mine.items()
        }
        assert_same_bytes(expected, undone)
    largest = max(m.num_bytes for m in ModuleSource(model).metadata())
    total = sum(m.num_bytes for m in ModuleSource(model).metadata())
    assert total > max(2048, largest)
    assert max(calls) < total, "the whole model came in one call"


class _Lazy(WeightSource):
    """Yields one reused buffer, restored as soon as the next tensor is asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[ParamMeta]:
        return [m for m in ModuleSource(self._model).metadata() if m.num_bytes]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = named_tensors(self._model)
        device = next(iter(tensors.values())).device
        longest = max(m.num_bytes for m in self.metadata())
        scratch = torch.empty(longest, dtype=torch.uint8, device=device)
        for meta in self.metadata():
            view = scratch[: meta.num_bytes].view(meta.dtype).view(meta.shape)
            with torch.no_grad():
                view.copy_(tensors[meta.name])
            yield meta.name, view
            scratch.fill_(0xEE)


def _check_source_that_reuses_its_memory(kit: _Kit) -> None:
    model: _Plain = kit.place(_Plain())
    receivers = kit.receivers(model)
    with kit.controller(receivers, bucket_size_bytes=1500) as controller:
        for _ in range(2):
            for receiver in receivers:
                poison(receiver)
            controller.sync_weights(_Lazy(model))
            _expect_same(model, receivers)


def _check_failing_loader_and_repair(kit: _Kit) -> None:
    """One worker's loader raises: the others get the version; the next sync repairs it."""
    model: _Plain = kit.place(_Plain())
    receivers = kit.receivers(model)
    broken = [True]

    def load(module: torch.nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        if broken[0]:
            raise RuntimeError("out of disk")
        targets = dict(module.named_parameters(remove_duplicate=False))
        with torch.no_grad():
            for name, tensor in weights:
                targets[name].copy_(tensor)
        return {name for name, _ in weights}

    bindings: list[Any] = [Binding(receivers[0], load_weights=load), *receivers[1:]]
    with kit.controller(bindings, bucket_size_bytes=1500) as controller:
        try:
            controller.sync_weights(model)
        except PartialUpdate as error:
            row = error.report.workers[0]
            assert row.state == WorkerState.TORN, f"state {row.state}, expected TORN"
            assert "out of disk" in str(row.error), f"the cause is missing: {row.error}"
        except RayxferError as error:
            assert kit.workers == 1, f"the survivors did not commit: {error}"
        else:
            raise AssertionError("a loader raised and nobody was told")
        _expect_same(model, receivers[1:])
        broken[0] = False
        poison(receivers[0])
        controller.sync_weights(model)
        _expect_same(model, receivers)


class _Raises(_Lazy):
    """Raises after its third tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, item in enumerate(super().__iter__()):
            if index == 3:
                raise OSError("the checkpoint is gone")
            yield item


def _check_abort_in_the_middle(kit: _Kit) -> None:
    """The source fails half-way: everybody is free within the stall timeout, the next sync is clean."""
    model: _Plain = kit.place(_Plain())
    receivers = kit.receivers(model)
    with kit.controller(receivers, bucket_size_bytes=1100) as controller:
        controller.sync_weights(model)
        start = time.monotonic()
        try:
            controller.sync_weights(_Raises(model))
        except RayxferError as error:
            assert "the checkpoint is gone" in str(error), f"the cause is missing: {error}"
        else:
            raise AssertionError("the source raised and nobody was told")
        spent = time.monotonic() - start
        limit = 2 * kit.config.stall_timeout_s + 2
        assert spent < limit, f"took {spent:.1f} s to come back, limit {limit:.1f} s"
        assert controller.status().version == 1, "a failed round burnt a version"
        for receiver in receivers:
            poison(receiver)
        report = controller.sync_weights(model)
        assert report.version == 2, f"version {report.version}, expected 2"
        _expect_same(model, receivers)


def _check_partial_and_empty(kit: _Kit) -> None:
    model: _Plain = kit.place(_Plain())
    receivers = kit.receivers(model)
    with kit.controller(receivers) as controller:
        controller.sync_weights(model)
        report = controller.sync_weights({}, partial=True)
        assert report.num_bytes == 0, f"{report.num_bytes} bytes for an empty offer"
        changed = {"layers.1.bias": torch.full_like(model.layers[1].bias, 7.0)}  # type: ignore[arg-type]
        controller.sync_weights(changed, partial=True)
        with torch.no_grad():
            model.layers[1].bias.copy_(changed["layers.1.bias"])  # type: ignore[operator]
        _expect_same(model, receivers)


def _check_nothing_is_left(kit: _Kit) -> None:
    """No thread of ours and no descriptor outlives shutdown."""
    model: _Plain = kit.place(_Plain())

    def once() -> None:
        controller = kit.controller(kit.receivers(model))
        controller.sync_weights(model)
        controller.shutdown()
        controller.shutdown()

    once()
    _settle()
    threads, descriptors = _threads(), _descriptors()
    for _ in range(3):
        once()
    until = time.monotonic() + 5.0
    while time.monotonic() < until and (_threads() > threads or _descriptors() > descriptors):
        _settle()
    assert _threads() <= threads, (
        f"{_threads() - threads} threads are left: {threading.enumerate()}"
    )
    assert _descriptors() <= descriptors, f"{_descriptors() - descriptors} descriptors are left"


def _settle() -> None:
    import gc

    gc.collect()
    time.sleep(0.3)


def _threads() -> int:
    return sum(t.name.startswith("rayxfer") for t in threading.enumerate())


def _descriptors() -> int:
    import os

    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


_CHECKS: tuple[Callable[[_Kit], None], ...] = (
    _check_contract,
    _check_shutdown_is_idempotent,
    _check_every_tensor_at_every_bucket_size,
    _check_tensor_of_eight_buckets,
    _check_many_rounds,
    _check_tensors_belong_to_the_loader,
    _check_source_that_reuses_its_memory,
    _check_failing_loader_and_repair,
    _check_abort_in_the_middle,
    _check_partial_and_empty,
    _check_nothing_is_left,
)
