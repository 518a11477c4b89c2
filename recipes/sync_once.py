"""Train a transformer in one Ray actor; serve it from four others, over two backends in one round.

    python -m recipes.sync_once --help

Three rounds of train → sync → generate, and a proof at the end: every worker holds the trainer's
weights byte for byte, generates the same tokens, and neither is what it was after the first round.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
import torch
from tqdm import tqdm

from actors import InferenceActor, TrainerActor
from rayxfer import Controller, SyncReport, WeightTransferConfig

PROMPT = [11, 7, 42, 3, 256, 19]
NEW_TOKENS = 12


def model_builder(args: argparse.Namespace, seed: int) -> Callable[[], torch.nn.Module]:
    """A Hugging Face causal LM with tied embeddings, from a config: nothing is downloaded."""

    def build() -> torch.nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=args.vocab_size,
            hidden_size=args.hidden_size,
            intermediate_size=args.hidden_size * 11 // 4,
            num_hidden_layers=args.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=512,
            tie_word_embeddings=True,
        )
        model: torch.nn.Module = LlamaForCausalLM(config)
        return model

    return build


def fingerprints(model: torch.nn.Module) -> dict[str, str]:
    """BLAKE2 of every tensor's bytes: proof that does not rest on rayxfer's own digests."""
    out = {}
    for name, tensor in model.state_dict().items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
        out[name] = hashlib.blake2b(data, digest_size=16).hexdigest()
    return out


def greedy(model: torch.nn.Module) -> list[int]:
    """The same greedy tokens by Hugging Face's own generate."""
    model.eval()
    with torch.no_grad():
        ids = torch.tensor([PROMPT])
        out = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
    tokens: list[int] = out[0, len(PROMPT) :].tolist()
    return tokens


def count_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def batch(args: argparse.Namespace, step: int) -> dict[str, torch.Tensor]:
    """Something learnable: arithmetic progressions of tokens."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, args.vocab_size, (4, 1), generator=generator)
    ids = (start + 7 * torch.arange(32)) % args.vocab_size
    return {"input_ids": ids, "labels": ids}


def show(report: SyncReport, loss: float) -> None:
    rows = [
        f"\nversion {report.version}   loss {loss:.3f}   {report.num_bytes:,} bytes   "
        f"{report.seconds:.3f} s   {report.gigabytes_per_second:.2f} GB/s",
        f"  {'worker':>6}  {'backend':<12}  {'state':<8}  {'version':>7}  verified",
    ]
    for row in report.workers:
        rows.append(
            f"  {row.rank:>6}  {row.backend:<12}  {row.state:<8}  {row.version:>7}  {row.verified}"
        )
    tqdm.write("\n".join(rows))


def prove(trainer: Any, workers: list[Any], first: dict[str, str]) -> None:
    """Raise SystemExit unless trainer and workers agree, and have moved on since round 1."""
    truth = ray.get(trainer.apply.remote(fingerprints))
    for rank, worker in enumerate(workers):
        held = ray.get(worker.apply.remote(fingerprints))
        wrong = [name for name in truth if held.get(name) != truth[name]]
        if wrong or held.keys() != truth.keys():
            sys.exit(f"worker {rank} differs from the trainer at {wrong[:3]}")
    expected = ray.get(trainer.apply.remote(greedy))
    completions = ray.get(
        [w.generate.remote([PROMPT], max_new_tokens=NEW_TOKENS, temperature=0.0) for w in workers]
    )
    for rank, (completion,) in enumerate(completions):
        if completion.token_ids != expected:
            sys.exit(f"worker {rank} generates {completion.token_ids}, the trainer {expected}")
    changed = sum(first[name] != truth[name] for name in truth)
    if not changed:
        sys.exit("nothing has changed since round 1: the trainer does not train")
    print(
        f"\nproof: {len(truth)} tensors agree byte for byte on the trainer and {len(workers)} workers; "
        f"{changed} of them differ from round 1;\n       all generate {expected}"
    )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipes.sync_once", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="train → sync → generate (default 3)")
    parser.add_argument("--steps", type=int, default=2, help="AdamW steps per round (default 2)")
    parser.add_argument(
        "--backend",
        default="shm,shm,gloo,gloo",
        help="one name, or one per worker, comma-separated (default shm,shm,gloo,gloo)",
    )
    parser.add_argument("--workers", type=int, default=4, help="inference actors (default 4)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--bucket-size-bytes", type=int, default=None)
    args = parser.parse_args(argv)
    names = args.backend.split(",")
    args.backend = names[0] if len(names) == 1 else names
    if len(names) > 1 and len(names) != args.workers:
        parser.error(f"--backend names {len(names)} backends for {args.workers} workers")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    began = time.monotonic()
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    trainer = TrainerActor.options(num_cpus=0).remote(model_builder(args, seed=0))
    workers = [
        InferenceActor.options(num_cpus=0).remote(model_builder(args, seed=1 + rank))
        for rank in range(args.workers)
    ]
    size = ray.get(trainer.apply.remote(count_parameters))
    print(f"{size:,} parameters, tied embeddings; 1 trainer, {args.workers} workers")
    config = WeightTransferConfig(backend=args.backend, bucket_size_bytes=args.bucket_size_bytes)
    first: dict[str, str] = {}
    with (
        Controller(workers, config) as controller,
        tqdm(total=3 * args.rounds, unit="phase") as bar,
    ):
        for round_ in range(args.rounds):
            bar.set_description(f"round {round_ + 1}: train")
            for step in range(args.steps):
                loss = ray.get(trainer.train_step.remote(batch(args, round_ * args.steps + step)))
            bar.update()
            bar.set_description(f"round {round_ + 1}: sync")
            report = controller.sync_weights(trainer)
            bar.update()
            bar.set_description(f"round {round_ + 1}: generate")
            ray.get([w.generate.remote([PROMPT], max_new_tokens=NEW_TOKENS) for w in workers])
            if not first:
                first = ray.get(trainer.apply.remote(fingerprints))
            bar.update()
            show(report, loss)
        bar.close()
        prove(trainer, workers, first)
    print(f"done in {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main()
