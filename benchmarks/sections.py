"""The parts of a run. Each gives plain data, for a JSON file, tables, plots and targets."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray

from benchmarks import reporting
from benchmarks.contenders import Contender, Rayxfer, Spec, Stage, Unavailable, ping_all
from benchmarks.memory import HostPeak, Peak
from benchmarks.peers import DIRECT, LIMIT, OWN_SENDER, PEERS, peer_class, peer_sender, peer_workers
from benchmarks.shapes import MODELS, equal_shapes, num_bytes, shapes_of
from benchmarks.turns import TooLarge, check, make, measure, row
from benchmarks.weights import spawn_workers

Out = dict[str, Any]

_MIB = 1 << 20
_FIXED_WORKERS, _FIXED_TENSORS, _FIXED_TENSOR_BYTES = 4, 300, 1 << 10
_WARM_UP_ROUNDS = 5
_MEMORY_ROUNDS = 3
_FLAT_ROUNDS, _FLAT_AFTER = 50, 10
_BOTH = ("shm", "shm_placed")
"""Ways that are measured with and without verification unless `verify` says otherwise: the others
are there without, like the peers, so that all of them fit into memory at 1 GiB."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. Sizes are of all weights together.

    Attributes:
        ways: of rayxfer: backends and `contenders.MODES`.
        verify: "on", "off" or both, for every way; None: see `_BOTH`.
        sweep_bytes: the size where something else is varied.
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
    for way in plan.ways:
        specs += [Spec(way, verify, plan.workers) for verify in plan.verify_of(way)]
    return measure(specs, {"": shapes}, plan.repeats, "headline")


def fleet(plan: Plan) -> Out:
    """The headline's weights to more workers, all counts in one group."""
    shapes = shapes_of(plan.shapes, plan.size_bytes, plan.tensors)
    few, most = min(plan.worker_counts), max(plan.worker_counts)
    between = [count for count in plan.worker_counts if few < count < most]
    specs = plan.some([LIMIT])
    specs += [spec for count in between for spec in plan.some(["shm"], workers=count)]
    specs += [spec for count in (few, most) for spec in plan.some(["shm_mapped"], workers=count)]
    return measure(specs, {"": shapes}, plan.repeats, "fleet")


def workers(plan: Plan) -> Out:
    """What each way costs by the number of workers. One group per count."""
    shapes = shapes_of(plan.shapes, plan.sweep_bytes, plan.tensors)
    parts = []
    for count in plan.worker_counts:
        ways = ("shm", "shm_mapped", "gloo", "gloo_broadcast", "ray_put_zero_copy")
        specs = plan.some([LIMIT]) + plan.some(ways, workers=count)
        parts.append(_try(specs, {"": shapes}, plan, f"workers: {count}"))
    return _joined(parts)


def sizes(plan: Plan) -> Out:
    """By model size, of Llama's shapes. One group per size; the largest with few contenders."""
    parts = []
    for size in plan.sizes:
        ways = (LIMIT, "shm", "gloo", "gloo_broadcast", "ray_put_zero_copy")
        specs = plan.some(ways if size <= 1024 * _MIB else ways[:2], case=_size(size))
        cases = {_size(size): shapes_of("llama", size)}
        parts.append(_try(specs, cases, plan, f"sizes: {_size(size)}"))
    return _joined(parts)


def tensors(plan: Plan) -> Out:
    """The same bytes in few and in many tensors, all in one group."""
    cases = {f"{n:,} tensors": equal_shapes(plan.sweep_bytes, n) for n in plan.tensor_counts}
    ways = (LIMIT, "shm", "gloo", "gloo_broadcast")
    specs = [spec for case in cases for spec in plan.some(ways, case=case)]
    return measure(specs, cases, plan.repeats, "tensors")


def models(plan: Plan) -> Out:
    """Real models' shapes, scaled to one size. One group per model."""
    parts = []
    for name in MODELS:
        specs = plan.some((LIMIT, "shm", "gloo", "gloo_broadcast"), case=name)
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
    actors = spawn_workers(_FIXED_WORKERS, stage.shapes)
    rows = []
    backends = [way for way in plan.ways if not way.startswith("shm_")]
    for way in backends if plan.fixed_rounds > 0 else []:
        for verify in plan.verify or ("on", "off"):
            print(f"fixed: {way}, verify {verify}", file=sys.stderr, flush=True)
            contender = Rayxfer(stage, Spec(way, verify, _FIXED_WORKERS), actors)
            pings: list[float] = []
            samples: list[float] = []
            try:
                for turn in range(-_WARM_UP_ROUNDS, plan.fixed_rounds):
                    if turn == 0:
                        pings, samples = [], []
                        contender.forget()
                        contender.poison()
                    pings.append(ping_all(actors))
                    samples.append(contender.run())
                check(contender)
            finally:
                contender.close()
            made = row(contender, samples)
            made["ping"] = reporting.summary(pings)
            made["x_ping"] = made["median_s"] / made["ping"]["median_s"]
            rows.append(made)
    for actor in actors:
        ray.kill(actor)
    return {
        "workers": _FIXED_WORKERS,
        "tensors": _FIXED_TENSORS,
        "tensor_bytes": _FIXED_TENSOR_BYTES,
        "rounds": plan.fixed_rounds,
        "rows": rows,
    }


