"""GRPO on a CPU: a tiny language model learns a verifiable rule from rewards alone.

    python -m recipes.grpo --help

The trainer is this process; rollouts come from Ray actors, which get the new weights from
`Controller.sync_weights` after every optimizer step. Group relative policy optimization follows
DeepSeekMath (Shao et al. 2024, arXiv 2402.03300): several completions per prompt, advantages relative
to their group, PPO's clipped ratio (Schulman et al. 2017, arXiv 1707.06347), no value model.

The task: every token has a colour, `token % 8`. A prompt is three random tokens, and the reward is the
share of the completion's tokens that have the colour of the prompt's *first* token. A random model gets
1/8. No text, no tokenizer, no download, and no supervised loss anywhere.

Rollout workers start from other weights than the trainer's, so nothing works before the first sync, and
every batch sampled at the trainer's own version must have the trainer's own log-probabilities.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from tqdm import tqdm

from actors import Completion, InferenceActor
from rayxfer import Controller, WeightTransferConfig
from recipes.report import History, save_curve, table

VOCAB, COLOURS, PROMPT_TOKENS, MAX_TOKENS = 32, 8, 3, 64
LAST_STEPS = 5  # reward_last is the mean over this many
LOGPROB_TOLERANCE = 0.01

# ---- the task -----------------------------------------------------------------------------------


def make_prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """Random prompts; the first token decides what is asked for."""
    prompts: list[list[int]] = torch.randint(
        0, VOCAB, (count, PROMPT_TOKENS), generator=generator
    ).tolist()
    return prompts


def reward(prompt: Sequence[int], completion: Sequence[int]) -> float:
    """The share of `completion` that has the colour of the prompt's first token."""
    if not completion:
        return 0.0
    return sum(token % COLOURS == prompt[0] % COLOURS for token in completion) / len(completion)


def model_builder(seed: int) -> Callable[[], torch.nn.Module]:
    """A 107 thousand parameter Llama with random weights."""

    def build() -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.set_num_threads(1)  # trainer and workers are processes of their own
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=MAX_TOKENS,
            initializer_range=0.05,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,  # completions end by length
            pad_token_id=None,
        )
        model: torch.nn.Module = LlamaForCausalLM(config)
        return model

    return build


# ---- GRPO ---------------------------------------------------------------------------------------


def group_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """(groups, group size) → the same shape: (reward - group mean) / group standard deviation.

    A group whose rewards are all equal says nothing about what is better: its advantages are 0.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    std = rewards.std(dim=1, keepdim=True, correction=0)
    return torch.where(std > 1e-6, centred / std.clamp_min(1e-6), torch.zeros_like(centred))


def grpo_loss(
    logprobs: torch.Tensor,
    behaviour: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_range: float,
    kl_coef: float = 0.0,
    reference: torch.Tensor | None = None,
) -> tuple[torch.Tensor, float]:
    """DeepSeekMath's equation 3, negated; and the share of tokens whose gradient the clip removed.

    Args:
        logprobs: of the sampled tokens under the model in training, (samples, tokens).
        behaviour: the same under the weights that sampled them.
        advantages: one per sample, (samples,).
        mask: 1 for the tokens of a completion, 0 for padding.
        clip_range: the ratio counts only within 1 ± this.
        kl_coef: weight of the KL divergence from the reference policy (their unbiased estimator).
        reference: log-probabilities under that policy; needed when `kl_coef` is not 0.
    """
    ratio = torch.exp(logprobs - behaviour)
    gain = ratio * advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range) * advantages.unsqueeze(1)
    per_token = -torch.minimum(gain, clipped)
    if kl_coef:
        if reference is None:
            raise ValueError(f"kl_coef={kl_coef} needs the reference policy's log-probabilities")
        away = reference - logprobs
        per_token = per_token + kl_coef * (torch.exp(away) - away - 1)
    lengths = mask.sum(dim=1).clamp_min(1)
    loss = ((per_token * mask).sum(dim=1) / lengths).mean()
    return loss, float(((clipped < gain) * mask).sum() / mask.sum().clamp_min(1))


@dataclass(frozen=True)
class Batch:
    """Completions as tensors, padded on the right: (samples, longest)."""

    ids: torch.Tensor  # prompt and completion
    mask: torch.Tensor  # over completion tokens, as are all below
    behaviour: torch.Tensor
    rewards: torch.Tensor  # (groups, group size)
    current: torch.Tensor  # (samples,): sampled wholly by the version now in training


def token_logprobs(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of every completion token. Prompts have one length, so no mask is needed:
    padding on the right is never looked at from its left."""
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1].float()
    chosen = ids[:, PROMPT_TOKENS:].unsqueeze(-1)
    return torch.log_softmax(logits, dim=-1).gather(-1, chosen).squeeze(-1)


