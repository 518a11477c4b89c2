"""Whole rounds on real Ray, over every CPU backend and over three of them at once."""

from __future__ import annotations

import dataclasses
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch import nn

from rayxfer import (
    ContractError,
    Controller,
    ModuleSource,
    ParamMeta,
    PartialUpdate,
    RayxferError,
    TransferError,
    TransferTimeout,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.client import spawn
from rayxfer.packing import plan_buckets
from rayxfer.source import named_tensors
from tests.fleet import (
    CPU_BACKENDS,
    Many,
    Net,
    Plain,
    Source,
    assert_exact,
    close_shared,
    gated,
    held,
    held_by,
    joined,
    net,
    plain_workers,
    poison_all,
    run_on,
    source_of,
)
from tests.helpers import POISON, assert_same_bytes, raw_bytes

BACKENDS: dict[str, str | list[str]] = {
    **{name: name for name in CPU_BACKENDS},
    "mixed": list(CPU_BACKENDS),
}
FAST = {
    "bucket_size_bytes": 1500,
    "stall_timeout_s": 3.0,
    "sync_timeout_s": 30.0,
}
LIMIT_S = 6.0

every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


@pytest.fixture(scope="module", autouse=True)
def _ends(ray_session: None) -> Iterator[None]:
    yield
    close_shared()


@contextmanager
def fleet(
    backend: str | list[str],
    build: Callable[[], nn.Module] = net,
    hooks: Callable[[Plain], dict[str, Any]] = lambda worker: {},
    count: int = 3,
    **settings: Any,
) -> Iterator[tuple[Controller, list[Any]]]:
    workers = plain_workers(count, build, hooks)
    with joined(workers, backend, **{**FAST, **settings}) as controller:
        yield controller, workers


# ---- every tensor -------------------------------------------------------------------------------

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def random_bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """NaN payloads and negative zeros are among them (bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel() * dtype.itemsize
    data = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)
    return ((data & 1) if dtype is torch.bool else data).view(dtype).view(shape)


class Zoo(nn.Module):
    """Every dtype, odd shapes and strides, a tie, a tensor of several buckets, a private buffer."""

    def __init__(self, seed: int = 0, *, receiver: bool = False) -> None:
        super().__init__()
        tensors: dict[str, torch.Tensor] = {}
        for index, dtype in enumerate(DTYPES):
            label = str(dtype).removeprefix("torch.")
            tensors[f"{label}_matrix"] = random_bits(dtype, (5, 7), seed + index)
            tensors[f"{label}_scalar"] = random_bits(dtype, (), seed + 50 + index)
            tensors[f"{label}_empty"] = torch.empty((0, 3), dtype=dtype)
        base = random_bits(torch.float32, (12, 10), seed + 100)
        tensors["transposed"] = base.t()
        tensors["strided"] = base[::2, 1::3]
        tensors["offset"] = base.flatten()[17:43]
        tensors["expanded"] = base[:1].expand(4, 10)
        tensors["conjugate"] = random_bits(torch.complex64, (3, 2), seed + 101).conj()
        tensors["negative"] = random_bits(torch.complex64, (3,), seed + 102).conj().imag
        image = random_bits(torch.float32, (2, 3, 5, 4), seed + 103)
        tensors["channels_last"] = image.contiguous(memory_format=torch.channels_last)
        tensors["large"] = random_bits(torch.bfloat16, (5000,), seed + 104)
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor.clone() if receiver else tensor)
            if receiver:  # plain memory of its own, as in a real worker
                self._buffers[name] = torch.empty_like(
                    tensor, memory_format=torch.contiguous_format
                )
        self.first = nn.Parameter(random_bits(torch.float32, (9, 3), seed + 105))
        self.second = self.first
        self.register_buffer("private", torch.full((3,), float(seed)), persistent=False)


@every_backend
def test_every_tensor_arrives_bit_for_bit(backend: str | list[str]) -> None:
    """Twice; the trainer keeps its own, ties hold, and what is private stays so."""
    with fleet(backend, lambda: Zoo(7, receiver=True)) as (controller, workers):
        for seed in (1000, 2000):
            model = Zoo(seed)
            before = held(model)
            poison_all(workers)
            report = controller.sync_weights(model)
            assert_exact(before, workers)
            assert_same_bytes(before, held(model))
            names = BACKENDS["mixed"] if isinstance(backend, list) else [backend] * 3
            assert [row.backend for row in report.workers] == names
            assert {row.verified for row in report.workers} == {"loaded"}
            assert report.num_bytes == sum(m.num_bytes for m in ModuleSource(model).metadata())
        assert (
            run_on(workers, lambda worker: worker.model.first is worker.model.second) == [True] * 3
        )
        assert run_on(workers, lambda worker: worker.model.private.tolist()) == [[7.0] * 3] * 3


class Floats(nn.Module):
    def __init__(self, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        values = [0.1, -0.0, float("nan"), float("inf"), 1e-8, 65519.0, 3e38, -1.00390625]
        for index, dtype in enumerate(dtypes):
            self.register_buffer(f"f{index}", torch.tensor(values, dtype=torch.float64).to(dtype))


@every_backend
def test_casts_are_exact_and_listed(backend: str | list[str]) -> None:
    """OpenRLHF#1348."""
    floats = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
    pairs = [(a, b) for a in floats for b in floats]
    model = Floats([a for a, _ in pairs])
    with fleet(backend, lambda: Floats([b for _, b in pairs])) as (controller, workers):
        report = controller.sync_weights(model)
        expected = {f"f{i}": getattr(model, f"f{i}").to(b) for i, (_, b) in enumerate(pairs)}
        assert_exact(expected, workers)
        casts = {
            f"f{i}": f"{str(a).removeprefix('torch.')} -> {str(b).removeprefix('torch.')}"
            for i, (a, b) in enumerate(pairs)
            if a != b
        }
        assert [dict(row.casts) for row in report.workers] == [casts] * 3
        assert {row.verified for row in report.workers} == {"loaded"}


def test_a_cast_on_the_trainer_halves_the_bytes() -> None:
    with fleet("shm", lambda: net().to(torch.bfloat16)) as (controller, workers):
        full = controller.sync_weights(Net(1))
        half = controller.sync_weights(ModuleSource(Net(1), dtype=torch.bfloat16))
        assert 2 * half.num_bytes == full.num_bytes
        assert not half.workers[0].casts
        assert_exact(Net(1).to(torch.bfloat16), workers)


def test_fp8_with_its_scale_is_left_as_it_is() -> None:
    """vime#133."""

    def build(scale: tuple[int, ...] = (1, 1)) -> nn.Module:
        model = nn.Module()
        model.register_buffer("weight", random_bits(torch.float8_e4m3fn, (128, 128), 1))
        model.register_buffer("weight_scale", torch.full(scale, 0.37))
        return model

    with fleet("shm", build) as (controller, workers):
        report = controller.sync_weights(build())
        assert not report.workers[0].casts
        assert_exact(build(), workers)
        with pytest.raises(ContractError, match=r"weight_scale.*\[1, 1\].*\[128, 1\]"):
            controller.sync_weights(build((128, 1)))
        wide = {"weight": torch.zeros(128, 128), "weight_scale": torch.ones(1, 1)}
        with pytest.raises(ContractError, match=r"'weight'.*float8_e4m3fn.*float32"):
            controller.sync_weights(wide)
        assert_exact(build(), workers)


@pytest.mark.parametrize("num_bytes", [2**31 + 1, 2**32 + 1])
def test_offsets_are_as_wide_as_they_need_to_be(num_bytes: int) -> None:
    """pytorch#70605, as a plan: nothing is allocated."""
    sizes = {"a": 100, "huge": num_bytes, "b": 7, "c": num_bytes}
    metas = [ParamMeta(name, torch.uint8, (size,)) for name, size in sizes.items()]
    plan = plan_buckets(metas, 2 * num_bytes + 4096)
    (bucket,) = plan.buckets
    ends = [0]
    for piece, size in zip(bucket.pieces, sizes.values(), strict=True):
        assert piece.num_bytes == size
        assert piece.offset_bytes >= ends[-1]
        ends.append(piece.offset_bytes + piece.num_bytes)
    assert ends[-1] <= bucket.num_bytes < 2 * num_bytes + 4096
    assert plan.num_bytes == sum(sizes.values())
    assert len(plan_buckets(metas, 1024).buckets) == 4


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_two_bucket_sizes_never_meet_in_silence(backend: str) -> None:
    """vllm#31943: the worker is told another bucket size than the sender's. Right, or refused."""
    settings = {**FAST, "bucket_size_bytes": 1 << 20, "init_info": {"bucket_size_bytes": 2 << 20}}
    model = Many(7, 700 << 10, seed=3)
    workers = plain_workers(2, lambda: Many(7, 700 << 10))
    with joined(workers, backend, **settings) as controller:
        start = time.monotonic()
        try:
            controller.sync_weights(model)
        except RayxferError as error:
            spent, said = time.monotonic() - start, f"{error} {getattr(error, 'name', None)}"
        else:
            assert_exact(model, workers)
            return
    assert spent < LIMIT_S
    assert "bucket" in said or "t000" in said


# ---- what must be refused, quickly --------------------------------------------------------------


def with_(**changes: Any) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    names = {key.replace("__", "."): value for key, value in changes.items()}
    return lambda offer: {
        name: tensor for name, tensor in {**offer, **names}.items() if tensor is not None
    }


MISFITS: dict[str, tuple[Callable[..., dict[str, torch.Tensor]], str]] = {
    "unknown": (with_(stranger=torch.zeros(2)), "stranger"),
    "missing": (with_(layers__1__bias=None), "layers.1.bias"),
    "shape": (with_(layers__1__bias=torch.zeros(17)), "layers.1.bias"),
    "rank": (with_(layers__1__bias=torch.zeros(16, 1)), "layers.1.bias"),
    "dtype": (with_(layers__1__bias=torch.zeros(16, dtype=torch.int32)), "layers.1.bias"),
    "fp8": (with_(scale=torch.zeros(16, dtype=torch.float8_e5m2)), "scale"),
    "prefix": (lambda offer: {f"model.{name}": t for name, t in offer.items()}, "model.layers.0"),
}


@pytest.mark.parametrize(("change", "name"), MISFITS.values(), ids=MISFITS)
def test_an_offer_that_does_not_fit(change: Callable[..., Any], name: str) -> None:
    with fleet(BACKENDS["mixed"]) as (controller, workers):
        version = controller.status().version
        poisoned = held_by(workers[0])
        start = time.monotonic()
        with pytest.raises(ContractError) as caught:
            controller.sync_weights(change(held(Net(1))))
        assert time.monotonic() - start < LIMIT_S
        error = caught.value
        ranks = [row.rank for row in controller.status().workers]
        assert error.name is not None
        assert error.name.startswith(name)
        assert error.worker == ranks[0]
        assert "preflight" in str(error) or getattr(error, "phase", None) == "prepare"
        for rank in ranks:  # everybody's problems, all at once
            assert any(f"worker {rank}" in text and name in text for text in error.problems)
        assert_exact(poisoned, workers)
        assert controller.status().version == version
        assert [row.state for row in controller.status().workers] == ["CONNECTING"] * 3
        assert controller.sync_weights(Net(2)).version == version + 1
        assert_exact(Net(2), workers)


def test_all_problems_of_an_offer_come_back_together() -> None:
    changes = {"stranger": torch.zeros(2), "layers.1.bias": torch.zeros(17), "layers.0.bias": None}
    offer = {k: v for k, v in {**held(Net(1)), **changes}.items() if v is not None}
    with fleet("shm") as (controller, _), pytest.raises(ContractError) as caught:
        controller.sync_weights(offer)
    text = str(caught.value)
    for name in changes:
        assert f"'{name}'" in text
    assert "[16]" in text
    assert "[17]" in text


def metas(model: nn.Module) -> list[ParamMeta]:
    return ModuleSource(model).metadata()


def test_a_name_that_is_offered_twice() -> None:
    model = Net(1)
    twice = [*metas(model), metas(model)[1]]
    aliased = [
        dataclasses.replace(metas(model)[0], aliases=(metas(model)[1].name,)),
        *metas(model)[1:],
    ]
    with fleet(BACKENDS["mixed"]) as (controller, workers):
        version = controller.status().version
        for declared in (twice, aliased):
            with pytest.raises(ContractError, match=r"duplicate.*layers\.0\.bias"):
                controller.sync_weights(Source(declared, lambda: iter(ModuleSource(model))))
        assert controller.status().version == version
        controller.sync_weights(model)
        assert_exact(model, workers)


Pairs = list[tuple[str, torch.Tensor]]

LIES: dict[str, tuple[Callable[[Pairs], Pairs], str]] = {
    "one fewer": (lambda pairs: pairs[:-1], "scale"),
    "one more": (lambda pairs: [*pairs, ("stranger", torch.zeros(3))], "stranger"),
    "one again": (lambda pairs: [*pairs[:3], pairs[2], *pairs[3:]], "layers.1.bias"),
    "swapped": (
        lambda pairs: [*pairs[:3], pairs[5], pairs[4], pairs[3], *pairs[6:]],
        "layers.1.bias",
    ),
    "re-typed": (lambda p: [*p[:3], (p[3][0], p[3][1].double()), *p[4:]], "layers.1.bias"),
    "re-shaped": (lambda p: [*p[:2], (p[2][0], p[2][1].view(-1)), *p[3:]], "layers.1.weight"),
    "empty": (lambda p: [*p[:2], (p[2][0], torch.empty(0)), *p[3:]], "layers.1.weight"),
    "meta": (lambda p: [*p[:2], (p[2][0], p[2][1].to("meta")), *p[3:]], "layers.1.weight"),
    "no tensor": (lambda p: [*p[:2], (p[2][0], [0.0]), *p[3:]], "layers.1.weight"),
    "none at all": (lambda pairs: [], "layers.0.weight"),
}


@pytest.mark.parametrize(
    ("lie", "backend"),
    [(lie, "mixed") for lie in LIES]
    + [(lie, one) for lie in ("one fewer", "one more", "empty") for one in CPU_BACKENDS],
)
def test_a_stream_that_disagrees_with_its_metadata(lie: str, backend: str) -> None:
    """R1-V#132 and its kind: named at once; nobody serves a mixture; the next sync is clean."""
    change, name = LIES[lie]
    model = Net(1)
    with fleet(BACKENDS[backend]) as (controller, workers):
        version = controller.status().version
        poisoned = held_by(workers[0])
        start = time.monotonic()
        with pytest.raises(ContractError, match=name) as caught:
            controller.sync_weights(
                Source(metas(model), lambda: iter(change(list(ModuleSource(model)))))
            )
        assert time.monotonic() - start < LIMIT_S
        assert caught.value.name == name
        status = controller.status()
        assert status.version == version
        for row, worker in zip(status.workers, workers, strict=True):
            if row.state != "TORN":
                assert_exact(poisoned, [worker])
        poison_all(workers)
        start = time.monotonic()
        report = controller.sync_weights(model)
        assert time.monotonic() - start < LIMIT_S
        assert report.version == version + 1
        assert_exact(model, workers)


def test_a_source_that_raises_is_quoted() -> None:
    model = Net(1)

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(ModuleSource(model))[:3]
        raise OSError("the checkpoint is gone")

    with fleet(BACKENDS["mixed"]) as (controller, workers):
        with pytest.raises(TransferError, match="the checkpoint is gone") as caught:
            controller.sync_weights(Source(metas(model), pairs))
        assert caught.value.phase == "update"
        assert caught.value.name == "layers.1.weight"
        assert isinstance(caught.value.cause, OSError)
        controller.sync_weights(model)
        assert_exact(model, workers)


def test_a_source_that_stops_is_a_timeout() -> None:
    """Within the stall timeout and what it takes to clear up, with the name that it stopped at."""
    model = Net(1)
    go_on = threading.Event()

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield from list(ModuleSource(model))[:3]
        go_on.wait(60)

    with fleet(BACKENDS["mixed"]) as (controller, workers):
        version = controller.status().version
        start = time.monotonic()
        try:
            with pytest.raises(TransferTimeout) as caught:
                controller.sync_weights(Source(metas(model), pairs))
            assert time.monotonic() - start < LIMIT_S
        finally:
            go_on.set()
        assert caught.value.phase == "update"
        assert caught.value.name is not None
        assert controller.status().version == version
        poison_all(workers)
        controller.sync_weights(model)
        assert_exact(model, workers)


# ---- a wire that lies ---------------------------------------------------------------------------


def flip_one_byte(monkeypatch: pytest.MonkeyPatch, backend: str, name: str) -> None:
    """From now on this engine sends one byte of one tensor wrongly."""
    engine = WeightTransferEngineFactory.get_engine_class(backend)
    send = engine.trainer_send_weights

    def flipping(iterator: Iterator[tuple[str, torch.Tensor]], args: dict[str, Any]) -> None:
        def flipped() -> Iterator[tuple[str, torch.Tensor]]:
            for offered, tensor in iterator:
                if offered == name:
                    tensor = tensor.clone()
                    tensor.view(-1).view(torch.uint8)[3] ^= 0x10
                yield offered, tensor

        send(flipped(), args)

    monkeypatch.setattr(engine, "trainer_send_weights", staticmethod(flipping))


@every_backend
def test_a_flipped_byte_is_refused_and_named(
    backend: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fleet(backend) as (controller, workers):
        version = controller.sync_weights(Net(1)).version
        with monkeypatch.context() as patch:
            for engine in CPU_BACKENDS:
                flip_one_byte(patch, engine, "layers.1.weight")
            start = time.monotonic()
            with pytest.raises(TransferError, match=r"digest.*layers\.1\.weight") as caught:
                controller.sync_weights(Net(2))
            assert time.monotonic() - start < LIMIT_S
        ranks = [row.rank for row in controller.status().workers]
        assert caught.value.name == "layers.1.weight"
        assert caught.value.worker in ranks
        assert caught.value.phase == "verify"
        assert caught.value.weight_version == version + 1
        status = controller.status()
        assert status.version == version
        assert {row.state for row in status.workers} == {"TORN"}
        assert ray.get([w.weight_version.remote() for w in workers]) == [version] * 3
        poison_all(workers)
        assert controller.sync_weights(Net(3)).version == version + 1
        assert_exact(Net(3), workers)


def test_one_lying_wire_of_three_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with fleet(BACKENDS["mixed"]) as (controller, workers):
        with monkeypatch.context() as patch:
            flip_one_byte(patch, "gloo", "layers.1.weight")
            with pytest.raises(PartialUpdate, match=r"layers\.1\.weight") as caught:
                controller.sync_weights(Net(2))
        rows = caught.value.report.workers
        assert [row.state for row in rows] == ["READY", "TORN", "READY"]
        assert controller.status().version == caught.value.report.version
        assert_exact(Net(2), [workers[0], workers[2]])
        poison_all(workers)
        controller.sync_weights(Net(3))
        assert_exact(Net(3), workers)


# ---- full and partial ---------------------------------------------------------------------------


def test_an_empty_offer() -> None:
    with fleet(BACKENDS["mixed"]) as (controller, workers):
        version = controller.sync_weights(Net(1)).version
        for empty in ({}, nn.Module(), Source([], lambda: iter(()))):
            with pytest.raises(ContractError, match="empty"):
                controller.sync_weights(empty)
            assert controller.status().version == version
        report = controller.sync_weights({}, partial=True)
        assert (report.num_bytes, report.num_tensors, report.sent) == (0, 0, ())
        assert report.version == version + 1
        assert ray.get([w.weight_version.remote() for w in workers]) == [version + 1] * 3
        assert_exact(Net(1), workers)


@every_backend
def test_a_partial_update_leaves_the_rest_alone(backend: str | list[str]) -> None:
    old, new = held(Net(1)), held(Net(2))
    chosen = ["layers.1.weight", "scale"]
    with fleet(backend) as (controller, workers):
        controller.sync_weights(Net(1))
        report = controller.sync_weights({name: new[name] for name in chosen}, partial=True)
        assert report.partial
        assert sorted(report.sent) == chosen
        assert set(report.kept) >= {"layers.0.weight", "layers.0.bias"}
        assert not set(report.kept) & set(chosen)
        assert_exact({**old, **{name: new[name] for name in chosen}}, workers)
        tied = controller.sync_weights({"head.weight": new["head.weight"]}, partial=True)
        assert tied.num_tensors == 1
        expected = {**old, **{name: new[name] for name in [*chosen, "head.weight"]}}
        assert_exact({**expected, "embedding.weight": new["head.weight"]}, workers)
        with pytest.raises(ContractError, match="stranger"):
            controller.sync_weights({"stranger": torch.zeros(1)}, partial=True)


def test_a_prefix_is_renamed_or_refused() -> None:
    """ROLL#500."""

    class Wrapped(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            self.module = Net(seed)

    with fleet(BACKENDS["mixed"]) as (controller, workers):
        with pytest.raises(ContractError, match=r"module\.layers\.0\.weight"):
            controller.sync_weights(Wrapped(1))
        controller.sync_weights(ModuleSource(Wrapped(1), rename={"module": ""}))
        assert_exact(Net(1), workers)


def test_what_did_not_change_is_said() -> None:
    """verl#7495."""
    with fleet("shm") as (controller, _):
        model = Net(1)
        controller.sync_weights(model)
        model.layers[1].bias.data.add_(1)
        report = controller.sync_weights(model)
        assert set(report.unchanged) == {m.name for m in metas(model)} - {"layers.1.bias"}


# ---- aliasing and lifetimes ---------------------------------------------------------------------


@every_backend
def test_the_trainer_may_change_its_weights_at_once(backend: str | list[str]) -> None:
    with fleet(backend) as (controller, workers):
        model = Net(1)
        for step in range(5):
            expected = held(model)
            controller.sync_weights(model)
            with torch.no_grad():
                for tensor in (*model.parameters(), model.scale):
                    tensor.add_(step + 1.5)
            assert_exact(expected, workers)


@every_backend
def test_temporaries_may_go_as_soon_as_the_next_is_asked_for(backend: str | list[str]) -> None:
    """vllm-ascend#12713: each tensor exists for one step, then its memory is reused."""
    model = Net(1)

    class Temporaries(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in ModuleSource(model):
                fresh = tensor + 1.0
                yield name, fresh
                fresh.view(-1).view(torch.uint8).fill_(0xEE)
                del fresh

    source = Temporaries(metas(model), lambda: iter(()))
    expected = {name: tensor + 1.0 for name, tensor in held(model).items()}
    with fleet(backend) as (controller, workers):
        rounds = 50 if backend == "gloo" else 10
        for round_ in range(rounds):
            report = controller.sync_weights(source)
            assert report.attempts == 1
            if round_ % 10 == 0:
                assert_exact(expected, workers)
                poison_all(workers)
        controller.sync_weights(source)
        assert_exact(expected, workers)


@every_backend
def test_a_lazy_source_in_a_context_that_restores(backend: str | list[str]) -> None:
    """verl#7014: an adapter is merged in place while the source is read, and unmerged after it."""
    model = Net(1)
    before = held(model)
    inside: list[bool] = []

    @contextmanager
    def merged() -> Iterator[None]:
        inside.append(True)
        with torch.no_grad():
            for tensor in (*model.parameters(), model.scale):
                tensor.add_(0.25)
        try:
            yield
        finally:
            inside.pop()
            for name, tensor in named_tensors(model).items():
                tensor.data.copy_(before[name])

    class Merged(Source):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            with merged():
                yield from ModuleSource(model)

    expected = {name: tensor + 0.25 for name, tensor in before.items()}
    with fleet(backend) as (controller, workers):
        for _ in range(3):
            poison_all(workers)
            controller.sync_weights(Merged(metas(model), lambda: iter(())))
            assert not inside
            assert_exact(expected, workers)
            assert_same_bytes(before, held(model))


@every_backend
def test_the_source_is_read_once_per_attempt(
    backend: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many channels and workers there are; again from the start where an attempt broke."""
    model = Net(1)
    names = [m.name for m in metas(model)]
    with fleet(backend) as (controller, workers):
        source = source_of(model)
        assert controller.sync_weights(source).attempts == source.passes == 1
        assert source.read == names

        engine = WeightTransferEngineFactory.get_engine_class("shm")
        send, calls = engine.trainer_send_weights, []

        def breaks_once(iterator: Iterator[Any], args: dict[str, Any]) -> None:
            calls.append(args["weight_version"])
            if len(calls) == 1:
                next(iterator)
                raise ConnectionError("cable pulled")
            send(iterator, args)

        if backend in ("shm", BACKENDS["mixed"]):
            monkeypatch.setattr(engine, "trainer_send_weights", staticmethod(breaks_once))
            source = source_of(model)
            poison_all(workers)
            report = controller.sync_weights(source)
            assert report.attempts == source.passes == 2
            assert source.read[-len(names) :] == names
            assert [row.error for row in report.workers] == [None] * 3
            assert_exact(model, workers)


def test_a_collective_of_the_trainers_own_goes_on_beside_a_sync() -> None:
    """verl#7423: the trainer's process group and rayxfer's gloo do not meet."""
    (peer,) = plain_workers(1, net, first=3)
    path = f"/dev/shm/rayxfer-test-{os.getpid()}"
    rounds = 200

    def join(rank: int) -> None:
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)

    def reduce(count: int = rounds) -> float:
        tensor = torch.ones(64)
        for _ in range(count):
            dist.all_reduce(tensor)
            tensor.div_(2)
        return float(tensor.sum())

    def other(worker: Plain) -> float:
        join(1)
        try:
            return reduce()
        finally:
            dist.destroy_process_group()

    with fleet("gloo", count=2) as (controller, workers):
        theirs = peer.run.remote(other)
        join(0)
        try:
            mine = spawn(reduce, "train")
            for seed in range(5):
                poison_all(workers)
                controller.sync_weights(Net(seed))
                assert_exact(Net(seed), workers)
            assert mine.result(timeout=60) == ray.get(theirs, timeout=60) == 64.0
        finally:
            dist.destroy_process_group()
            Path(path).unlink(missing_ok=True)


def test_status_answers_during_a_slow_sync() -> None:
    """open-instruct#1454, with loaders that take their time."""

    def hooks(worker: Plain) -> dict[str, Any]:
        return {"load_weights": lambda model, weights: time.sleep(0.15 * len(weights))}

    with fleet(BACKENDS["mixed"], hooks=hooks) as (controller, _):
        sync = spawn(lambda: controller.sync_weights(Net(1)), "sync")
        slowest, busy = 0.0, 0
        while not sync.done():
            start = time.monotonic()
            busy += controller.status().busy
            slowest = max(slowest, time.monotonic() - start)
            time.sleep(0.05)
        assert sync.result().workers[0].error is None
        assert busy > 3
        assert slowest < 1.0


# ---- serialisation and safety -------------------------------------------------------------------


class Touches:
    """Unpickling this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


@pytest.mark.parametrize(
    ("where", "field"),
    [("update_info", "labels"), ("update_info", "is_checkpoint_format"), ("init_info", "labels")],
)
def test_an_object_in_a_request_is_refused_before_it_is_unpickled(
    where: str, field: str, tmp_path: Path
) -> None:
    """vllm#35928: requests are plain data."""
    target = tmp_path / "touched"
    workers = plain_workers(1, net)
    controller = None
    try:
        with pytest.raises(RayxferError, match=field):
            config = WeightTransferConfig(backend="shm", **{where: {field: Touches(str(target))}})
            controller = Controller(workers, config)
            controller.sync_weights(Net(1))
    finally:
        if controller is not None:
            controller.shutdown()
    assert not target.exists()


@every_backend
def test_a_small_view_of_a_large_storage_moves_little(
    backend: str | list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """pytorch#65604: 1 KiB out of 32 MiB."""

    def hooks(worker: Plain) -> dict[str, Any]:
        def load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
            for name, tensor in weights:
                worker.log.append(tensor.untyped_storage().nbytes())
                model.get_buffer(name).copy_(tensor)
            return {name for name, _ in weights}

        return {"load_weights": load}

    put: list[int] = []
    original = ray.put

    def counting(value: Any, **kwargs: Any) -> Any:
        put.append(value.nbytes)
        return original(value, **kwargs)

    monkeypatch.setattr(ray, "put", counting)
    view = torch.randn(8 << 20)[1000:1256]
    with fleet(backend, lambda: Many(1, 1024), hooks) as (controller, workers):
        report = controller.sync_weights({"t0000": view})
        assert report.num_bytes == 1024
        assert_exact({"t0000": view}, workers)
        assert all(sum(sizes) < 64 << 10 for sizes in run_on(workers, lambda worker: worker.log))
        assert sum(put) < 64 << 10
        assert bool(put) == (backend in ("object_store", BACKENDS["mixed"]))


# ---- what the control plane costs ---------------------------------------------------------------


@every_backend
def test_calls_grow_with_buckets_not_with_tensors(backend: str | list[str]) -> None:
    """open-instruct#1535, trl#5249: 300 tensors of 1 KiB; then with 10 ms more for each call."""
    size = 64 << 10
    buckets = len(plan_buckets(metas(Many(300)), size).buckets)
    with fleet(backend, lambda: Many(300), bucket_size_bytes=size) as (controller, workers):
        for seed in range(3):
            report = controller.sync_weights(Many(300, seed=seed))
            assert 0 < report.control_calls <= 4 + buckets
            assert_exact(Many(300, seed=seed), workers)
        run_on(workers, lambda worker: setattr(worker, "call_delay_s", 0.01))
        # the best of three: what else the machine does only ever adds
        seconds = [controller.sync_weights(Many(300, seed=seed)).seconds for seed in (7, 8, 9)]
        assert min(seconds) < 1.0
        assert_exact(Many(300, seed=9), workers)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_workers_load_at_the_same_time(backend: str) -> None:
    """vllm#24295: four workers that load for 0.5 s each."""

    def hooks(worker: Plain) -> dict[str, Any]:
        def load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
            if not worker.log:
                worker.log.append("slept")
                time.sleep(0.5)
            for name, tensor in weights:
                model.get_buffer(name).copy_(tensor)
            return {name for name, _ in weights}

        return {"load_weights": load}

    with fleet(backend, lambda: Many(8), hooks, count=4, bucket_size_bytes=64 << 10) as (
        controller,
        workers,
    ):
        controller.sync_weights(Many(8))  # connects, and learns what the loaders do
        seconds = []
        for seed in (2, 3, 4):  # the best of three: what else the machine does only ever adds
            run_on(workers, lambda worker: worker.log.clear())
            seconds.append(controller.sync_weights(Many(8, seed=seed)).phases["update"])
        assert 0.5 <= min(seconds) < 1.2
        assert_exact(Many(8, seed=4), workers)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_time_grows_no_faster_than_the_number_of_tensors(backend: str) -> None:
    """vllm#49505."""
    seconds = {}
    for count in (500, 2000):
        model = Many(count, 64)
        with fleet(backend, lambda c=count: Many(c, 64), count=1) as (controller, workers):
            controller.sync_weights(model)
            seconds[count] = statistics.median(
                controller.sync_weights(model).seconds for _ in range(5)
            )
            assert_exact(model, workers)
    assert seconds[2000] < 6 * seconds[500]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_worker_holds_one_extra_copy_at_most(backend: str) -> None:
    """ray#12317: 16 MiB in one tensor, two workers on the trainer's node."""
    size = 16 << 20

    def start(worker: Plain) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        worker.log = [resident("VmRSS")]

    def resident(key: str) -> int:
        text = Path("/proc/self/status").read_text()
        line = next(line for line in text.splitlines() if line.startswith(key))
        return int(line.split()[1]) * 1024

    with fleet(backend, lambda: Many(1, size), count=2, bucket_size_bytes=64 << 10) as both:
        controller, workers = both
        controller.sync_weights(Many(1, size))
        run_on(workers, start)
        controller.sync_weights(Many(1, size, seed=2))
        for extra in run_on(workers, lambda worker: resident("VmHWM") - worker.log[0]):
            assert extra < size + (6 << 20)
        assert_exact(Many(1, size, seed=2), workers)


def test_a_gated_round_leaves_receivers_as_they_were() -> None:
    """The poison that the tests above rely on is there until bytes arrive."""
    entered, go_on = threading.Event(), threading.Event()
    with fleet("shm", count=1) as (controller, workers):
        sync = spawn(lambda: controller.sync_weights(gated(Net(1), entered, go_on)), "sync")
        try:
            assert entered.wait(30)
            for name, tensor in held_by(workers[0]).items():
                assert set(raw_bytes(tensor)) == {POISON}, name
        finally:
            go_on.set()
        sync.result(timeout=60)
        assert_exact(Net(1), workers)
