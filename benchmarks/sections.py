"""The parts of a run. Each gives plain data, for a JSON file, tables, plots and targets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks import reporting
from benchmarks.contenders import MODES, Rayxfer, Spec, Stage, ping_all
from benchmarks.peers import MEMCPY, PEERS
from benchmarks.shapes import MODELS, equal_shapes, shapes_of
from benchmarks.turns import TooLarge, check, check_memory, measure, measure_on, row

Out = dict[str, Any]

_MIB = 1 << 20
_FIXED_WORKERS, _FIXED_TENSORS, _FIXED_TENSOR_BYTES = 4, 300, 1 << 10
_WARM_UP_ROUNDS = 5
_BOTH = ("shm", "shm_placed")
"""Ways that are measured with and without verification unless `verify` says otherwise: the others
are there without, like the peers, so that all of them fit into memory at 1 GiB."""


_ALL_WAYS_BYTES = 512 * _MIB
"""Above that the headline is about those alone, beside all peers: with all ways 1 GiB takes over 22 GiB."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. Sizes are of all weights together.

    Attributes:
        ways: of rayxfer: backends and `contenders.MODES`.
        verify: "on", "off" or both, for every way; None: see `_BOTH`.
        sweep_bytes: the size where something else is varied.
        own_ray: Ray may be shut down and started anew, where a measurement needs it untouched.
    """

    size_bytes: int = 512 * _MIB
    shapes: str = "qwen3"
    tensors: int = 200
    workers: int = 1
    ways: tuple[str, ...] = ("shm", "shm_placed", "shm_mapped", "gloo", "object_store")
    verify: tuple[str, ...] | None = None
    peers: tuple[str, ...] = tuple(PEERS)
    repeats: int = 7
    fixed_rounds: int = 60
    sweep_bytes: int = 256 * _MIB
    sizes: tuple[int, ...] = (_MIB, 16 * _MIB, 256 * _MIB, 1024 * _MIB, 4096 * _MIB)
    worker_counts: tuple[int, ...] = (1, 2, 4, 8)
    tensor_counts: tuple[int, ...] = (10, 200, 1000, 10_000)
    many_counts: tuple[int, ...] = (200, 10_000)
    models: tuple[str, ...] = tuple(MODELS)
    own_ray: bool = False

    def verify_of(self, way: str) -> tuple[str, ...]:
        return self.verify or (("on", "off") if way in _BOTH else ("off",))

    def some(self, ways: Sequence[str], **where: Any) -> list[Spec]:
        """Those of `ways` that were asked for, rayxfer's without verification."""
        asked = [way for way in ways if way in (*self.ways, *self.peers)]
        return [Spec(way, "" if way in PEERS else "off", **where) for way in asked]


def headline(plan: Plan) -> Out:
    """Every way over the same weights."""
    shapes = shapes_of(plan.shapes, plan.size_bytes, plan.tensors)
    specs = [Spec(peer, workers=plan.workers) for peer in plan.peers]
    ways = plan.ways
    if plan.size_bytes > _ALL_WAYS_BYTES:
        ways = tuple(way for way in ways if way in _BOTH) or ways
    for way in ways:
        specs += [Spec(way, verify, plan.workers) for verify in plan.verify_of(way)]
    return measure(specs, {"": shapes}, plan.repeats, "headline")


def fleet(plan: Plan) -> Out:
    """The headline's weights to more workers, all counts in one group."""
    shapes = shapes_of(plan.shapes, plan.size_bytes, plan.tensors)
    few, most = min(plan.worker_counts), max(plan.worker_counts)
    between = [count for count in plan.worker_counts if few < count < most]
    specs = plan.some([MEMCPY])
    specs += [spec for count in between for spec in plan.some(["shm"], workers=count)]
    specs += [spec for count in (few, most) for spec in plan.some(["shm_mapped"], workers=count)]
    return measure(specs, {"": shapes}, plan.repeats, "fleet")


def workers(plan: Plan) -> Out:
    """What each way costs by the number of workers. One group per count, over the same actors."""
    shapes = shapes_of(plan.shapes, plan.sweep_bytes, plan.tensors)
    ways = ("shm", "shm_mapped", "gloo", "gloo_broadcast", "ray_put_zero_copy")
    groups = [
        plan.some([MEMCPY]) + plan.some(ways, workers=count)
        for count in sorted(plan.worker_counts, reverse=True)
    ]
    check_memory(groups[0], {"": shapes}, "workers")
    stage = Stage(shapes)
    try:
        parts = [
            measure_on({"": stage}, specs, plan.repeats, f"workers: {specs[-1].workers}")
            for specs in reversed(groups)
        ]
    finally:
        stage.close()
    return _joined(parts)


