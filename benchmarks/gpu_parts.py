"""The checks of `gpu_check` that pass or fail; speeds are in `gpu_speed.py`. Each returns a note."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from benchmarks.gpu_stage import (
    Failed,
    NotRun,
    Stage,
    Weights,
    build_slow,
    build_weights,
    build_zoo,
    compare,
    held,
    in_use,
    layer_shapes,
    placed,
    poisoned,
    tensor_device,
    zoo,
)
from rayxfer import BackendUnavailable, PartialUpdate, WeightTransferConfig
from rayxfer.errors import RayxferError, TransferError
from rayxfer.gpu_digest import WORDS
from rayxfer.source import named_tensors
from rayxfer.testing import LocalController, ProcessWorker, check_engine

_MIB = 1 << 20


def device_calls(stage: Stage) -> str:
    """Each call of the device once, so that what is wrong is named first."""
    device = stage.device
    with device.use():
        ours = device.allocate(1 << 20)
        ours.fill_(7)
        block = device.block_of(ours)
        if block is None or not device.lives(block):
            raise Failed("memory of our own cannot be exported")
        handle = device.export(block)
        opened = device.open(handle, 1 << 20)  # our own: looked at, not mapped
        if opened.memory[-1].item() != 7:
            raise Failed("a block that was opened holds other bytes")
        device.close(opened)
        event = device.ready()
        event.record()
        shared = bool(event.handle)
        mark = device.mark()
        device.settle()
        if not mark.done():
            raise Failed("a mark was not passed after the device had settled")
        device.free(ours)
        if device.lives(block):
            raise Failed("a block that was freed is said to live")
        model = stage.place(torch.nn.Linear(512, 512))
        direct = device.block_of(model.weight) is not None
    return f"events {'are' if shared else 'cannot be'} shared; torch's memory " + (
        "can be exported" if direct else "CANNOT be exported: everything will be staged"
    )


def digest_on_device(stage: Stage) -> str:
    """The GPU's digest of every dtype and layout is that of the same bytes by a CPU."""
    model = stage.place(build_zoo(stage.on))
    tensors = dict(named_tensors(model))
    # more than one chunk, no whole number of words, and memory that does not begin at one
    long = torch.arange((20 << 20) + 3, device=stage.device.torch_device).to(torch.uint8)
    tensors |= {"long": long, "odd": long[1:], "turned": long[: 20 << 20].view(4096, -1).t()}
    here = WORDS.many(tensors.values())
    there = WORDS.many([tensor.detach().cpu() for tensor in tensors.values()])
    wrong = [name for name, a, b in zip(tensors, here, there, strict=True) if a != b]
    if wrong:
        raise Failed(f"{len(wrong)} digests differ from the CPU's, the first is of {wrong[0]!r}")
    before = WORDS.of(long)
    long[-2] ^= 64
    if WORDS.of(long) == before:
        raise Failed("a bit that flips makes no difference")
    return f"{len(tensors)} tensors"


def _kit(stage: Stage, backend: str, **settings: Any) -> str:
    extra = {key: settings.pop(key) for key in ("workers", "place_receivers") if key in settings}
    config = WeightTransferConfig(stall_timeout_s=8.0, **settings)
    report = check_engine(backend, config=config, place=stage.place, **extra)
    return f"{len(report.passed)} checks, two workers in this process"


def kit_direct(stage: Stage) -> str:
    """The conformance kit; in one process a handle is looked up, not mapped."""
    return _kit(stage, stage.ipc)


def kit_staged(stage: Stage) -> str:
    return _kit(stage, stage.ipc, init_info={"form": "staged"})


def kit_nccl(stage: Stage) -> str:
    """With two GPUs the kit; with one, what one can show."""
    if stage.on == "double":
        return _kit(stage, stage.nccl)
    if torch.cuda.device_count() > 1:
        note = _kit(stage, "nccl", workers=1, place_receivers=lambda model: placed(model, "cuda:1"))
        return note.replace("two workers", "one worker on a second GPU")
    raise NotRun("needs two GPUs, since NCCL takes each once; see nccl communicator")


