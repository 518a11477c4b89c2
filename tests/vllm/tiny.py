"""Tiny models that vLLM serves on a CPU, and what a fresh vLLM makes of the same weights on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
import torch

ENGINE_ARGS: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 128,
    "max_num_seqs": 8,
    "block_size": 32,
    "kv_cache_memory_bytes": 64 << 20,
}
VOCABULARY = 100

# longer than a block, so that vLLM's prefix cache holds it
PROMPTS = [[(7 * i + 3) % VOCABULARY for i in range(70)], [5, 6, 7]]

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}

KINDS = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""Plain; tied embeddings and biases; norms inside attention; experts."""


def build(kind: str, seed: int) -> torch.nn.Module:
    """A bfloat16 model of the Hugging Face library; equal seeds, equal weights."""
    import transformers as hf

    torch.manual_seed(seed)
    if kind == "llama":
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_COMMON))
    elif kind == "qwen2":
        model = hf.Qwen2ForCausalLM(hf.Qwen2Config(**_COMMON, tie_word_embeddings=True))
    elif kind == "qwen3":
        model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**_COMMON, head_dim=32))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
        model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_COMMON, **experts, head_dim=32))
    for parameter in model.parameters():  # biases and norms start out as zeros and ones
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    made: torch.nn.Module = model.to(torch.bfloat16)
    return made


def save(model: torch.nn.Module, path: Path) -> str:
    """Save it where vLLM can load it."""
    model.save_pretrained(path)  # type: ignore[operator]
    return str(path)


def answers(completions: Any) -> list[tuple[list[int], list[float]]]:
    """Tokens and their logprobs: what has to be equal, bit for bit."""
    return [(c.token_ids, c.logprobs) for c in completions]


def ask(worker: Any, *, max_new_tokens: int = 8, **kwargs: Any) -> list[tuple[Any, Any]]:
    """Greedy answers of a worker to the standing prompts."""
    reference = worker.generate.remote(PROMPTS, max_new_tokens=max_new_tokens, **kwargs)
    return answers(ray.get(reference, timeout=100))


@ray.remote(num_cpus=0)
class Fresh:
    """What a vLLM says that was started from a checkpoint. No rayxfer in it."""

    def __init__(self) -> None:
        import os

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

    def answers(self, path: str, max_new_tokens: int = 8) -> list[tuple[list[int], list[float]]]:
        from vllm import LLM, SamplingParams

        llm = LLM(path, skip_tokenizer_init=True, enforce_eager=True, **ENGINE_ARGS)
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in PROMPTS],
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=0,
                logprobs=0,
                ignore_eos=True,
                detokenize=False,
            ),
            use_tqdm=False,
        )
        found = []
        for output in outputs:
            one = output.outputs[0]
            tokens = list(one.token_ids)
            scores = [at[token].logprob for at, token in zip(one.logprobs, tokens, strict=True)]
            found.append((tokens, scores))
        return found