def sizes(plan: Plan) -> Out:
    """By model size, of Llama's shapes. One group per size; the largest with few contenders."""
    parts = []
    for size in plan.sizes:
        ways = (MEMCPY, "shm", "gloo", "gloo_broadcast", "ray_put_zero_copy")
        specs = plan.some(ways if size <= 1024 * _MIB else ways[:2], case=_size(size))
        cases = {_size(size): shapes_of("llama", size)}
        parts.append(_try(specs, cases, plan, f"sizes: {_size(size)}"))
    return _joined(parts)


def tensors(plan: Plan) -> Out:
    """The same bytes in few and in many tensors, all in one group."""
    cases = {f"{n:,} tensors": equal_shapes(plan.sweep_bytes, n) for n in plan.tensor_counts}
    ways = (MEMCPY, "shm", "gloo", "gloo_broadcast")
    specs = [spec for case in cases for spec in plan.some(ways, case=case)]
    return measure(specs, cases, plan.repeats, "tensors")


def many(plan: Plan) -> Out:
    """The headline's bytes in few and in many tensors: what tensors cost where bytes are not few."""
    cases = {f"{n:,} tensors": equal_shapes(plan.size_bytes, n) for n in plan.many_counts}
    specs = [spec for case in cases for spec in plan.some((MEMCPY, "shm"), case=case)]
    return measure(specs, cases, plan.repeats, "many")


def models(plan: Plan) -> Out:
    """Real models' shapes, scaled to one size. One group per model."""
    parts = []
    for name in plan.models:
        specs = plan.some((MEMCPY, "shm", "gloo", "gloo_broadcast"), case=name)
        if "shm" in plan.ways:
            specs.insert(1, Spec("shm", "on", case=name))
        cases = {name: shapes_of(name, plan.sweep_bytes)}
        parts.append(_try(specs, cases, plan, f"models: {name}"))
    return _joined(parts)


def stall(plan: Plan) -> Out:
    """How long `sync_weights_async` keeps the trainer, next to a whole sync."""
    shapes = shapes_of(plan.shapes, plan.size_bytes, plan.tensors)
    if "shm" not in plan.ways:
        return {"rows": [], "skipped": {}}
    specs = [Spec("shm", "off", plan.workers), Spec("shm_async", "off", plan.workers)]
    return measure(specs, {"": shapes}, plan.repeats, "stall")


def fixed(plan: Plan) -> Out:
    """What a sync costs where there is almost nothing to send. A bare fan-out to the same workers
    takes turns with each contender."""
    stage = Stage(equal_shapes(_FIXED_TENSORS * _FIXED_TENSOR_BYTES, _FIXED_TENSORS))
    backends = [way for way in plan.ways if way not in MODES] if plan.fixed_rounds > 0 else []
    specs = [
        Spec(way, verify, _FIXED_WORKERS)
        for way in backends
        for verify in plan.verify or ("on", "off")
    ]
    try:
        rows = [_fixed_row(stage, spec, plan.fixed_rounds) for spec in specs]
    finally:
        stage.close()
    return {
        "workers": _FIXED_WORKERS,
        "tensors": _FIXED_TENSORS,
        "tensor_bytes": _FIXED_TENSOR_BYTES,
        "rounds": plan.fixed_rounds,
        "rows": rows,
    }


def _fixed_row(stage: Stage, spec: Spec, rounds: int) -> Out:
    print(f"fixed: {spec}", file=sys.stderr, flush=True)
    contender = Rayxfer(stage, spec)
    pings: list[float] = []
    samples: list[float] = []
    try:
        for turn in range(-_WARM_UP_ROUNDS, rounds):
            if turn == 0:
                pings, samples = [], []
                contender.forget()
                contender.poison()
            pings.append(ping_all(contender.workers))
            samples.append(contender.run())
        check(contender)
    finally:
        contender.close()
    made = row(contender, samples)
    made["ping"] = reporting.summary(pings)
    made["x_ping"] = made["median_s"] / made["ping"]["median_s"]
    return made


def _try(specs: Sequence[Spec], cases: dict[str, Any], plan: Plan, title: str) -> Out:
    try:
        return measure(specs, cases, plan.repeats, title)
    except TooLarge as error:
        print(f"  skipped: {error}", file=sys.stderr, flush=True)
        return {"rows": [], "skipped": {title: str(error)}}


def _joined(parts: Sequence[Out]) -> Out:
    skipped: dict[str, str] = {}
    for part in parts:
        skipped |= part["skipped"]
    return {"rows": [made for part in parts for made in part["rows"]], "skipped": skipped}


def _size(size_bytes: int) -> str:
    gib = size_bytes / 1024**3
    return f"{gib:g} GiB" if gib >= 1 else f"{size_bytes / _MIB:g} MiB"
