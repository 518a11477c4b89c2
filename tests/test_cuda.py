"""`ipc` and `nccl` on real GPUs. Skipped, with the reason, where there are none; the longer checks and
the speeds are in `benchmarks/gpu_check.py`."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import gpu_parts
from benchmarks.gpu_stage import (
    GIB,
    NotRun,
    Stage,
    build_weights,
    compare,
    held,
    layer_shapes,
    placed,
)
from rayxfer import WeightTransferConfig
from rayxfer.gpu_digest import WORDS
from rayxfer.gpus import canonical_uuid, gpus, visible_uuids
from rayxfer.testing import LocalController, check_engine
from rayxfer.testing.doubles import double_device

pytestmark = pytest.mark.gpu

two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices, and NCCL takes each once"
)


@pytest.fixture
def stage() -> Iterator[Stage]:
    made = Stage("cuda", GIB // 4, (200, 4096), rounds=20)
    yield made
    made.close()


PARTS = [
    gpu_parts.device_calls,
    gpu_parts.nccl_alone,
    gpu_parts.refusals,
    gpu_parts.whole_zoo,
    gpu_parts.endurance,
    gpu_parts.killed,
    gpu_parts.killed_nccl,
]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_a_part_of_gpu_check(part: Any, stage: Stage) -> None:
    try:
        assert part(stage)
    except NotRun as why:
        pytest.skip(str(why))


@pytest.mark.parametrize("form", ["auto", "staged"])
def test_ipc_conforms(form: str) -> None:
    config = WeightTransferConfig(stall_timeout_s=8.0, init_info={"form": form})
    report = check_engine("ipc", config=config, place=lambda model: placed(model, "cuda"))
    assert not report.failed


@two_gpus
def test_nccl_conforms_between_two_gpus() -> None:
    report = check_engine(
        "nccl",
        config=WeightTransferConfig(stall_timeout_s=8.0),
        workers=1,
        place=lambda model: placed(model, "cuda:0"),
        place_receivers=lambda model: placed(model, "cuda:1"),
    )
    assert not report.failed


def test_auto_takes_ipc_on_one_gpu(stage: Stage) -> None:
    shapes = layer_shapes(8 << 20)
    model = build_weights(shapes, "cuda")
    worker = stage.worker(build_weights, shapes)
    with LocalController([worker], WeightTransferConfig()) as controller:
        report = controller.sync_weights(model)
        assert report.workers[0].backend == "ipc"
        assert report.workers[0].verified == "loaded"
        compare(model, worker.run(held))


def test_what_the_caller_has_queued_on_its_own_stream_is_sent(stage: Stage) -> None:
    shapes = layer_shapes(8 << 20)
    model, receiver = build_weights(shapes, "cuda"), build_weights(shapes, "cuda")
    config = WeightTransferConfig(backend="ipc", verify="off")
    with (
        LocalController([receiver], config) as controller,
        torch.no_grad(),
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        for _ in range(5):
            torch.cuda._sleep(200_000_000)
            for parameter in model.parameters():
                parameter.add_(1.0)
            controller.sync_weights(model)
            compare(model, held(receiver))


def test_uuids_agree_with_the_drivers_under_a_mask() -> None:
    known = gpus()
    if not known:
        pytest.skip("NVML tells nothing here")
    last = len([gpu for gpu in known if not gpu.mig_of]) - 1
    code = "import torch; print(torch.cuda.get_device_properties(0).uuid)"
    for mask in (str(last), f"GPU-{next(g.uuid for g in known if g.index == last)}"):
        environ = {"CUDA_VISIBLE_DEVICES": mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        assert visible_uuids(environ, known) == [canonical_uuid(done.stdout)]


def test_a_gpu_digests_what_a_cpu_digests() -> None:
    data = torch.arange((20 << 20) + 3).to(torch.uint8)
    for tensor in (data, data[1:], data[: 20 << 20].view(4096, -1).t(), data[:6].view(torch.int16)):
        assert WORDS.of(tensor.cuda()) == WORDS.of(tensor)
    assert WORDS.of(data.cuda()[1:]) == WORDS.of(data[1:])


def test_the_double_and_the_device_agree_on_what_may_be_asked() -> None:
    """The double must refuse what CUDA refuses, or it tests nothing."""
    from rayxfer.engines.cuda import cuda_device

    elsewhere = torch.zeros(4)
    for device in (cuda_device(""), double_device("")):
        ours = device.allocate(1000)
        block = device.block_of(ours)
        assert block is not None
        assert block.num_bytes >= 1000
        assert device.block_of(elsewhere) is None
        assert device.lives(block)
        device.settle()
        device.free(ours)
        until = time.monotonic() + 5
        while device.lives(block) and time.monotonic() < until:
            time.sleep(0.01)
        assert not device.lives(block)