def nccl_alone(stage: Stage) -> str:
    """A communicator: made, used with itself, aborted; and one whose peer never comes."""
    if stage.on == "double":
        raise NotRun("needs a GPU")
    from rayxfer.engines.nccl_library import nccl_library

    library, device = nccl_library(), stage.device
    with device.use():
        lane = device.lane()
        start = time.monotonic()
        comm = library.join(library.unique_id(), 0, 1, 30.0, lambda: False)
        joined = time.monotonic() - start
        buffer = torch.arange(1 << 20, device=device.torch_device).to(torch.uint8)
        before = buffer.clone()
        lane.follow()
        comm.broadcast(buffer, lane)
        while not comm.idle():
            time.sleep(0.001)
        mark = lane.mark()
        until = time.monotonic() + 10
        while not mark.done():
            if time.monotonic() > until:
                raise Failed("a broadcast to itself did not end within 10 s")
            time.sleep(0.001)
        if not torch.equal(buffer, before):
            raise Failed("a broadcast to itself changed the bytes")
        start = time.monotonic()
        comm.abort()
        comm.abort()
        aborted = time.monotonic() - start
        start = time.monotonic()
        gave_up = threading.Event()
        threading.Timer(1.0, gave_up.set).start()
        try:
            library.join(library.unique_id(), 0, 2, 30.0, gave_up.is_set)
        except TransferError:
            pass
        else:
            raise Failed("a communicator of two came about with one member")
        alone = time.monotonic() - start
    if aborted > 5 or alone > 6:
        raise Failed(f"abort took {aborted:.1f} s, leaving a connect {alone - 1:.1f} s")
    version = ".".join(map(str, library.version))
    return f"NCCL {version}: joined {joined:.2f} s, abort {aborted:.2f} s, left {alone - 1:.2f} s"


def whole_zoo(stage: Stage) -> str:
    """Every dtype and stride, through real handles, into two other processes."""
    model = stage.place(zoo())
    workers = [stage.worker(build_zoo) for _ in range(2)]
    count = 0
    for form in ("auto", "staged"):
        for bucket in (None, 1, 4096):
            config = WeightTransferConfig(
                backend=stage.ipc, bucket_size_bytes=bucket, init_info={"form": form}
            )
            with LocalController(workers, config) as controller:
                for worker in workers:
                    worker.run(poisoned)
                controller.sync_weights(model)
                for worker in workers:
                    compare(model, worker.run(held))
                    count += 1
    stage.close()
    return f"{len(named_tensors(model))} tensors, {count} transfers, bytes compared"


def endurance(stage: Stage) -> str:
    """Device memory, handles, host memory and descriptors, flat from the 10th round on."""
    shapes = layer_shapes(min(stage.size_bytes, 256 * _MIB))
    model = stage.place(Weights(shapes, tensor_device(stage.on), seed=1))
    workers = [stage.worker(build_weights, shapes) for _ in range(2)]
    config = WeightTransferConfig(backend=stage.ipc, bucket_size_bytes=32 * _MIB, verify="off")
    samples: list[tuple[int, list[dict[str, int]]]] = []
    with LocalController(workers, config) as controller:
        for number in range(1, stage.rounds + 1):
            with torch.no_grad():
                next(model.parameters()).add_(1.0)
            controller.sync_weights(model)
            if number in (10, stage.rounds):
                stage.synchronize()
                everyone = [in_use(model, stage.on)]
                everyone += [worker.run(in_use, stage.on) for worker in workers]
                samples.append((stage.free_bytes(), everyone))
        for worker in workers:
            compare(model, worker.run(held))
    stage.close()
    (free_a, first), (free_b, last) = samples
    slack = {"host MiB": 48, "descriptors": 2, "threads": 4}
    for who, before, after in zip(("trainer", "worker 0", "worker 1"), first, last, strict=True):
        for key, value in after.items():
            if value > before[key] + slack.get(key, 0):
                raise Failed(f"{key} of {who} grew from {before[key]} to {value}")
    if free_a - free_b > 32 * _MIB:
        raise Failed(f"the GPU lost {(free_a - free_b) >> 20} MiB over {stage.rounds - 10} rounds")
    return f"{stage.rounds} rounds: handles open per worker {last[1]['handles open']}, all flat"


