"""Trainer → rayxfer → real vLLM: the same tokens and logprobs, bit for bit, as vLLM started from disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from rayxfer import Controller, WeightTransferConfig
from tests.vllm.tiny import KINDS, ask, build, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# after the first, second and fifth sync; buckets from one tensor to the whole model
ROUNDS: list[tuple[int, str, int | None]] = [
    (1, "shm", 1),
    (2, "gloo", None),
    (3, "gloo", None),
    (4, "shm", 1 << 30),
    (5, "shm", 1 << 30),
]
COMPARED = (1, 2, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_a_fresh_vllm(
    kind: str, spawn: Callable[..., Any], fresh: Callable[..., Any], tmp_path: Path
) -> None:
    # one of the four in another process than its actor
    engine = "async" if kind == "qwen3" else "offline"
    worker = spawn(kind, 0, engine=engine)
    before = ask(worker)
    controller, settings = None, None
    for version, backend, bucket in ROUNDS:
        if settings != (backend, bucket):
            if controller is not None:
                controller.shutdown()
            config = WeightTransferConfig(backend=backend, bucket_size_bytes=bucket)
            controller, settings = Controller([worker], config), (backend, bucket)
        assert controller is not None
        model = build(kind, version)
        report = controller.sync_weights(model)
        row = report.workers[0]
        assert (report.version, row.version, row.state) == (version, version, "READY")
        assert (row.backend, row.verified, row.complete) == (backend, "delivered", True)
        if version in COMPARED:
            now = ask(worker)
            assert now == fresh(save(model, tmp_path / str(version)))
            assert now != before  # also: the prompts' cached prefixes were of the version before
            before = now
    assert ray.get(worker.vllm_weight_version.remote(), timeout=20) == "5"
    assert controller is not None
    controller.shutdown()
    ray.kill(worker)


def test_two_ranks_of_one_vllm(
    spawn: Callable[..., Any], fresh: Callable[..., Any], tmp_path: Path
) -> None:
    """Tensor parallelism on the CPU: each rank receives all of it and keeps its shard."""
    bind = {"runtime_env": {"env_vars": {"VLLM_CPU_OMP_THREADS_BIND": "0|0"}}}
    worker = spawn("qwen2", 0, engine="async", tensor_parallel_size=2, options=bind)
    before = ask(worker)
    controller = Controller([worker], WeightTransferConfig(backend="gloo"))
    model = build("qwen2", 1)
    row = controller.sync_weights(model).workers[0]
    assert (row.state, row.version, row.complete) == ("READY", 1, True)
    now = ask(worker)
    whole = fresh(save(model, tmp_path / "1"))
    # two ranks add in another order than one, so the last bits differ
    assert [tokens for tokens, _ in now] == [tokens for tokens, _ in whole]
    for (_, mine), (_, theirs) in zip(now, whole, strict=True):
        assert mine == pytest.approx(theirs, abs=0.05)
    assert now != before
    controller.shutdown()
    ray.kill(worker)