def check_behaviour(logprobs: torch.Tensor, batch: Batch) -> float:
    """Largest difference between the rollout's log-probabilities and the trainer's own.

    Over the samples that the trainer's own version made. Raises RuntimeError beyond the tolerance:
    then the workers do not hold the weights that they say they hold.
    """
    rows = batch.mask * batch.current.unsqueeze(1)
    worst = float(((logprobs.detach() - batch.behaviour) * rows).abs().max())
    if not worst <= LOGPROB_TOLERANCE:
        raise RuntimeError(
            f"rollouts of the trainer's own version differ from its log-probabilities by {worst:.4g} "
            f"(tolerance {LOGPROB_TOLERANCE:g}): the workers do not serve the trainer's weights"
        )
    return worst


class Trainer:
    """Model, optimizer and, if KL counts, the frozen reference policy."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = model_builder(args.seed)()
        self._args = args
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)
        self._schedule = torch.optim.lr_scheduler.LinearLR(
            self._optimizer, start_factor=1.0, end_factor=0.1, total_iters=args.steps * args.updates
        )
        self._reference = model_builder(args.seed)().eval() if args.kl_coef else None

    def step(self, batch: Batch) -> tuple[float, float]:
        """`--updates` optimizer steps on one batch.

        Returns the share of clipped tokens in the last of them, and what `check_behaviour` found.
        """
        args, reference, clipped, mismatch = self._args, None, 0.0, 0.0
        advantages = group_advantages(batch.rewards).flatten()
        if self._reference is not None:
            with torch.no_grad():
                reference = token_logprobs(self._reference, batch.ids)
        for update in range(args.updates):
            logprobs = token_logprobs(self.model, batch.ids)
            if update == 0:
                mismatch = check_behaviour(logprobs, batch)
            loss, clipped = grpo_loss(
                logprobs,
                batch.behaviour,
                advantages,
                batch.mask,
                clip_range=args.clip_range,
                kl_coef=args.kl_coef,
                reference=reference,
            )
            self._optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self._optimizer.step()
            self._schedule.step()
        return clipped, mismatch


# ---- rollouts -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The completions of one prompt."""

    prompt: list[int]
    completions: list[Completion]

    @property
    def weight_version(self) -> int:
        """The oldest version that any of it was sampled with."""
        return min(c.weight_version for c in self.completions)


def split_stale(
    groups: Sequence[Group], version: int, max_staleness_steps: int
) -> tuple[list[Group], list[Group]]:
    """(usable, stale) for a trainer at `version`."""
    usable: list[Group] = []
    stale: list[Group] = []
    for group in groups:
        late = version - group.weight_version > max_staleness_steps
        (stale if late else usable).append(group)
    return usable, stale


def collate(groups: Sequence[Group], version: int) -> Batch:
    """Groups as one batch, with rewards, for a trainer at `version`."""
    samples = [(group.prompt, c) for group in groups for c in group.completions]
    pad = torch.nn.utils.rnn.pad_sequence
    return Batch(
        ids=pad([torch.tensor(p + c.token_ids) for p, c in samples], batch_first=True),
        mask=pad([torch.ones(len(c.token_ids)) for _, c in samples], batch_first=True),
        behaviour=pad([torch.tensor(c.logprobs) for _, c in samples], batch_first=True),
        rewards=torch.tensor(
            [[reward(g.prompt, c.token_ids) for c in g.completions] for g in groups]
        ),
        current=torch.tensor(
            [float(c.weight_version == c.finished_version == version) for _, c in samples]
        ),
    )


