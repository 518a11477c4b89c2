"""What vLLM's own loaders would do with an offer, without a byte: an exact preflight.

The model is shadowed: the same module objects in shape and attributes, but with parameters on the meta
device as they were before vLLM repacked them. The shadow's `load_weights` is run on meta tensors. Names
that nobody knows and most shapes that do not fit raise there as they would in earnest. Every copy that it
makes is counted on both sides: what an offer would leave unwritten, and what of an offer would be left
unread, for vLLM cuts what is too large to size without a word. It also casts anything to anything, so
dtypes are compared here. The live model is only read, so requests may run meanwhile.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayxfer.loader import compare_dtypes
from rayxfer.metadata import ParamMeta

__all__ = ["DryRun", "dry_run"]


@dataclass
class DryRun:
    """What came out.

    Attributes:
        problems: what is wrong with which offered tensor (None: with none in particular).
        casts: offered name → "from -> to".
        missing: parameters that would not be (wholly) written: name → (elements written, elements).
        parts: offered name → parameters that it is written to.
        returned: what `load_weights` returned.
        known: False: vLLM's loaders cannot be run on meta tensors here; nothing else was found out.
    """

    problems: list[tuple[str | None, str]] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    parts: dict[str, set[str]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    known: bool = True


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements written, by the storage they are written to; elements read, by offered name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, int] = {}
        self.by: dict[int, set[str]] = {}
        self.read: dict[str, int] = {}
        self.current = ""
        self._offered: dict[int, str] = {}
        self._kept: list[torch.Tensor] = []  # while they live, their storages are nobody else's

    def offer(self, meta: ParamMeta) -> torch.Tensor:
        self.current = meta.name
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
        self._offered[tensor.untyped_storage()._cdata] = meta.name
        self._kept.append(tensor)
        return tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (
            torch.ops.aten.copy_.default,
            torch.ops.aten.fill_.Scalar,
            torch.ops.aten.fill_.Tensor,
            torch.ops.aten.zero_.default,
        ):
            key = args[0].untyped_storage()._cdata
            self.written[key] = self.written.get(key, 0) + args[0].numel()
            self.by.setdefault(key, set()).add(self.current)
            if func is torch.ops.aten.copy_.default:
                name = self._offered.get(args[1].untyped_storage()._cdata)
                if name is not None:
                    self.read[name] = self.read.get(name, 0) + args[1].numel()
        return func(*args, **(kwargs or {}))


def dry_run(
    model: torch.nn.Module,
    metadata: Sequence[ParamMeta],
    *,
    tied_head: bool,
    quantized: bool = False,
    tensor_parallel_size: int = 1,
) -> DryRun:
    """Run the model's `load_weights` on a shadow.

    Args:
        model: vLLM's.
        metadata: the offer.
        tied_head: the output head is the embedding.
        quantized: the worker's dtypes are not those of checkpoints.
        tensor_parallel_size: each rank reads a share of most tensors.
    """
    shadow = _shadow(model)
    out, counter = DryRun(), _Counter()
    at = [-1]

    def offers(start: int) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(start, len(metadata)):
            at[0] = index
            yield metadata[index].name, counter.offer(metadata[index])

    while at[0] < len(metadata) - 1 and len(out.problems) < _MOST_PROBLEMS:
        start = at[0] + 1
        try:
            with counter, torch.no_grad():
                returned = shadow.load_weights(offers(start))
            out.returned |= {str(name) for name in returned or ()}
            break
        except NotImplementedError:
            out.known = False  # an operation without a meta kernel, such as reading a value
        except Exception as error:
            if isinstance(error, RuntimeError) and "on meta tensors" in str(error):
                out.known = False  # a value was asked for
            elif at[0] < start:
                out.problems.append((None, _objection(error)))
                break
            else:  # go on behind it, so that all problems come out at once
                meta = metadata[at[0]]
                text = f"vLLM does not take {meta.name!r} ({meta}): {_objection(error)}"
                out.problems.append((meta.name, text))
        if not out.known:
            return out
    _account(shadow, counter, out, tied_head)
    _compare(metadata, shadow, counter, out, quantized, tensor_parallel_size)
    return out


_MOST_PROBLEMS = 20
_OBJECTION_CHARACTERS = 240


def _objection(error: Exception) -> str:
    """vLLM's own words, without its list of everything else; where it has none, the line that objected."""
    text = " ".join(str(error).split("The available parameters")[0].split())
    if not text:
        text = str(traceback.extract_tb(error.__traceback__)[-1].line)
    return f"{type(error).__name__}: {text[:_OBJECTION_CHARACTERS]}"


