"""The weights that travel, and the modules and actors that hold them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import ray
import torch

from benchmarks.shapes import Shapes
from rayxfer import WorkerMixin

POISON = 0xA5
_SEED = 20
_BLOCK = 1 << 22
"""Elements that are drawn; a larger tensor is made of them again and again, each time shifted."""


def make_weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    """The trainer's state dict. The same bytes in every process; every bit pattern occurs, and no
    two tensors or blocks are alike."""
    generator = torch.Generator().manual_seed(_SEED)
    block = torch.randint(-(1 << 15), 1 << 15, (_BLOCK,), dtype=torch.int16, generator=generator)
    weights = {}
    for index, (name, shape) in enumerate(shapes.items()):
        tensor = torch.empty(shape, dtype=torch.int16)
        for part, piece in enumerate(torch.split(tensor.view(-1), _BLOCK)):
            torch.add(block[: piece.numel()], (index * 31 + part) % (1 << 15), out=piece)
        weights[name] = tensor.view(torch.bfloat16)
    return weights


def poisoned_weights(shapes: Shapes) -> dict[str, torch.Tensor]:
    """Every byte is POISON: to send to receivers whose weights cannot be written. Tensors of their
    own, since views of one item would be tied weights, another kind of offer than the real one."""
    weights = {name: torch.empty(s, dtype=torch.bfloat16) for name, s in shapes.items()}
    poison(weights)
    return weights


def poison(tensors: dict[str, torch.Tensor]) -> None:
    """Overwrite everything, so that a receiver cannot look right without having received."""
    for tensor in tensors.values():
        tensor.view(torch.uint8).fill_(POISON)


def as_numpy(weights: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The bytes of each tensor, as numpy arrays over the same memory."""
    return {name: tensor.detach().view(torch.uint8).numpy() for name, tensor in weights.items()}


def wrong_names(tensors: dict[str, torch.Tensor], expected: dict[str, Any]) -> list[str]:
    """Those names of `expected` (`as_numpy` of what they should hold) whose bytes differ."""
    held = as_numpy({name: tensors[name] for name in expected.keys() & tensors.keys()})
    return [n for n, array in expected.items() if n not in held or not (held[n] == array).all()]


def pieces(arrays: dict[str, Any], size_bytes: int) -> Iterator[dict[str, Any]]:
    """`arrays` in parts of about `size_bytes`, none of them empty."""
    piece: dict[str, Any] = {}
    held = 0
    for name, array in arrays.items():
        if piece and held + array.nbytes > size_bytes:
            yield piece
            piece, held = {}, 0
        piece[name] = array
        held += array.nbytes
    if piece:
        yield piece


class Model(torch.nn.Module):
    """A module with exactly these parameters, at the end of their dotted names."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module._modules[part]  # type: ignore[assignment]
            module.register_parameter(last, torch.nn.Parameter(tensor, requires_grad=False))


class Receiver:
    """An actor with the model, and what every check needs.

    touch: write to the parameters (so their pages are warm), as a worker that serves has. Without
    it they cost nothing until the first load.
    """

    def __init__(self, shapes: Shapes, touch: bool = True) -> None:
        empty = {name: torch.empty(s, dtype=torch.bfloat16) for name, s in shapes.items()}
        self.model = Model(empty)
        if touch:
            self.poison()

    def pid(self) -> int:
        return os.getpid()

    def names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}

    def poison(self) -> None:
        poison(dict(self.model.named_parameters()))

    def wrong_names(self, expected: dict[str, Any]) -> list[str]:
        return wrong_names(dict(self.model.named_parameters()), expected)


class Worker(Receiver, WorkerMixin):
    """rayxfer's receiver. A plain Ray actor with the default loader: no concurrency groups,
    nothing tuned."""

    def __init__(self, shapes: Shapes, touch: bool = True) -> None:
        super().__init__(shapes, touch)
        self.rayxfer_bind(self.model)


def spawn_workers(count: int, shapes: Shapes, touch: bool = True) -> list[Any]:
    actor_class = ray.remote(num_cpus=0)(Worker)
    return [actor_class.remote(shapes, touch) for _ in range(count)]
