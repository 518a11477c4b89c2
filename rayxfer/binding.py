"""What a worker lends to its session: the model, and hooks around its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.errors import ConfigError
from rayxfer.loader import FuseRule, WeightLoader
from rayxfer.report import WorkerState
from rayxfer.source import ModuleSource, Rename, WeightSource, named_tensors

__all__ = ["Binding", "fingerprint", "load_function"]


@dataclass(frozen=True)
class Binding:
    """What a worker lends to its session.

    Attributes:
        model: the live module, or a function that returns it (for workers that replace it).
        load_weights: `f(model, [(name, tensor), …]) -> set of written names | None`; None: the
            model's own `load_weights(weights)` if it has one, else the default loader.
        pause: called with "keep", "wait" or "abort" before weights change; returns when nothing
            reads them. Must be safe to call twice.
        resume: called when the weights are whole again. Must be safe to call twice.
        reset_cache: called once after each commit, before resume, under cache_policy="reset".
        start_update, finish_update: called once per round around the loading, however many buckets.
        on_state: told every change of state.
        rename, fuse: rules of the default loader.
        make_loader, make_source: instead of all that, for what is no model (see `rayxfer.keeper`).
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    load_weights: Callable[[Any, list[tuple[str, torch.Tensor]]], Any] | None = None
    pause: Callable[[str], Any] | None = None
    resume: Callable[[], Any] | None = None
    reset_cache: Callable[[], Any] | None = None
    start_update: Callable[[], Any] | None = None
    finish_update: Callable[[], Any] | None = None
    on_state: Callable[[WorkerState], Any] | None = None
    rename: Rename | None = None
    fuse: Sequence[FuseRule] = ()
    make_loader: Callable[[], WeightLoader] | None = None
    make_source: Callable[[], WeightSource] | None = None

    def source(self) -> WeightSource:
        """What this worker can give to another."""
        return (
            self.make_source() if self.make_source is not None else ModuleSource(self.live_model())
        )

    def live_model(self) -> torch.nn.Module:
        model = self.model if isinstance(self.model, torch.nn.Module) else self.model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"the bound model is a {type(model).__name__}, not an nn.Module")
        return model


def load_function(
    binding: Binding, model: torch.nn.Module
) -> Callable[[list[tuple[str, torch.Tensor]]], Any] | None:
    """The opaque loading function of this worker, or None where the default loader serves it."""
    user = binding.load_weights
    if user is not None:
        return lambda weights: user(model, weights)
    own = getattr(model, "load_weights", None)
    return own if callable(own) else None


def fingerprint(model: torch.nn.Module) -> str:
    """Equal for models between which tensors can be copied by name as they are."""
    h = hashlib.blake2b(digest_size=16)
    h.update(f"{type(model).__module__}.{type(model).__qualname__}".encode())
    for name, tensor in named_tensors(model).items():
        h.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
    return h.hexdigest()
