"""Where `gpu_check` runs: on a GPU, or (to show that the script itself works) on the doubles.

Ray-free. What runs in worker processes is here too, importable by name.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rayxfer import WeightTransferEngineFactory
from rayxfer.base import SessionPlan
from rayxfer.binding import Binding
from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.copying import copy_all
from rayxfer.digest import digest
from rayxfer.engines.device import Device
from rayxfer.source import named_tensors
from rayxfer.testing import ProcessWorker, poison, raw_bytes
from rayxfer.testing.conformance import _Zoo
from rayxfer.testing.tensors import relocate
from rayxfer.topology import local_facts

GIB = 1 << 30


class Failed(Exception):
    """A check did not find what it expects."""


class NotRun(Exception):
    """A check needs what this machine does not have. Neither passed nor failed."""


@dataclass
class Stage:
    """What the checks need of the machine.

    Attributes:
        on: "cuda", or "double".
        size_bytes: of the large model.
        small: (how many, bytes of each) of the small tensors.
        rounds: of the endurance check.
    """

    on: str
    size_bytes: int
    small: tuple[int, int]
    rounds: int = 50
    _workers: list[ProcessWorker] = field(default_factory=list)

    @property
    def ipc(self) -> str:
        return "ipc" if self.on == "cuda" else _double("ipc")

    @property
    def nccl(self) -> str:
        return "nccl" if self.on == "cuda" else _double("nccl")

    @property
    def device(self) -> Device:
        return device_of(self.on)

    def place(self, model: Any) -> Any:
        """Move a model to where the trainer's weights are."""
        return placed(model, self.on)

    def worker(
        self, build: Callable[..., Any], *arguments: Any, on: str | None = None
    ) -> ProcessWorker:
        made = ProcessWorker(build, *arguments, on or self.on)
        self._workers.append(made)
        return made

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
        self._workers = []

    def synchronize(self) -> None:
        if self.on == "cuda":
            torch.cuda.synchronize()

    def free_bytes(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.on == "cuda" else 0


def _double(name: str) -> str:
    from rayxfer.testing.double_nccl import DoubleNCCLEngine
    from rayxfer.testing.doubles import DoubleIPCEngine

    registered = f"{name}-double"
    if registered not in WeightTransferEngineFactory.registered():
        cls = DoubleIPCEngine if name == "ipc" else DoubleNCCLEngine
        WeightTransferEngineFactory.register_engine(registered, cls)
    return registered


def device_of(on: str) -> Device:
    if on == "double":
        from rayxfer.testing.doubles import double_device

        return double_device("")
    from rayxfer.engines.cuda import cuda_device

    return cuda_device("")


def placed(model: Any, on: str) -> Any:
    """`on`: "cuda", "cuda:1", or "double" (then only the trainer's models lie on it)."""
    if on == "double":
        from rayxfer.testing.doubles import double_device

        return double_device("").place(model)
    return relocate(model, lambda flat: flat.to(on))


# ---- models ---------------------------------------------------------------------------------------


class Weights(torch.nn.Module):
    """Parameters of the given shapes and nothing else."""

    def __init__(self, shapes: list[tuple[str, tuple[int, ...]]], device: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator(device=device).manual_seed(seed)
        for name, shape in shapes:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device=device)
            tensor.normal_(generator=generator)
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


def layer_shapes(total_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    """A decoder's layers (grouped-query attention, gated feed-forward) up to about `total_bytes` of
    bf16; narrower where that is little."""
    hidden = 4096 if total_bytes >= 4 * GIB else 1024 if total_bytes >= GIB // 4 else 64
    shapes: list[tuple[str, tuple[int, ...]]] = [("embed", (32 * hidden, hidden))]
    total = 2 * 32 * hidden * hidden
    layer = 0
    while total < total_bytes:
        parts = {
            "q": (hidden, hidden),
            "k": (hidden // 4, hidden),
            "v": (hidden // 4, hidden),
            "o": (hidden, hidden),
            "gate": (hidden * 7 // 2, hidden),
            "up": (hidden * 7 // 2, hidden),
            "down": (hidden, hidden * 7 // 2),
            "norm_1": (hidden,),
            "norm_2": (hidden,),
        }
        shapes += [(f"layer_{layer}_{name}", shape) for name, shape in parts.items()]
        total += 2 * sum(torch.Size(shape).numel() for shape in parts.values())
        layer += 1
    return shapes


def small_shapes(count: int, num_bytes: int) -> list[tuple[str, tuple[int, ...]]]:
    return [(f"small_{index}", (num_bytes // 2,)) for index in range(count)]


def tensor_device(on: str) -> str:
    return "cpu" if on == "double" else on


def build_weights(shapes: list[tuple[str, tuple[int, ...]]], on: str) -> torch.nn.Module:
    """A worker's model: of the right shapes, with other values."""
    return Weights(shapes, tensor_device(on), seed=99)


def build_zoo(on: str) -> torch.nn.Module:
    """Every dtype and odd stride of the conformance kit, poisoned, views become plain memory."""
    model = _Zoo()
    for owner in model.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = torch.empty_like(
                    buffer, memory_format=torch.contiguous_format
                )
    relocate(model, lambda flat: flat.to(tensor_device(on)))
    poison(model)
    return model


def zoo() -> torch.nn.Module:
    """The trainer's, on the CPU."""
    return _Zoo()


def build_slow(shapes: list[tuple[str, tuple[int, ...]]], on: str) -> Binding:
    """A worker whose loader takes its time: to be caught in the middle."""
    model = Weights(shapes, tensor_device(on), seed=99)

    def load(module: Any, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        time.sleep(0.05)
        targets = dict(module.named_parameters())
        for name, tensor in weights:
            targets[name].copy_(tensor)
        return {name for name, _ in weights}

    return Binding(model, load_weights=load)


def compare(model: torch.nn.Module, found: Mapping[str, bytes | int]) -> None:
    """Fail unless a worker holds what the trainer has, bit for bit (or digest for digest)."""
    tensors = named_tensors(model)
    for name, data in found.items():
        ours = raw_bytes(tensors[name]) if isinstance(data, bytes) else digest(tensors[name])
        if data != ours:
            raise Failed(f"{name} holds other bytes at a worker")
    if not found:
        raise Failed("nothing was compared")


# ---- in the worker's process -----------------------------------------------------------------------


def held(model: torch.nn.Module, names: set[str] | None = None) -> dict[str, bytes]:
    tensors = named_tensors(model)
    return {name: raw_bytes(t) for name, t in tensors.items() if names is None or name in names}


def digests(model: torch.nn.Module, names: set[str]) -> dict[str, int]:
    """As `held`, where bytes would be too many to send."""
    tensors = named_tensors(model)
    return {name: digest(tensors[name]) for name in names}


def poisoned(model: torch.nn.Module) -> None:
    poison(model)


def in_use(model: torch.nn.Module, on: str) -> dict[str, int]:
    """What must be flat over rounds, in this process."""
    counts = device_of(on).counts
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "host MiB": resident >> 20,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "exports": counts.exports,
        "handles open": counts.opens - counts.closes,
        "reserved MiB": torch.cuda.memory_reserved() >> 20 if on == "cuda" else 0,
    }


def receive_rounds(
    model: torch.nn.Module,
    backend: str,
    on: str,
    init_info: dict[str, Any],
    update_info: dict[str, Any],
    rounds: int,
) -> None:
    """The engine alone: into the model's parameters, without session and proof."""
    if on == "double":
        _double("ipc")
    config = WeightTransferConfig(backend=backend)
    engine = WeightTransferEngineFactory.get_engine_class(backend)(config, ParallelConfig())
    targets = dict(model.named_parameters())

    class Load:
        copies_only = True

        def __call__(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            copy_all([targets[n] for n, _ in weights], [t for _, t in weights])

    engine.init_transfer_engine(engine.parse_init_info(init_info))
    typed = engine.parse_update_info(update_info)
    load: Any = Load()
    try:
        with torch.no_grad():
            for _ in range(rounds):
                engine.receive_weights(typed, load)
    finally:
        engine.shutdown()


def vllm_receive(model: torch.nn.Module, update_info: dict[str, Any]) -> None:
    """vLLM's own engine, its receiving half."""
    from vllm.distributed.weight_transfer import ipc_engine

    engine = object.__new__(ipc_engine.IPCWeightTransferEngine)
    targets = dict(model.named_parameters())

    def load(weights: list[tuple[str, torch.Tensor]]) -> None:
        with torch.no_grad():
            for name, tensor in weights:
                targets[name].copy_(tensor)

    engine.receive_weights(ipc_engine.IPCWeightTransferUpdateInfo(**update_info), load)
    torch.cuda.synchronize()


def plan_for(stage: Stage, facts: Any, bucket_size_bytes: int, **init_info: Any) -> SessionPlan:
    """A session of this process with one worker, made without a controller."""
    device = None if stage.on == "double" else stage.device.torch_device
    return SessionPlan(
        session_id="gpu-check",
        token=os.urandom(16).hex(),
        config=WeightTransferConfig(backend=stage.ipc, init_info=init_info),
        bucket_size_bytes=bucket_size_bytes,
        sender=local_facts(device),
        workers=(facts,),
        deadline_s=30.0,
    )