class Rollouts:
    """Keeps the workers sampling; every worker has one request of an equal share of the groups.

    With a staleness bound of 0 requests are sent when a batch is wanted. With 1 a worker gets its
    next request as soon as it has answered, so it samples while the trainer trains, and a sync
    reaches it in the middle of a completion (which then counts as one of the older version). A group
    that comes too late for the bound is dropped and counted, and its worker asked again.
    """

    def __init__(self, workers: Sequence[Any], args: argparse.Namespace) -> None:
        self._args = args
        self._share = args.groups // len(workers)
        self._idle = list(workers)
        self._pending: dict[Any, tuple[Any, list[list[int]]]] = {}
        self._ready: list[Group] = []
        self._random = torch.Generator().manual_seed(args.seed)
        self._requests = 0
        self.received = 0
        self.dropped = 0

    def collect(self, version: int, *, last: bool = False) -> list[Group]:
        """The groups of one step, none staler than the bound for a trainer at `version`."""
        bound = self._args.max_staleness_steps
        ahead = bound > 0 and not last
        self._sort_out(version)
        while len(self._ready) < self._args.groups:
            self._send(ahead)
            done, _ = ray.wait(list(self._pending), num_returns=1)
            worker, prompts = self._pending.pop(done[0])
            self._idle.append(worker)
            completions: list[Completion] = ray.get(done[0])
            size = self._args.group_size
            self._ready += [
                Group(prompt, completions[i * size : (i + 1) * size])
                for i, prompt in enumerate(prompts)
            ]
            self.received += len(prompts)
            self._sort_out(version)
        self._send(ahead)
        batch = self._ready[: self._args.groups]
        self._ready = self._ready[self._args.groups :]
        return batch

    def _sort_out(self, version: int) -> None:
        self._ready, stale = split_stale(self._ready, version, self._args.max_staleness_steps)
        self.dropped += len(stale)

    def _send(self, ahead: bool) -> None:
        """A request to every idle worker; unless `ahead`, only for groups that are still missing."""
        while self._idle:
            coming = len(self._ready) + self._share * len(self._pending)
            if not ahead and coming >= self._args.groups:
                return
            worker = self._idle.pop(0)
            prompts = make_prompts(self._share, self._random)
            # one random stream per completion: `seed` counts up within a request
            stream = (
                self._args.seed * 1_000_003
                + self._requests * self._args.groups * self._args.group_size
            )
            ref = worker.generate.remote(
                [prompt for prompt in prompts for _ in range(self._args.group_size)],
                max_new_tokens=self._args.max_new_tokens,
                temperature=1.0,
                seed=stream,
            )
            self._pending[ref] = (worker, prompts)
            self._requests += 1


@contextlib.contextmanager
def rollout_workers(args: argparse.Namespace) -> Iterator[list[Any]]:
    """Actors with random weights that are *not* the trainer's."""
    build = model_builder(args.seed + 1000)
    workers: list[Any] = []
    with tempfile.TemporaryDirectory(prefix="rayxfer-grpo-") as folder:
        try:
            if args.engine == "vllm":
                from actors import VLLMActor
                from actors.placement import this_node

                build().save_pretrained(folder)  # type: ignore[operator]
                actor = VLLMActor.options(num_cpus=0, **this_node())  # where the folder is
                workers = [
                    actor.remote(model=folder, dtype="float32", max_model_len=MAX_TOKENS)
                    for _ in range(args.workers)
                ]
            else:
                actor = InferenceActor.options(num_cpus=0)
                workers = [actor.remote(build) for _ in range(args.workers)]
            yield workers
        finally:
            for worker in workers:
                with contextlib.suppress(Exception):
                    ray.get(worker.shutdown.remote(), timeout=30)
                ray.kill(worker)


