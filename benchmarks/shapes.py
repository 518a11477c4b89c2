"""Names and shapes of the tensors that travel: those of real models, or all alike."""

from __future__ import annotations

import dataclasses
import math

Shapes = dict[str, tuple[int, ...]]

ITEM_BYTES = 2
"""All weights here are bf16."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """The sizes in a model's config.json that decide its tensors.

    Attributes:
        qk_norm: a norm for queries and keys in each layer (Qwen3).
        experts: per layer; `inter` is then one expert's width. 0: a dense MLP.
    """

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qk_norm: bool = False
    experts: int = 0

    def body(self, divisor: int = 1) -> Shapes:
        """Everything but the embeddings, with each width divided by `divisor`."""

        def width(value: int) -> int:
            return max(1, value // divisor)

        hidden, inter = width(self.hidden), width(self.inter)
        queries = width(self.heads * self.head_dim)
        keys = width(self.kv_heads * self.head_dim)
        shapes: Shapes = {}
        for layer in range(self.layers):
            at = f"model.layers.{layer}"
            attention: dict[str, tuple[int, ...]] = {
                "q_proj": (queries, hidden),
                "k_proj": (keys, hidden),
                "v_proj": (keys, hidden),
                "o_proj": (hidden, queries),
            }
            if self.qk_norm:
                attention |= {"q_norm": (self.head_dim,), "k_norm": (self.head_dim,)}
            shapes |= {f"{at}.self_attn.{name}.weight": s for name, s in attention.items()}
            if self.experts:
                shapes[f"{at}.mlp.gate.weight"] = (self.experts, hidden)
            blocks = [f"{at}.mlp.experts.{i}" for i in range(self.experts)] or [f"{at}.mlp"]
            for block in blocks:
                shapes[f"{block}.gate_proj.weight"] = (inter, hidden)
                shapes[f"{block}.up_proj.weight"] = (inter, hidden)
                shapes[f"{block}.down_proj.weight"] = (hidden, inter)
            shapes[f"{at}.input_layernorm.weight"] = (hidden,)
            shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        shapes["model.norm.weight"] = (hidden,)
        return shapes

    def scaled(self, size_bytes: int) -> Shapes:
        """This model made to fit `size_bytes`: widths divided by the smallest power of two that
        lets the layers fit, and a vocabulary that fills the rest (at most the model's own)."""
        divisor = 1
        while divisor < self.hidden and num_bytes(self.body(divisor)) >= size_bytes:
            divisor *= 2
        shapes = self.body(divisor)
        hidden = max(1, self.hidden // divisor)
        tables = ["model.embed_tokens.weight"] + ["lm_head.weight"] * (not self.tied)
        room = (size_bytes - num_bytes(shapes)) // (hidden * ITEM_BYTES * len(tables))
        rows = max(1, min(self.vocab, room))
        return {tables[0]: (rows, hidden), **shapes, **dict.fromkeys(tables[1:], (rows, hidden))}


# From each model's config.json on the Hugging Face Hub.
MODELS = {
    # Qwen/Qwen3-0.6B: 310 tensors, 1.11 GiB; at 1 GiB all but its vocabulary is as it is
    "qwen3": Decoder(1024, 3072, 28, 16, 8, 128, 151936, tied=True, qk_norm=True),
    # meta-llama/Llama-3.1-8B: 291 tensors, 15 GiB
    "llama": Decoder(4096, 14336, 32, 32, 8, 128, 128256),
    # Qwen/Qwen3-30B-A3B: 18,867 tensors (18,432 of them in experts), 57 GiB
    "moe": Decoder(2048, 768, 48, 32, 4, 128, 151936, qk_norm=True, experts=128),
}


def num_bytes(shapes: Shapes) -> int:
    return sum(math.prod(shape) for shape in shapes.values()) * ITEM_BYTES


def equal_shapes(size_bytes: int, tensors: int) -> Shapes:
    """`tensors` tensors of equal size, together at most `size_bytes`."""
    elements = max(1, size_bytes // tensors // ITEM_BYTES)
    return {f"layers.{index}.weight": (elements,) for index in range(tensors)}


def shapes_of(kind: str, size_bytes: int, tensors: int = 200) -> Shapes:
    """kind: "equal" (then `tensors` of them), or one of MODELS."""
    if kind == "equal":
        return equal_shapes(size_bytes, tensors)
    return MODELS[kind].scaled(size_bytes)
