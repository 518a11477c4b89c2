"""The part of a run that looks at memory; nothing is timed here."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import psutil
import ray

from benchmarks.cluster import restart
from benchmarks.contenders import MODES, Contender, Spec, Stage, Unavailable
from benchmarks.memory import Peaks, pss_bytes
from benchmarks.peers import MEMCPY, OWN_SENDER, PEERS, peer_class, peer_sender, peer_workers
from benchmarks.sections import Out, Plan
from benchmarks.shapes import num_bytes, shapes_of
from benchmarks.turns import check, make

_ROUNDS = 3
_FLAT_ROUNDS, _FLAT_AFTER = 50, 10
_FLAT_BYTES = 16 << 20
_STORE = ("ray_put", "ray_put_zero_copy", "object_store")
"""Ways through Ray's object store, whose pages stay touched: each needs one that is untouched."""


def memory(plan: Plan) -> Out:
    """Peak memory beyond what was held before the first sync, per side and together; and whether
    many rounds of a small model add any. One worker; as many as there can be where mapped."""
    shapes = shapes_of(plan.shapes, plan.sweep_bytes, plan.tensors)
    out: Out = {"rows": [], "skipped": {}, "flat": []}
    for way in (*plan.peers, *plan.ways):
        if way == MEMCPY:
            continue
        count = max(plan.worker_counts) if MODES.get(way) == "mapped" else 1
        spec = Spec(way, "" if way in PEERS else "off", count)
        print(f"memory: {spec}", file=sys.stderr, flush=True)
        if way in _STORE and plan.own_ray:
            restart()
        stage = Stage(shapes)
        try:
            out["rows"].append(_peak_row(stage, spec))
        except Unavailable as error:
            out["skipped"][spec.name] = str(error)
        finally:
            stage.close()
    small = Stage(shapes_of(plan.shapes, min(_FLAT_BYTES, plan.sweep_bytes)))
    for spec in plan.some([way for way in plan.ways if way not in MODES]):
        print(f"memory, {_FLAT_ROUNDS} rounds: {spec}", file=sys.stderr, flush=True)
        out["flat"].append(_flat_row(small, spec))
    small.close()
    return out


def _peak_row(stage: Stage, spec: Spec) -> Out:
    contender: Contender | None = None
    if (
        spec.way in PEERS
    ):  # some open their channel when they are made, so what they need comes first
        kind = peer_class(spec.way)
        own_sender = spec.way in OWN_SENDER
        actors = list(peer_workers(stage, spec.workers))
        actors += [peer_sender(stage, spec.way)] if own_sender else []
        ray.get([actor.call.remote(_import, kind.imports) for actor in actors])
        _import(None, kind.imports)
        pids = ray.get([actor.pid.remote() for actor in actors])
        sender = pids.pop() if own_sender else os.getpid()
    else:
        contender = make(stage, spec)
        sender, pids = contender.pids()
    try:
        with Peaks([os.getpid(), sender, *pids, *_raylets()]) as peaks:
            contender = contender or make(stage, spec)
            for _ in range(_ROUNDS):
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
        "sender_extra_bytes": peaks.of(sender),
        "worker_extra_bytes": max(peaks.of(pid) for pid in pids),
        "host_extra_bytes": peaks.together(),
    }


def _flat_row(stage: Stage, spec: Spec) -> Out:
    contender = make(stage, spec)
    try:
        sender, pids = contender.pids()
        parties = [sender, *pids]
        early = late = {"all": 0, "shared": 0}
        for done in range(1, _FLAT_ROUNDS + 1):
            contender.run()
            if done in (_FLAT_AFTER, _FLAT_ROUNDS):
                found = [pss_bytes(pid) for pid in parties]
                early, late = late, {key: sum(f[key] for f in found) for key in early}
    finally:
        contender.close()
    shared = late["shared"] - early["shared"]
    return {
        "name": spec.name,
        "num_bytes": num_bytes(stage.shapes),
        "rounds": _FLAT_ROUNDS,
        "after": _FLAT_AFTER,
        "private_growth_bytes": late["all"] - early["all"] - shared,
        "shared_growth_bytes": shared,
    }


def _import(_actor: Any, names: Sequence[str]) -> None:
    for name in names:
        with contextlib.suppress(Exception):  # what is missing is said where it is used
            importlib.import_module(name)


def _raylets() -> list[int]:
    """The process that holds Ray's object store, if this one started it."""
    return [child.pid for child in psutil.Process().children() if child.name() == "raylet"]