# ---- the loop -----------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> History:
    """The whole run. Raises RuntimeError if rollouts or staleness are not what they must be."""
    history = History()
    with contextlib.ExitStack() as stack:
        with history.phase("start"):
            if not ray.is_initialized():
                ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
            workers = stack.enter_context(rollout_workers(args))
            trainer = Trainer(args)  # while the workers start
            config = WeightTransferConfig(backend=args.backend)
            controller = stack.enter_context(Controller(workers, config))
        with history.phase("sync"):
            version = controller.sync_weights(trainer.model).version
        rollouts = Rollouts(workers, args)
        bar = stack.enter_context(
            tqdm(total=args.steps, unit="step", mininterval=0.2 if sys.stderr.isatty() else 10.0)
        )
        for step in range(args.steps):
            with history.phase("rollout (waiting)"):
                groups = rollouts.collect(version, last=step == args.steps - 1)
            staleness = max(version - group.weight_version for group in groups)
            if staleness > args.max_staleness_steps:
                raise RuntimeError(f"step {step + 1}: a sample is {staleness} versions old")
            with history.phase("train"):
                batch = collate(groups, version)
                clipped, mismatch = trainer.step(batch)
            with history.phase("sync"):
                version = controller.sync_weights(trainer.model).version
            history.rewards.append(float(batch.rewards.mean()))
            history.staleness.append(staleness)
            history.versions.append(version)
            history.clipped.append(clipped)
            history.mismatch = max(history.mismatch, mismatch)
            bar.set_postfix(
                reward=f"{history.rewards[-1]:.3f}",
                version=version,
                dropped=rollouts.dropped,
                refresh=False,
            )
            bar.update()
        history.groups, history.dropped = rollouts.received, rollouts.dropped
    return history


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m recipes.grpo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--engine", choices=["hf", "vllm"], default="hf", help="who samples (default hf)")
    add("--backend", default="auto", help="auto, shm, gloo, object_store (default auto)")
    add("--workers", type=int, default=None, help="rollout actors (default: hf 2, vllm 1)")
    add("--steps", type=int, default=120, help="batches, each with a sync (default 120)")
    add("--seed", type=int, default=0)
    add("--max-staleness-steps", type=int, choices=[0, 1], default=0, help="1: overlap (default 0)")
    add("--groups", type=int, default=16, help="prompts per step (default 16)")
    add("--group-size", type=int, default=16, help="completions per prompt (default 16)")
    add("--max-new-tokens", type=int, default=8)
    add("--lr", type=float, default=3e-3, help="falls to a tenth (default 3e-3)")
    add("--updates", type=int, default=1, help="optimizer steps per batch (default 1)")
    add("--clip-range", type=float, default=0.2)
    add("--kl-coef", type=float, default=0.0, help="0: no reference policy (default)")
    add(
        "--plot",
        type=Path,
        default=Path("recipes/out/grpo.png"),
        help="where the reward curve goes",
    )
    args = parser.parse_args(argv)
    if args.workers is None:
        args.workers = 2 if args.engine == "hf" else 1
    for name in ("workers", "steps", "groups", "group_size", "max_new_tokens", "updates"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: at least 1")
    if args.groups % args.workers:
        parser.error(f"--groups {args.groups} cannot be shared evenly by {args.workers} workers")
    if PROMPT_TOKENS + args.max_new_tokens > MAX_TOKENS:
        parser.error(
            f"--max-new-tokens {args.max_new_tokens}: at most {MAX_TOKENS - PROMPT_TOKENS}"
        )
    return args


def main(argv: Sequence[str] | None = None) -> History:
    args = parse(argv)
    began = time.monotonic()
    history = train(args)
    seconds = time.monotonic() - began
    last = history.rewards[-LAST_STEPS:]
    summary = {
        "reward_first": round(history.rewards[0], 4),
        "reward_last": round(sum(last) / len(last), 4),
        "steps": len(history.rewards),
        "seconds": round(seconds, 2),
        "max_staleness": max(history.staleness),
        "engine": args.engine,
        "backend": args.backend,
    }
    print(table(history, seconds))
    print(
        f"reward of step 1 (before any update) {summary['reward_first']}, mean of the last {len(last)} "
        f"steps {summary['reward_last']}; weight_version {history.versions[-1]}"
    )
    print(
        f"{history.groups} groups sampled, {history.dropped} dropped as stale; staleness at most "
        f"{summary['max_staleness']} (bound {args.max_staleness_steps}); clipped tokens "
        f"{sum(history.clipped) / len(history.clipped):.1%}"
    )
    title = f"GRPO, {args.engine} rollouts, seed {args.seed}"
    print(
        f"log-probabilities of rollouts and trainer at the same version differ by at most "
        f"{history.mismatch:.1e}"
    )
    print(save_curve(history.rewards, args.plot, title=title, chance=1 / COLOURS))
    print(json.dumps(summary), flush=True)
    return history


if __name__ == "__main__":
    main()