def _compare(
    metadata: Sequence[ParamMeta],
    shadow: torch.nn.Module,
    counter: _Counter,
    out: DryRun,
    quantized: bool,
    tensor_parallel_size: int,
) -> None:
    """Dtypes, and what would be left unread, of the tensors that vLLM takes."""
    refused = {name for name, _ in out.problems}
    parameters = dict(shadow.named_parameters(remove_duplicate=False))
    padded = {
        name
        for name, layer in shadow.named_modules()
        if type(layer).__name__ in ("VocabParallelEmbedding", "ParallelLMHead")
    }
    for meta in metadata:
        targets = sorted(out.parts.get(meta.name, ()))
        if meta.name in refused or not targets:
            continue
        for target in targets if not quantized else ():
            dtype = parameters[target].dtype
            # vLLM keeps some biases in fp32 on a CPU
            widened = target.endswith("bias") and dtype == torch.float32
            cast, problem = compare_dtypes(meta.name, meta.dtype, dtype)
            if problem is not None:
                out.problems.append((meta.name, problem))
                break
            if cast is not None and not widened:
                out.casts[meta.name] = cast
        count = meta.numel
        read = counter.read.get(meta.name, 0)
        shared = any(target.rpartition(".")[0] in padded for target in targets)
        least = count if tensor_parallel_size == 1 else -(-count // tensor_parallel_size)
        if 0 < read < least and not (shared and tensor_parallel_size > 1):
            text = (
                f"shape mismatch at {meta.name!r}: offered {meta}, of which vLLM would use {read:,} of "
                f"{count:,} elements for {', '.join(targets)}"
            )
            out.problems.append((meta.name, text))


def _account(
    shadow: torch.nn.Module,
    counter: _Counter,
    out: DryRun,
    tied_head: bool,
) -> None:
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

    for prefix, layer in shadow.named_modules():
        if is_deferred_attention_layer(layer):
            continue  # scales, which checkpoints may leave out
        tied = tied_head and type(layer).__name__ == "ParallelLMHead"
        for leaf, parameter in layer._parameters.items():
            if parameter is None or leaf in SKIP_LOAD_TENSORS or not parameter.is_meta:
                continue
            name = f"{prefix}.{leaf}" if prefix else leaf
            key = parameter.untyped_storage()._cdata
            for offered in counter.by.get(key, ()):
                out.parts.setdefault(offered, set()).add(name)
            need = int(getattr(parameter, "weight_loader_numel", parameter.numel()))
            written = min(counter.written.get(key, 0), need)
            if written < need and not tied:
                out.missing[name] = (written, need)


def _shadow(model: torch.nn.Module) -> Any:
    """The twin of a model; it holds the only references to its tensors."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    made: dict[int, torch.nn.Module] = {}

    def shadow_of(layer: torch.nn.Module) -> torch.nn.Module:
        known = made.get(id(layer))
        if known is not None:
            return known
        twin = made[id(layer)] = type(layer).__new__(type(layer))
        twin.__dict__ = dict(layer.__dict__)
        if type(layer).__name__ not in SKIP_MODULES:
            info = get_layerwise_info(layer)
            restore_params, _ = info.restore_metadata
            # parameters that are never moved to meta (biases) count as they are
            whole = {k: p for k, p in layer._parameters.items() if p is not None}
            for gone in set(whole) - set(restore_params):
                if restore_params and whole[gone].numel() == 0:
                    del whole[gone]  # made by the repacking
            params: dict[str, Any] = {}
            for name, tensor in {**whole, **restore_params}.items():
                meta = restore_layer_refs(to_meta_tensor(tensor), layer)
                if hasattr(meta, "weight_loader"):
                    meta.weight_loader = _get_original_loader(meta)
                params[name] = meta
            twin.__dict__["_parameters"] = params
            # some loaders write buffers: neither the live ones, nor in vain
            twin.__dict__["_buffers"] = {
                name: None if tensor is None else to_meta_tensor(tensor)
                for name, tensor in layer._buffers.items()
            }
        twin.__dict__["_modules"] = {
            name: None if child is None else shadow_of(child)
            for name, child in layer._modules.items()
        }
        return twin

    return shadow_of(model)
