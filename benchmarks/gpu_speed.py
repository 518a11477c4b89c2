"""How fast `ipc` is on this GPU, next to a copy of the same bytes within the device."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu_stage import (
    Failed,
    Stage,
    Weights,
    build_weights,
    compare,
    digests,
    layer_shapes,
    plan_for,
    receive_rounds,
    small_shapes,
    tensor_device,
    vllm_receive,
)
from rayxfer import ModuleSource, WeightTransferConfig, WeightTransferEngineFactory
from rayxfer.gpu_digest import WORDS
from rayxfer.metadata import metadata_to_wire
from rayxfer.testing import LocalController, ProcessWorker
from rayxfer.topology import Facts, bucket_size

_WARM_UP, _ROUNDS = 2, 7
_BATCH_LIMIT_S = 60.0

EXPECTED = {"direct, layers": 0.85, "staged, layers": 0.45, "direct, small": 0.5}
"""Least speed, as a share of the copy's within the device. "small" is held against the same number of
copies in one batched call, which is the most that so many separate tensors can have."""


def _median(function: Callable[[], Any], stage: Stage) -> float:
    samples = []
    for number in range(_WARM_UP + _ROUNDS):
        stage.synchronize()
        start = time.perf_counter()
        function()
        stage.synchronize()
        if number >= _WARM_UP:
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _baselines(stage: Stage, model: torch.nn.Module) -> dict[str, float]:
    """Seconds of one flat copy, and of the same tensors in one batched call, within this process."""
    sources = [parameter.detach() for parameter in model.parameters()]
    base = {"copy, flat": _flat(stage, sources), "copy, batched": _batched(stage, sources)}
    if stage.on == "cuda":
        torch.cuda.empty_cache()  # the worker needs the room
    return base


def _flat(stage: Stage, sources: list[torch.Tensor]) -> float:
    total = sum(t.nbytes for t in sources)
    a = torch.empty(total, dtype=torch.uint8, device=sources[0].device)
    b = torch.empty_like(a)
    return _median(lambda: b.copy_(a), stage)


def _batched(stage: Stage, sources: list[torch.Tensor]) -> float:
    targets = [torch.empty_like(t) for t in sources]
    return _median(lambda: torch._foreach_copy_(targets, sources), stage)


def _digested(stage: Stage, model: torch.nn.Module) -> float:
    """Seconds of digesting all of it once, where it lies: what verification costs each side."""
    sources = [parameter.detach() for parameter in model.parameters()]
    return _median(lambda: WORDS.many(sources), stage)


def _engine(stage: Stage, model: torch.nn.Module, worker: ProcessWorker, form: str) -> float:
    """Seconds of a round of the engine alone: from its start until every copy is acknowledged."""
    cls = WeightTransferEngineFactory.get_engine_class(stage.ipc)
    facts = Facts.from_wire(worker.call("describe", {}).result(timeout=60)["facts"])
    source = ModuleSource(model)
    wire = metadata_to_wire(source.metadata())
    info = {key: wire[key] for key in ("names", "dtype_names", "shapes")}
    total = sum(m.num_bytes for m in source.metadata())
    size = min(bucket_size(cls.default_bucket_size_bytes, [facts]), total)
    channel, infos = cls.trainer_open(plan_for(stage, facts, size, form=form))
    rounds = _WARM_UP + _ROUNDS
    future = worker.start(receive_rounds, stage.ipc, stage.on, infos[0], info, rounds)
    items = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    samples = []
    try:
        for number in range(rounds):
            start = time.perf_counter()
            args = {"channel": channel, "update_info": info, "stable": form != "staged"}
            cls.trainer_send_weights(iter(items), args)
            if number >= _WARM_UP:
                samples.append(time.perf_counter() - start)
        future.result(timeout=60)
    finally:
        cls.trainer_close(channel)
    return statistics.median(samples)


def _whole_calls(
    stage: Stage, model: torch.nn.Module, worker: ProcessWorker, verify: Any, rounds: int
) -> float:
    """Seconds of `sync_weights` as a user calls it: begin, preflight, transfer, proof, commit."""
    config = WeightTransferConfig(backend=stage.ipc, verify=verify)
    samples = []
    with LocalController([worker], config) as controller:
        controller.sync_weights(model)
        for _ in range(rounds):
            start = time.perf_counter()
            controller.sync_weights(model)
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _vllm(model: torch.nn.Module, worker: ProcessWorker) -> float:
    """vLLM's own ipc engine, the same way as its trainer's side does it: a handle per tensor, each
    round; the pickled handles go through this script's pipe instead of Ray or HTTP."""
    from torch.multiprocessing.reductions import reduce_tensor

    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    samples = []
    for number in range(1 + 3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        names, dtypes, shapes, handles = [], [], [], []
        for name, parameter in model.named_parameters():
            tensor = parameter.detach().contiguous()
            names.append(name)
            dtypes.append(str(tensor.dtype).split(".")[-1])
            shapes.append(list(tensor.shape))
            handles.append({uuid: reduce_tensor(tensor)})  # type: ignore[no-untyped-call]
        info = {"names": names, "dtype_names": dtypes, "shapes": shapes, "ipc_handles": handles}
        worker.run(vllm_receive, info)
        if number:
            samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def measure(stage: Stage, left_s: Callable[[], float]) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows (way, GB/s, share of the copy), and what was slower than expected."""
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    models = {
        "layers": layer_shapes(stage.size_bytes),
        "small": small_shapes(*stage.small),
    }
    for what, shapes in models.items():
        model = stage.place(Weights(shapes, tensor_device(stage.on), seed=1))
        total = sum(p.nbytes for p in model.parameters())
        base = _baselines(stage, model)
        worker = stage.worker(build_weights, shapes)

        def add(way: str, seconds: float, what: str = what, total: int = total) -> None:
            shares = {name: spent / seconds for name, spent in base.items()}  # noqa: B023
            rows.append(
                {
                    "way": f"{way}, {what}",
                    "tensors": len(models[what]),
                    "bytes": total,
                    "seconds": seconds,
                    "gigabytes_per_second": total / seconds / 1e9,
                    **shares,
                }
            )

        for name, seconds in base.items():
            add(name, seconds)
        for form in ("direct", "staged"):
            add(form, _engine(stage, model, worker, form))
            compare(model, worker.run(digests, _few(shapes)))
        add("sync_weights, verify off", _whole_calls(stage, model, worker, "off", 5))
        add("digest", _digested(stage, model))
        if left_s() > _BATCH_LIMIT_S:
            add("sync_weights, verify on", _whole_calls(stage, model, worker, "digest", 5))
        if stage.on == "cuda" and importlib.util.find_spec("vllm") is not None:
            try:
                add("vLLM's own ipc engine", _vllm(model, worker))
            except Exception as error:  # another version's interface: a comparison, not a check
                problems.append(
                    f"note: vLLM's engine was not measured: {type(error).__name__}: {error}"
                )
        stage.close()
        del model
        if stage.on == "cuda":
            torch.cuda.empty_cache()
    if stage.on == "cuda":
        for row in rows:
            least = EXPECTED.get(row["way"])
            against = "copy, batched" if row["way"].endswith("small") else "copy, flat"
            if least is not None and row[against] < least:
                problems.append(f"{row['way']}: {row[against]:.2f} of {against}, expected {least}")
    if not rows:
        raise Failed("nothing was measured")
    return rows, problems


def _few(shapes: list[tuple[str, tuple[int, ...]]]) -> set[str]:
    """Names whose bytes are compared: the first, the last and some between."""
    names = [name for name, _ in shapes]
    return {names[0], names[-1], *names[:: max(1, len(names) // 8)]}
