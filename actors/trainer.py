"""A trainer as a Ray actor: a module, an optimizer, and one call to send the weights out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import ray
import torch

from rayxfer.controller import Controller
from rayxfer.errors import ConfigError
from rayxfer.report import SyncReport

__all__ = ["Trainer", "TrainerActor"]

T = TypeVar("T")


class Trainer:
    """The plain class; `TrainerActor` is the Ray actor class made of it.

    Args:
        build_model: returns the module to train; any callable.
        build_optimizer: `f(model)` → optimizer; default AdamW with a learning rate of 1e-3.
        train_step: `f(model, optimizer, *args, **kwargs)` → result; default: one step on the loss of
            a Hugging Face model, `model(**batch).loss`.
    """

    def __init__(
        self,
        build_model: Callable[[], torch.nn.Module],
        *,
        build_optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer] | None = None,
        train_step: Callable[..., Any] | None = None,
    ) -> None:
        model = build_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"build_model() gave a {type(model).__name__}, not an nn.Module")
        self.model = model
        self._build_optimizer = build_optimizer or _adamw
        self._train_step = train_step or loss_step
        self._optimizer: torch.optim.Optimizer | None = None

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """One optimizer step; what the given `train_step` returns (default: the loss, a float)."""
        if self._optimizer is None:  # made late: a trainer that only sends needs no state
            self._optimizer = self._build_optimizer(self.model)
        return self._train_step(self.model, self._optimizer, *args, **kwargs)

    def sync_weights(
        self, controller: Controller, *, version: int | None = None, partial: bool = False
    ) -> SyncReport:
        """Send this trainer's weights. See `Controller.sync_weights` for errors."""
        return controller.sync_weights(self.model, version=version, partial=partial)

    def apply(self, fn: Callable[[torch.nn.Module], T]) -> T:
        """`fn(model)`, run in this actor; its result."""
        return fn(self.model)

    @ray.method(concurrency_group="control")
    def ping(self) -> bool:
        """True: this process answers."""
        return True


def loss_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]
) -> float:
    """One step on `model(**batch).loss`; returns the loss before it."""
    model.train()
    optimizer.zero_grad(set_to_none=True)
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def _adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


TrainerActor = ray.remote(concurrency_groups={"control": 2})(Trainer)
"""`TrainerActor.options(num_cpus=1).remote(build_model)`; see `Trainer`."""