def memory(plan: Plan) -> Out:
    """Peak memory beyond what was held before the first sync, per side and together; and whether
    many rounds of a small model add any. Nothing is timed here."""
    shapes = shapes_of(plan.shapes, plan.sweep_bytes, plan.tensors)
    out: Out = {"rows": [], "skipped": {}, "flat": []}
    most = max(plan.worker_counts)
    for way in (*plan.peers, *plan.ways):
        if way == LIMIT:
            continue
        count = most if way == "shm_mapped" else 1
        spec = Spec(way, "" if way in PEERS else "off", count)
        print(f"memory: {spec}", file=sys.stderr, flush=True)
        stage = Stage(shapes)
        try:
            out["rows"].append(_memory_row(stage, spec))
        except Unavailable as error:
            out["skipped"][spec.name] = str(error)
        finally:
            stage.close()
    small = Stage(shapes_of(plan.shapes, min(16 * _MIB, plan.sweep_bytes)))
    for spec in plan.some([way for way in plan.ways if not way.startswith("shm_")]):
        print(f"memory, {_FLAT_ROUNDS} rounds: {spec}", file=sys.stderr, flush=True)
        out["flat"].append(_flat_row(small, spec))
    small.close()
    return out


def _memory_row(stage: Stage, spec: Spec) -> Out:
    contender: Contender | None = None
    if (
        spec.way in PEERS
    ):  # some open their channel when they are made, so what they need comes first
        kind = peer_class(spec.way)
        direct = spec.way == DIRECT
        actors = list(peer_workers(stage, spec.workers, direct))
        actors += [peer_sender(stage, direct)] if spec.way in OWN_SENDER else []
        ray.get([actor.call.remote(_import, kind.imports) for actor in actors])
        _import(None, kind.imports)
        pids = ray.get([actor.pid.remote() for actor in actors])
        sender = pids.pop() if spec.way in OWN_SENDER else os.getpid()
    else:
        contender = make(stage, spec)
        sender, pids = contender.pids()
    try:
        sides = [Peak(sender), *(Peak(pid) for pid in pids)]
        with HostPeak([*{os.getpid(), sender, *pids}, *_raylets()]) as host:
            contender = contender or make(stage, spec)
            for _ in range(_MEMORY_ROUNDS):
                contender.run()
        contender.poison()
        contender.run()
        check(contender)
    finally:
        if contender is not None:
            contender.close()
    return {
        "way": spec.way,
        "name": spec.name,
        "verify": spec.verify,
        "workers": spec.workers,
        "num_bytes": num_bytes(stage.shapes),
        "sender_extra_bytes": sides[0].extra_bytes(),
        "worker_extra_bytes": max(side.extra_bytes() for side in sides[1:]),
        "host_extra_bytes": host.extra_bytes(),
    }


def _flat_row(stage: Stage, spec: Spec) -> Out:
    contender = make(stage, spec)
    try:
        sender, pids = contender.pids()
        host = HostPeak([sender, *pids, *_raylets()])
        early = 0
        for done in range(1, _FLAT_ROUNDS + 1):
            contender.run()
            if done == _FLAT_AFTER:
                early = host.now()
        late = host.now()
    finally:
        contender.close()
    return {
        "name": spec.name,
        "num_bytes": num_bytes(stage.shapes),
        "rounds": _FLAT_ROUNDS,
        "after": _FLAT_AFTER,
        "growth_bytes": late - early,
    }


def _import(_actor: Any, names: Sequence[str]) -> None:
    import contextlib
    import importlib

    for name in names:
        with contextlib.suppress(Exception):  # what is missing is said where it is used
            importlib.import_module(name)


def _raylets() -> list[int]:
    """The process that holds Ray's object store."""
    return [child.pid for child in psutil.Process().children() if child.name() == "raylet"]


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


SECTIONS: dict[str, Callable[[Plan], Out]] = {
    "headline": headline,
    "fixed": fixed,
    "fleet": fleet,
    "stall": stall,
    "workers": workers,
    "sizes": sizes,
    "tensors": tensors,
    "models": models,
    "memory": memory,
}