def _strike(victim: ProcessWorker) -> None:
    """Kill a worker as soon as it has loaded anything."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        if victim.call("snapshot", {}).result(timeout=30)["num_bytes"] > 0:
            os.kill(victim.pid, signal.SIGKILL)
            return
        time.sleep(0.01)


def killed_nccl(stage: Stage) -> str:
    """NCCL's peer killed in the middle of a broadcast: the sender is free in seconds, and a
    communicator with the worker's successor works."""
    if stage.on == "double" or torch.cuda.device_count() < 2:
        raise NotRun("needs two GPUs")
    shapes = layer_shapes(min(stage.size_bytes, 512 * _MIB))
    model = stage.place(Weights(shapes, "cuda", seed=1))
    victim = stage.worker(build_slow, shapes, on="cuda:1")
    config = WeightTransferConfig(
        backend="nccl", bucket_size_bytes=8 * _MIB, stall_timeout_s=5.0, verify="off"
    )
    with LocalController([victim], config) as controller:
        threading.Thread(target=_strike, args=(victim,), daemon=True).start()
        start = time.monotonic()
        try:
            controller.sync_weights(model)
        except RayxferError as error:
            said = type(error).__name__
        else:
            raise Failed("the worker was not killed in the middle")
        spent = time.monotonic() - start
    if spent > 15:
        raise Failed(f"the sender was held for {spent:.1f} s")
    successor = stage.worker(build_weights, shapes, on="cuda:1")
    with LocalController([successor], config) as controller:
        controller.sync_weights(model)
        compare(model, successor.run(held))
    return f"{said} after {spent:.1f} s; the successor has the weights"


def killed(stage: Stage) -> str:
    """A worker killed in the middle: the other commits in the same call, and the next call is clean."""
    shapes = layer_shapes(min(stage.size_bytes, 64 * _MIB))
    model = stage.place(Weights(shapes, tensor_device(stage.on), seed=1))
    good, victim = stage.worker(build_weights, shapes), stage.worker(build_slow, shapes)
    config = WeightTransferConfig(
        backend=stage.ipc, bucket_size_bytes=1 * _MIB, stall_timeout_s=5.0, verify="off"
    )

    with LocalController([good, victim], config) as controller:
        threading.Thread(target=_strike, args=(victim,), daemon=True).start()
        start = time.monotonic()
        try:
            controller.sync_weights(model)
        except PartialUpdate as error:
            states = [str(row.state) for row in error.report.workers]
        else:
            raise Failed("the worker was not killed in the middle")
        spent = time.monotonic() - start
        if states != ["READY", "LOST"]:
            raise Failed(f"workers are {states}")
        compare(model, good.run(held))
    stage.close()
    if spent > 15:
        raise Failed(f"the survivor waited {spent:.1f} s")
    return f"the survivor had the version after {spent:.1f} s"


def refusals(stage: Stage) -> str:
    """What cannot work says so, with the reason."""
    if stage.on == "double":
        raise NotRun("needs a GPU")
    model = torch.nn.Linear(4, 4)
    try:
        with LocalController([model], WeightTransferConfig(backend="ipc")) as controller:
            controller.sync_weights(stage.place(torch.nn.Linear(4, 4)))
    except (BackendUnavailable, RayxferError) as error:
        if "not on a GPU" not in str(error):
            raise Failed(f"weights on the CPU were refused with {error}") from error
    else:
        raise Failed("weights on the CPU were taken")
    return "weights on the CPU are refused by name"


CHECKS = (
    ("device calls", device_calls),
    ("digest", digest_on_device),
    ("kit: ipc, direct", kit_direct),
    ("kit: ipc, staged", kit_staged),
    ("kit: nccl", kit_nccl),
    ("nccl communicator", nccl_alone),
    ("refusals", refusals),
    ("zoo, other processes", whole_zoo),
    ("endurance", endurance),
    ("killed in the middle", killed),
    ("killed, nccl", killed_nccl),
)
