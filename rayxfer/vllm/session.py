"""A worker's side of a round around vLLM's model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from rayxfer.binding import Binding
from rayxfer.errors import ConfigError, StateError
from rayxfer.loader import EMPTY_OFFER, ModuleLoader, Preflight, WeightLoader
from rayxfer.metadata import ParamMeta
from rayxfer.opaque import StagedLoader
from rayxfer.report import WorkerState
from rayxfer.session import WorkerSession
from rayxfer.vllm.dry_run import DryRun, dry_run
from rayxfer.vllm.reload import Reload

__all__ = ["REBUILT_VARIABLE", "VLLMLoader", "VLLMSession"]

REBUILT_VARIABLE = "RAYXFER_VLLM_REBUILT"
"""Set in vLLM's environment when its actor was rebuilt: its weights are nobody's version."""


class VLLMSession(WorkerSession):
    """`WorkerSession` over vLLM's worker: checkpoint names in, through vLLM's layer-wise reload.

    Pausing, the prefix cache and resuming are not its business: they live in another process, see
    `rayxfer.vllm.relay`.

    Args:
        worker: vLLM's worker (`vllm.v1.worker`), with its model loaded.
    """

    def __init__(self, worker: Any) -> None:
        model = worker.get_model()
        self.reload = Reload(model, worker.model_config, worker.vllm_config, worker.device)
        self._worker = worker
        hf = worker.model_config.hf_text_config
        self._tied_head = bool(getattr(hf, "tie_word_embeddings", False))
        self._quantized = worker.vllm_config.quant_config is not None
        super().__init__(
            Binding(model=model, finish_update=self._finish),
            caught_up=os.environ.get(REBUILT_VARIABLE) != "1",
        )
        self._ops |= {"forget": self.forget, "hold": self.hold, "settings": self.settings}

    def describe(self, message: dict[str, Any]) -> dict[str, Any]:
        """As `WorkerSession.describe`. A model whose weights vLLM keeps out of sight (packed for the
        CPU, say) is like no other: it can neither give nor be given raw copies."""
        answer = super().describe(message)
        hidden = any(p.numel() == 0 for p in self.reload.model.parameters())
        if hidden:
            answer["fingerprint"] = f"packed-{self.incarnation}"
        return answer

    def forget(self, message: dict[str, Any]) -> dict[str, Any]:
        """The weights are gone (vLLM slept at level 2): CONNECTING until the next sync."""
        if self._round is not None:
            raise StateError("cannot forget the weights in the middle of a round")
        self._set_state(WorkerState.CONNECTING)
        return self.snapshot()

    def hold(self, message: dict[str, Any]) -> dict[str, Any]:
        """Whoever stands in front of vLLM could not finish a commit: TORN until the next sync."""
        self.torn_towards = self.version
        self._set_state(WorkerState.TORN)
        return self.snapshot()

    def settings(self, message: dict[str, Any]) -> dict[str, Any]:
        """What a relay that did not see the connect has to know."""
        config = self._config
        return {
            "load_mode": config.load_mode,
            "pause_mode": config.pause_mode,
            "cache_policy": config.cache_policy,
        }

    def _make_loader(self, checkpoint_format: bool, partial: bool) -> WeightLoader:
        if self._config.load_mode == "mapped":
            raise ConfigError(
                'load_mode="mapped" needs the default loader, and vLLM has its own: use "in_place" or '
                '"staged"'
            )
        staged, verify = self._config.load_mode == "staged", self._config.verify == "digest"
        if not checkpoint_format:
            return ModuleLoader(self.reload.model, staged=staged, verify=verify)
        loader = VLLMLoader(
            self.reload,
            tied_head=self._tied_head,
            quantized=self._quantized,
            tensor_parallel_size=self._worker.vllm_config.parallel_config.tensor_parallel_size,
        )
        return StagedLoader(loader) if staged else loader

    def _finish(self) -> None:
        self.reload.finish()
        self._worker.model_runner.reset_lora_state()


class VLLMLoader(WeightLoader):
    """Checkpoint-format weights through vLLM's own `load_weights`, under its layer-wise reload.

    vLLM keeps tensors until their layer is complete, so it is never handed views (`copies_only` is
    False). What an offer would do is known beforehand: see `rayxfer.vllm.dry_run`.
    """

    def __init__(
        self, reload: Reload, *, tied_head: bool, quantized: bool, tensor_parallel_size: int = 1
    ) -> None:
        self._reload = reload
        self._tied_head, self._quantized = tied_head, quantized
        self._tensor_parallel_size = tensor_parallel_size
        self._names: list[str] = []
        self._expected: DryRun | None = None
        self._returned: set[str] | None = set()
        self._started = False
        self.seen = {}

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        out = Preflight()
        self._names = [meta.name for meta in metadata]
        if not metadata:
            if not partial:
                out.add(None, EMPTY_OFFER)
            return out
        memo = memo if memo is not None else {}
        if memo.get("offer") is not metadata:
            memo["offer"] = metadata
            with self._reload.context():
                memo["dry"] = dry_run(
                    self._reload.model,
                    metadata,
                    tied_head=self._tied_head,
                    quantized=self._quantized,
                    tensor_parallel_size=self._tensor_parallel_size,
                )
        dry: DryRun = memo["dry"]
        self._expected = dry
        for name, text in dry.problems:
            out.add(name, text)
        out.casts = dict(dry.casts)
        if out.problems:
            return out
        if dry.known:
            self._check_missing(out, dry, partial)
        elif partial:
            out.add(
                self._names[0],
                "vLLM's loaders cannot be tried without weights for this model, so a partial sync "
                "could leave layers half new: send all of it",
            )
        return out

    def _check_missing(self, out: Preflight, dry: DryRun, partial: bool) -> None:
        # A layer is reloaded as a whole: what an offer touches in part would be left uninitialised.
        touched = {_layer(target) for targets in dry.parts.values() for target in targets}
        for target, (written, need) in dry.missing.items():
            if partial and _layer(target) not in touched:
                out.kept.append(target)
                continue
            if self._quantized and written == 0:
                continue  # scales that checkpoints may leave out
            offered = sorted(n for n, ts in dry.parts.items() if target in ts)
            have = f"; offered for it: {', '.join(offered)}" if offered else ""
            rule = (
                "all parts of a layer must be offered together" if partial else "incomplete offer"
            )
            out.add(
                target,
                f"missing name for {target!r}: {written:,} of {need:,} elements would be "
                f"written ({rule}){have}",
            )

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        if not self._started:
            self._started = True
            self._reload.start()
        names = self._reload.load([(self._names[index], tensor) for index, tensor in items])
        if names is None:
            self._returned = None
        elif self._returned is not None:
            self._returned |= names

    def unproven(self) -> list[str] | None:
        dry = self._expected
        if dry is None or not dry.known or self._returned is None:
            return None
        return sorted(dry.returned - self._returned)

    def discard(self) -> None:
        if self._started:
            self._reload.reset()

    @property
    def touched(self) -> bool:
        return self._started


def _layer(target: str) -> str:
    return target.rpartition(".")[0]
