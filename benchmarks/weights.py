"""The weights that travel, and the actors that hold them: what every contender of a run shares."""

from __future__ import annotations

import time
from typing import Any

import ray
import torch

from rayxfer import WorkerMixin

POISON = 0xA5
_SEED = 20

Shapes = tuple[int, int]
"""Number of tensors, elements of each."""


def shapes_of(size_bytes: int, tensors: int) -> Shapes:
    """`tensors` bf16 tensors of equal size, together at most `size_bytes`."""
    return tensors, max(1, size_bytes // tensors // torch.bfloat16.itemsize)


def num_bytes(shapes: Shapes) -> int:
    return shapes[0] * shapes[1] * torch.bfloat16.itemsize


def make_weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    """The trainer's state dict. The same bytes in every process; every bit pattern occurs."""
    generator = torch.Generator().manual_seed(_SEED)
    tensors, elements = shapes
    return {
        f"layers.{index}.weight": torch.randint(
            -(1 << 15), 1 << 15, (elements,), dtype=torch.int16, generator=generator
        ).view(torch.bfloat16)
        for index in range(tensors)
    }


def poison(tensors: dict[str, torch.Tensor]) -> None:
    """Overwrite everything, so that a receiver cannot look right without having received."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(POISON)


def as_numpy(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The bytes of each tensor, as numpy arrays over the same memory."""
    return {name: tensor.view(torch.uint8).numpy() for name, tensor in weights.items()}


def wrong_names(tensors: dict[str, torch.Tensor], expected: dict[str, Any]) -> list[str]:
    """Names whose bytes differ from `as_numpy` of what they should hold."""
    if tensors.keys() != expected.keys():
        return sorted(tensors.keys() ^ expected.keys())
    held = as_numpy(tensors)
    return [name for name, array in expected.items() if not (held[name] == array).all()]


class _Layer(torch.nn.Module):
    def __init__(self, elements: int) -> None:
        super().__init__()
        data = torch.empty(elements, dtype=torch.bfloat16)
        self.weight = torch.nn.Parameter(data, requires_grad=False)


class Model(torch.nn.Module):
    """A module whose parameters are those of `make_weights`, poisoned (so its pages are warm)."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        tensors, elements = shapes
        self.layers = torch.nn.ModuleList(_Layer(elements) for _ in range(tensors))
        poison(dict(self.named_parameters()))


class Worker(WorkerMixin):
    """A receiver. A plain Ray actor: no concurrency groups, nothing tuned."""

    def __init__(self, shapes: Shapes) -> None:
        self.model = Model(shapes)
        self.rayxfer_bind(self.model)

    def take(self, box: list[ray.ObjectRef]) -> None:
        """What a hand-written sync does: get the state dict and copy it in."""
        state = ray.get(box[0])
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(state[name])

    def poison(self) -> None:
        poison(dict(self.model.named_parameters()))

    def wrong_names(self, expected: dict[str, Any]) -> list[str]:
        return wrong_names(dict(self.model.named_parameters()), expected)


class StateDictSender:
    """Sends with one `ray.put(state_dict)`. Used in the driver, or as an actor of its own."""

    def __init__(self, weights: dict[str, torch.Tensor] | Shapes) -> None:
        self._weights = weights if isinstance(weights, dict) else make_weights(weights)

    def send(self, workers: list[Any]) -> float:
        """Seconds from the put until every worker holds the weights."""
        start = time.perf_counter()
        ref = ray.put(self._weights)
        ray.get([worker.take.remote([ref]) for worker in workers])
        return time.perf_counter() - start


def spawn_workers(count: int, shapes: Shapes) -> list[Any]:
    actor_class = ray.remote(num_cpus=0)(Worker)
    return [actor_class.remote(shapes) for _ in range(count)]
