"""What vLLM's own loaders would do with an offer, without a byte: an exact preflight.

The model is shadowed: the same module objects in shape and attributes, but with parameters on the meta
device as they were before vLLM repacked them. The shadow's `load_weights` is run on meta tensors. Names
that nobody knows and shapes that do not fit raise there as they would in earnest; every copy that it makes
is counted, so what an offer would leave unwritten is known, and which layers it would touch. The live model
is only read, so requests may run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rayxfer.metadata import ParamMeta

__all__ = ["DryRun", "dry_run"]


@dataclass
class DryRun:
    """What came out.

    Attributes:
        problem: vLLM's own objection, or None; `name`: the tensor it was at.
        missing: parameters that would not be (wholly) written: name → (elements written, elements).
        parts: offered name → parameters that it is written to.
        returned: what `load_weights` returned.
        known: False: vLLM's loaders cannot be run on meta tensors here; nothing else was found out.
    """

    problem: str | None = None
    name: str | None = None
    missing: dict[str, tuple[int, int]] = field(default_factory=dict)
    parts: dict[str, set[str]] = field(default_factory=dict)
    returned: set[str] = field(default_factory=set)
    known: bool = True


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Elements written, by the storage they are written to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: dict[int, int] = {}
        self.by: dict[int, set[str]] = {}
        self.current = ""

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
        return func(*args, **(kwargs or {}))


def dry_run(model: torch.nn.Module, metadata: Sequence[ParamMeta], *, tied_head: bool) -> DryRun:
    """Run the model's `load_weights` on a shadow. `tied_head`: the output head is the embedding."""
    shadow, kept = _shadow(model)
    out, counter = DryRun(), _Counter()

    def offers() -> Iterator[tuple[str, torch.Tensor]]:
        for meta in metadata:
            counter.current = out.name = meta.name
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    try:
        with counter, torch.no_grad():
            returned = shadow.load_weights(offers())
    except NotImplementedError:
        out.known = False  # an operation without a meta kernel, such as reading a value
        return out
    except Exception as error:
        if isinstance(error, RuntimeError) and "on meta tensors" in str(error):
            out.known = False  # a value was asked for
            return out
        out.problem = f"{type(error).__name__}: {error}"
        return out
    finally:
        del kept
    out.name = None
    out.returned = {str(name) for name in returned or ()}
    _account(model, shadow, counter, out, tied_head)
    return out


def _account(
    model: torch.nn.Module,
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


def _shadow(model: torch.nn.Module) -> tuple[Any, list[Any]]:
    """The shadow, and what has to stay alive while it is used."""
    from vllm.model_executor.model_loader.reload.layerwise import (
        _get_original_loader,
        get_layerwise_info,
    )
    from vllm.model_executor.model_loader.reload.meta import SKIP_MODULES, to_meta_tensor
    from vllm.model_executor.model_loader.reload.sanitize import restore_layer_refs

    made: dict[int, torch.nn.Module] = {}
    kept: list[Any] = []

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
            whole = {**{k: p for k, p in layer._parameters.items() if p is not None}}
            for gone in set(whole) - set(restore_params):
                if restore_params and whole[gone].numel() == 0:
                    del whole[gone]  # made by the repacking
            params: dict[str, Any] = {}
            for name, tensor in {**whole, **restore_params}.items():
                meta = restore_layer_refs(to_meta_tensor(tensor), layer)
                if hasattr(meta, "weight_loader"):
                    meta.weight_loader = _get_original_loader(meta)
                params[name] = meta
            kept.append(params)
            twin.__dict__["_parameters"] = params
            # some loaders write buffers: neither the live ones, nor in vain
            buffers = {
                name: None if tensor is None else to_meta_tensor(tensor)
                for name, tensor in layer._buffers.items()
            }
            kept.append(buffers)
            twin.__dict__["_buffers"] = buffers
        twin.__dict__["_modules"] = {
            name: None if child is None else shadow_of(child)
            for name, child in layer._modules.items()
        }
        return twin

    return shadow_of(model), kept
