"""What the drills and the soak share: a model whose bytes tell what it holds, actors, kills, waits."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch

from actors import InferenceActor, TrainerActor
from benchmarks import cluster

VOCABULARY = 9973
"""Tokens of `Stamped.forward`; a prime, so that mixed stamps hardly ever look whole."""

ray_errors = (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError)
"""What a call to an actor that was killed a moment ago may raise."""


class Stamped(torch.nn.Module):
    """`tensors` parameters whose bytes are a function of one integer each, their stamp.

    `forward` turns the stamps into a token: a model that is half old and half new says another one.
    """

    def __init__(self, tensors: int, elements: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(
            torch.nn.Parameter(torch.zeros(elements), requires_grad=False) for _ in range(tensors)
        )
        self.broken_loader_at = -1
        stamp(self, [0] * tensors)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*ids.shape, VOCABULARY)
        logits[..., token(stamps_of(self))] = 1.0
        return logits


def stamp(model: Stamped, stamps: Sequence[int]) -> None:
    """Give every tensor the bytes of its stamp. All bit patterns occur."""
    with torch.no_grad():
        for index, (part, value) in enumerate(zip(model.parts, stamps, strict=True)):
            bits = part.view(torch.int32)
            torch.arange(bits.numel(), out=bits)
            bits.mul_(747796405).add_(index * 7919 + value * 40503)
            bits[0] = value


def stamps_of(model: Stamped) -> list[int]:
    return [int(part.view(torch.int32)[0]) for part in model.parts]


def token(stamps: Sequence[int]) -> int:
    return sum((index + 1) * value for index, value in enumerate(stamps)) % VOCABULARY


def fingerprint(model: torch.nn.Module) -> str:
    """Of all bytes of all parameters; shares no code with rayxfer's digests."""
    found = hashlib.blake2b(digest_size=16)
    for name, part in model.named_parameters():
        found.update(name.encode())
        found.update(part.detach().view(torch.uint8).numpy().data)
    return found.hexdigest()


def spawn_worker(build: Callable[[], Any], load_weights: Any = None) -> Any:
    actor = InferenceActor.options(num_cpus=0, max_restarts=-1)
    return actor.remote(build, load_weights=load_weights)


def spawn_trainer(build: Callable[[], Any]) -> Any:
    return TrainerActor.options(num_cpus=0).remote(build)


def pid_of(actor: Any, timeout_s: float = 30.0) -> int:
    """The process of an actor; waits while Ray restarts it."""
    found: int = patiently(lambda: actor.__ray_call__.remote(lambda self: os.getpid()), timeout_s)
    return found


def patiently(call: Callable[[], Any], timeout_s: float) -> Any:
    """`ray.get(call())`, again while the actor is being restarted."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return ray.get(call(), timeout=max(0.1, deadline - time.monotonic()))
        except ray_errors:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def state_of(worker: Any) -> tuple[str, int]:
    """State and version as the worker itself says; ("GONE", -1) where it does not answer."""
    try:
        state, version = ray.get([worker.state.remote(), worker.weight_version.remote()], timeout=5)
    except ray_errors:
        return "GONE", -1
    return state, version


def fingerprint_in(worker: Any, timeout_s: float = 30.0) -> str:
    """`fingerprint`, computed inside the worker ("GONE" where it does not answer)."""
    try:
        found: str = ray.get(worker.apply.remote(fingerprint), timeout=timeout_s)
    except ray_errors:
        return "GONE"
    return found


def until(condition: Callable[[], bool], timeout_s: float, step_s: float = 0.02) -> float | None:
    """Seconds until the condition held, or None if it did not within `timeout_s`."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > timeout_s:
            return None
        time.sleep(step_s)
    return time.monotonic() - start


def send_signal(pid: int, number: int = signal.SIGKILL) -> bool:
    """False if the process is gone already. Only ever for processes of one's own actors."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True


class Later:
    """A signal, sent by a thread after `delay_s`. `at` is when it was sent (monotonic), or None."""

    def __init__(self, pid: int, delay_s: float, number: int = signal.SIGKILL) -> None:
        self.at: float | None = None
        self._pid, self._number = pid, number
        self._timer = threading.Timer(delay_s, self._send)
        self._timer.daemon = True
        self._timer.start()

    def _send(self) -> None:
        if send_signal(self._pid, self._number):
            self.at = time.monotonic()

    def wait(self) -> float:
        """Let it happen; when it did."""
        self._timer.join()
        return self.at if self.at is not None else time.monotonic()


def end_actors(actors: Sequence[Any]) -> None:
    for actor in actors:
        with contextlib.suppress(*ray_errors, ValueError):
            ray.kill(actor)


def start_ray(object_store_bytes: int = 512 << 20) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster.start(object_store_bytes)
