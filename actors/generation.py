"""Token-by-token generation with any causal language model, under a gate.

Works with Hugging Face causal LMs (whose key-value cache is used) and with any module that maps token
ids (batch, length) to logits (batch, length, vocabulary), or to an object with `.logits`.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from actors.gate import Gate, RequestAborted
from rayxfer.errors import ConfigError

__all__ = ["Completion", "Generator"]


@dataclass(frozen=True)
class Completion:
    """What one prompt became.

    Attributes:
        token_ids: the new tokens, without the prompt.
        logprobs: natural log-probability of each under the model (before temperature).
        weight_version: the version it was dispatched at.
        finished_version: the version it ended at (another one if a sync came in between).
        finish_reason: "length", "stop" (an end-of-sequence token) or "abort".
    """

    token_ids: list[int]
    logprobs: list[float]
    weight_version: int
    finished_version: int
    finish_reason: str = "length"


def check_request(
    prompt_token_ids: Sequence[Sequence[int]], max_new_tokens: int, temperature: float
) -> None:
    """Raise ConfigError for what no worker can generate from."""
    if not prompt_token_ids or not all(prompt_token_ids):
        raise ConfigError("prompt_token_ids: expected a non-empty list of non-empty lists of ids")
    if max_new_tokens < 1 or temperature < 0:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens}, temperature={temperature}: expected >= 1 and >= 0"
        )


class Generator:
    """Generates under a `Gate`.

    Args:
        model: returns the live model.
        version: returns the version of the weights.
        gate: closed while weights change.
    """

    def __init__(
        self, model: Callable[[], torch.nn.Module], version: Callable[[], int], gate: Gate
    ) -> None:
        self._model, self._version, self._gate = model, version, gate
        self._cache_epoch = 0

    def reset_cache(self) -> None:
        """Every cached key and value is stale: running requests recompute their prefix."""
        self._cache_epoch += 1

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        eos_token_id: int | None = None,
        timeout_s: float = 600.0,
    ) -> list[Completion]:
        """One completion per prompt, in order. Prompts of one length run as one batch.

        Raises:
            ConfigError: bad arguments. TransferTimeout: `timeout_s` passed while the weights were
                being updated. StateError: this worker refuses, or was shut down.
        """
        check_request(prompt_token_ids, max_new_tokens, temperature)
        deadline = time.monotonic() + timeout_s
        groups: dict[int, list[int]] = {}
        for index, prompt in enumerate(prompt_token_ids):
            groups.setdefault(len(prompt), []).append(index)
        done: dict[int, Completion] = {}
        for indices in groups.values():
            prompts = torch.tensor([list(prompt_token_ids[i]) for i in indices], dtype=torch.long)
            # one random stream per prompt: the result does not depend on who else is in the batch
            streams = [None if seed is None else seed + i for i in indices]
            batch = self._batch(
                prompts, max_new_tokens, temperature, streams, eos_token_id, deadline
            )
            done.update(zip(indices, batch, strict=True))
        return [done[index] for index in range(len(prompt_token_ids))]

    def _batch(
        self,
        prompts: torch.Tensor,
        max_new_tokens: int,
        temperature: float,
        seeds: list[int | None],
        eos_token_id: int | None,
        deadline: float,
    ) -> list[Completion]:
        count = prompts.shape[0]
        tokens: list[list[int]] = [[] for _ in range(count)]
        logprobs: list[list[float]] = [[] for _ in range(count)]
        reasons = ["length"] * count
        running = [True] * count
        generators = [torch.Generator() for _ in seeds]
        for generator, seed in zip(generators, seeds, strict=True):
            generator.seed() if seed is None else generator.manual_seed(seed)
        ids, cache, epoch = prompts, None, -1
        with self._gate.request(deadline) as ticket:
            dispatched = self._version()
            try:
                for _ in range(max_new_tokens):
                    with self._gate.step(ticket, deadline):
                        if epoch != self._cache_epoch:
                            cache, epoch = None, self._cache_epoch
                        logits, cache = self._forward(ids, cache)
                    scores = torch.log_softmax(logits.float(), dim=-1)
                    chosen = _choose(logits, temperature, generators)
                    for row in range(count):
                        if not running[row]:
                            continue
                        token = int(chosen[row])
                        tokens[row].append(token)
                        logprobs[row].append(float(scores[row, token]))
                        if token == eos_token_id:
                            running[row], reasons[row] = False, "stop"
                    ids = torch.cat([ids, chosen.unsqueeze(1)], dim=1)
                    if not any(running):
                        break
            except RequestAborted:
                reasons = [
                    "abort" if alive else r for alive, r in zip(running, reasons, strict=True)
                ]
            finished = self._version()
        return [
            Completion(tokens[row], logprobs[row], dispatched, finished, reasons[row])
            for row in range(count)
        ]

    def _forward(self, ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits of the last position (batch, vocabulary) on the CPU, and the cache to go on with."""
        model = self._model()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        with torch.no_grad():
            if _is_hugging_face(model):
                fresh = ids if cache is None else ids[:, -1:]
                key = _cache_key(type(model).forward)
                out = model(input_ids=fresh.to(device), use_cache=True, **{key: cache})
                return out.logits[:, -1].cpu(), getattr(out, key)
            out = model(ids.to(device))
            logits = out if isinstance(out, torch.Tensor) else out.logits
            return logits[:, -1].cpu(), None


def _is_hugging_face(model: torch.nn.Module) -> bool:
    return hasattr(model, "config") and hasattr(model, "prepare_inputs_for_generation")


@functools.cache
def _cache_key(forward: Callable[..., Any]) -> str:
    """What this model's forward calls its key-value cache (transformers 5 renamed it)."""
    names = inspect.signature(forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def _choose(
    logits: torch.Tensor, temperature: float, generators: list[torch.Generator]
) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    chances = torch.softmax(logits.float() / temperature, dim=-1)
    rows = [
        torch.multinomial(row, 1, generator=generator)
        for row, generator in zip(chances, generators, strict=True)
    ]
    return torch.cat(rows)
