"""What a user would pick instead, on the same work: through Ray's object store, or through a file.

Each peer says which documentation it follows and which setting was its best. All peers of a stage
share their receivers (one model per worker) and, where this process cannot send, one sending actor.
"""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from typing import Any

import ray
import torch

from benchmarks.contenders import Contender, Spec, Stage, Unavailable
from benchmarks.shapes import Shapes
from benchmarks.weights import Receiver, make_weights

PEERS = {
    "memcpy": "benchmarks.contenders:Memcpy",
    "ray_put": "benchmarks.peers:RayPut",
    "ray_put_zero_copy": "benchmarks.peers:RayPut",
    "safetensors_tmpfs": "benchmarks.peers:SafetensorsTmpfs",
    "gloo_broadcast": "benchmarks.peers_gloo:GlooBroadcast",
    "ray_direct_gloo": "benchmarks.peers_gloo:RayDirectGloo",
    "torchrl_ray": "benchmarks.peers_torchrl:TorchRLRay",
}
"""Name → its class. A module is only imported when its peer is asked for."""

MEMCPY = "memcpy"
"""No peer, but what all are measured by: "the best peer" is never this."""

_TMPFS = "/dev/shm"


OVER_GLOO = ("gloo_broadcast", "ray_direct_gloo")
OWN_SENDER = ("ray_put_zero_copy", *OVER_GLOO)
"""Peers that send from an actor, which holds a copy of the weights."""


def peer_class(name: str) -> type[Contender]:
    module, attribute = PEERS[name].split(":")
    found: type[Contender] = getattr(importlib.import_module(module), attribute)
    return found


class PeerWorker(Receiver):
    """Receives in any of the peers' ways. Methods that take `fn` run a peer's own code here."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        self.kept: dict[str, Any] = {}

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(self, *args)`."""
        return fn(self, *args)

    def copy_in(self, state: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])

    def take(self, box: list[ray.ObjectRef]) -> None:
        """What a hand-written sync does: get the state dict and copy it in."""
        self.copy_in(ray.get(box[0]))

    def take_file(self, path: str) -> None:
        from safetensors.torch import load_file

        self.copy_in(load_file(path))

    def take_tensors(self, tensors: list[torch.Tensor]) -> None:
        """In the model's own order."""
        with torch.no_grad():
            for parameter, tensor in zip(self.model.parameters(), tensors, strict=True):
                parameter.copy_(tensor)

    def _receive_weights_scheme(self) -> None:
        """The name that TorchRL's Ray transport calls."""
        self.kept["torchrl"].receive()


class PeerSender:
    """Sends from a process of its own, for peers that need an actor or a setting of the process."""

    def __init__(self, shapes: Shapes) -> None:
        self.weights = make_weights(shapes)
        self.kept: dict[str, Any] = {}

    def pid(self) -> int:
        return os.getpid()

    def call(self, fn: Callable[..., Any], *args: Any) -> Any:
        """`fn(self, *args)`."""
        return fn(self, *args)

    def put(self, workers: list[Any]) -> float:
        return put_and_take(self.weights, workers)


class GlooSender(PeerSender):
    """For both peers over gloo: a process has one default process group, and Ray Direct Transport
    takes the one that is there. Not for `ray.put`: Ray Direct Transport changes how its process
    serialises every tensor from the first call on (`ray_put_zero_copy` took three times as long)."""

    @ray.method(tensor_transport="gloo")
    def tensors(self) -> list[torch.Tensor]:
        return list(self.weights.values())


def peer_workers(stage: Stage, count: int) -> list[Any]:
    """The stage's receivers for peers: the first `count`, made if there are not enough."""
    workers = stage.peers.setdefault("workers", [])
    # Ray Direct Transport needs the flag in its receivers; the other peers do not notice it.
    actor_class = ray.remote(num_cpus=0, enable_tensor_transport=True)(PeerWorker)
    while len(workers) < count:
        workers.append(actor_class.remote(stage.shapes))
    return workers[:count]


def peer_sender(stage: Stage, way: str) -> Any:
    """The actor that sends for `way`. RAY_ENABLE_ZERO_COPY_TORCH_TENSORS is read at a process's
    start."""
    kind = GlooSender if way in OVER_GLOO else PeerSender
    senders = stage.peers.setdefault(kind.__name__, [])
    if not senders:
        env = {
            "env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"} if kind is PeerSender else {}
        }
        senders.append(ray.remote(num_cpus=0, runtime_env=env)(kind).remote(stage.shapes))
    return senders[0]


def put_and_take(weights: dict[str, torch.Tensor], workers: list[Any]) -> float:
    """Seconds from the put until every worker holds the weights."""
    start = time.perf_counter()
    ref = ray.put(weights)
    ray.get([worker.take.remote([ref]) for worker in workers])
    return time.perf_counter() - start


class RayPut(Contender):
    """One `ray.put(state_dict)` of torch tensors; each worker gets it and copies it in.

    Documentation: docs.ray.io, Ray 2.60, "Objects" (put once, pass the reference) and, for
    `ray_put_zero_copy`, "Serialization" (zero-copy of torch tensors, experimental): the
    environment variable RAY_ENABLE_ZERO_COPY_TORCH_TENSORS=1 in the sending process. Best setting:
    one object for the whole state dict, which Ray shares between the workers of a host.
    """

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        self.workers = peer_workers(stage, spec.workers)
        self.sender = peer_sender(stage, spec.way) if spec.way in OWN_SENDER else None

    def run(self) -> float:
        if self.sender is None:
            return put_and_take(self.stage.weights, self.workers)
        seconds: float = ray.get(self.sender.put.remote(self.workers))
        return seconds


class SafetensorsTmpfs(Contender):
    """`save_file` to a file in memory, `load_file` in each worker, and a copy into the parameters.

    Documentation: huggingface.co/docs/safetensors, 0.8, "Torch API". Best setting: tmpfs instead
    of a disk, and `load_file` to the CPU, which maps the file instead of reading it. The file is
    removed off the clock (`save_file` would cut it to nothing first, so that saves it time).
    """

    imports = ("safetensors.torch",)

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        try:
            import safetensors.torch
        except ImportError as error:
            raise Unavailable(f"safetensors is not installed ({error})") from error
        self._save = safetensors.torch.save_file
        if not os.access(_TMPFS, os.W_OK):
            raise Unavailable(f"{_TMPFS} is not writable")
        self.workers = peer_workers(stage, spec.workers)
        self._folder = tempfile.mkdtemp(prefix="rayxfer-benchmark-", dir=_TMPFS)

    def run(self) -> float:
        path = os.path.join(self._folder, "model.safetensors")
        start = time.perf_counter()
        self._save(self.stage.weights, path)
        ray.get([worker.take_file.remote(path) for worker in self.workers])
        seconds = time.perf_counter() - start
        os.remove(path)
        return seconds

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
