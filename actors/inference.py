"""An inference worker as a Ray actor: any torch module, generation, and rayxfer's side of a sync."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import ray
import torch

from actors.gate import Gate
from actors.generation import Completion, Generator
from rayxfer.errors import ConfigError
from rayxfer.loader import FuseRule
from rayxfer.report import WorkerState
from rayxfer.source import Rename
from rayxfer.worker import WorkerMixin

__all__ = ["CONCURRENCY_GROUPS", "InferenceActor", "InferenceWorker"]

T = TypeVar("T")

CONCURRENCY_GROUPS = {"control": 4, "rayxfer": 4, "generate": 32}
"""Threads per kind of call: `ping`, `state` and aborts never wait behind generation or a transfer."""


class InferenceWorker(WorkerMixin):
    """The plain class; `InferenceActor` is the Ray actor class made of it.

    Args:
        build_model: returns the module to serve; any callable, closures and lambdas too.
        load_weights: `f(model, [(name, tensor), …])`, instead of the default loader; returns the
            names of the model's parameters that it wrote, or None.
        rename, fuse: rules of the default loader (see `rayxfer.loader.ModuleLoader`).

    Raises:
        ConfigError: `build_model()` gave no `nn.Module`.
    """

    def __init__(
        self,
        build_model: Callable[[], torch.nn.Module],
        *,
        load_weights: Callable[[Any, list[tuple[str, torch.Tensor]]], Any] | None = None,
        rename: Rename | None = None,
        fuse: Sequence[FuseRule] = (),
    ) -> None:
        model = build_model()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"build_model() gave a {type(model).__name__}, not an nn.Module")
        self.model = model.eval()
        self._gate = Gate()
        self._generator = Generator(lambda: self.model, self.weight_version, self._gate)
        self.rayxfer_bind(
            lambda: self.model,
            load_weights=load_weights,
            pause=self._gate.pause,
            resume=self._gate.resume,
            reset_cache=self._generator.reset_cache,
            on_state=self._on_state,
            rename=rename,
            fuse=fuse,
        )
        self._on_state(WorkerState(super().state()))

    def _on_state(self, state: WorkerState) -> None:
        # Only a worker that Ray has rebuilt starts out CONNECTING: its weights are nobody's version.
        waiting = state == WorkerState.CONNECTING
        self._gate.refuse(
            "this worker was restarted and does not hold the committed version yet: it serves again "
            "after the next sync"
            if waiting
            else None
        )

    @ray.method(concurrency_group="generate")
    def generate(
        self,
        prompt_token_ids: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        eos_token_id: int | None = None,
        timeout_s: float = 600.0,
    ) -> list[Completion]:
        """One completion per prompt. See `actors.generation.Generator.generate` for errors.

        During a sync requests wait (pause modes: see `WeightTransferConfig.pause_mode`), and fail
        only at their own `timeout_s` or at shutdown.
        """
        return self._generator.generate(
            prompt_token_ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            seed=seed,
            eos_token_id=eos_token_id,
            timeout_s=timeout_s,
        )

    def apply(self, fn: Callable[[torch.nn.Module], T]) -> T:
        """`fn(model)`, run in this actor while no round changes the weights; its result."""
        assert self._rayxfer_session is not None
        with self._rayxfer_session.outside_rounds():
            return fn(self.model)

    @ray.method(concurrency_group="control")
    def pause(self, mode: str = "keep") -> None:
        """Stop generation as a sync would ("keep", "wait" or "abort"), until `resume`."""
        self._gate.pause(mode)

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        """Let generation go on. Does nothing while the weights are torn or being updated."""
        assert self._rayxfer_session is not None
        if self._rayxfer_session.state not in (WorkerState.TORN, WorkerState.UPDATING):
            self._gate.resume()

    @ray.method(concurrency_group="control")
    def state(self) -> str:
        """This worker's `WorkerState`."""
        return super().state()

    @ray.method(concurrency_group="control")
    def weight_version(self) -> int:
        """The version that this worker holds (0: what it was built with)."""
        return super().weight_version()

    @ray.method(concurrency_group="control")
    def ping(self) -> bool:
        """True: this process answers."""
        return super().ping()

    @ray.method(concurrency_group="rayxfer")
    def rayxfer_call(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """For rayxfer's use."""
        return super().rayxfer_call(op, message)

    @ray.method(concurrency_group="control")
    def rayxfer_signal(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """For rayxfer's use."""
        return super().rayxfer_signal(op, message)

    def shutdown(self) -> None:
        """End waiting and coming requests. The actor itself goes on."""
        self._gate.shut()


InferenceActor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(InferenceWorker)
"""`InferenceActor.options(num_cpus=0).remote(build_model)`; see `InferenceWorker`."""
