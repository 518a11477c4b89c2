"""Weights in a memory file: a trainer's parameters, placed where workers of the same host can read them.

`shm` then sends without copying: a worker is told where a tensor lies, and copies it from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from rayxfer.errors import ConfigError
from rayxfer.memfile import MemoryFile
from rayxfer.packing import align
from rayxfer.source import is_sharded, named_tensors

__all__ = ["share_memory"]

T = TypeVar("T", torch.nn.Module, Mapping[str, torch.Tensor])


def share_memory(model: T) -> T:
    """Move the memory of a model's tensors to one memory file, for `sync_weights` over `shm`.

    The tensors stay the objects that they are, with their values, shapes, strides and ties, so optimizers,
    hooks and references go on; only their memory is another. Do it once, before training; tensors that
    are replaced later (`load_state_dict(assign=True)`, `param.data = …`) are sent the ordinary way. Like
    torch's `share_memory`, it is no help across `fork`: a forked child shares the weights themselves.

    Args:
        model: a module (its parameters and persistent buffers) or a mapping of names to tensors, dense, on
            the CPU.

    Returns:
        the model itself.

    Raises:
        ConfigError: a tensor that is not dense or not on the CPU, by name; nothing was moved.
        TransferError: no room. BackendUnavailable: not on Linux.
    """
    if isinstance(model, torch.nn.Module):
        tensors: dict[str, Any] = named_tensors(model)
    elif isinstance(model, Mapping):
        tensors = dict(model)
    else:
        raise ConfigError(
            f"share_memory got a {type(model).__name__}: expected an nn.Module or a mapping of names to "
            "tensors"
        )
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in tensors.items():
        _check(name, tensor)
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage
    starts: dict[int, int] = {}
    end = 0
    for address, storage in storages.items():
        starts[address], end = end, align(end + storage.nbytes())
    if not end:
        return model
    file = MemoryFile(end)
    places: dict[int, torch.Tensor] = {}
    for address, storage in storages.items():
        place = file.bytes[starts[address] : starts[address] + storage.nbytes()]
        place.copy_(torch.empty(0, dtype=torch.uint8).set_(storage))
        places[address] = place
    moved: set[int] = set()
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if id(tensor) in moved or not storage.nbytes():
            continue
        moved.add(id(tensor))
        start = starts[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size()
        _point_to(tensor, file.bytes, start)
    return model


def _check(name: Any, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor) or is_sharded(tensor):
        raise ConfigError(
            f"share_memory: {name!r} is a {type(tensor).__name__}, not a plain tensor"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise ConfigError(
            f"share_memory: {name!r} is a {tensor.layout} tensor on {tensor.device}: only dense tensors on "
            "the CPU can be placed"
        )
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        raise ConfigError(
            f"share_memory: {name!r} is a lazy view, or made in inference mode: its memory cannot be moved"
        )


def _point_to(tensor: torch.Tensor, whole: torch.Tensor, start_bytes: int) -> None:
    """Let `tensor` lie in `whole` (flat uint8) from `start_bytes` on, with its own shape and strides."""
    size = tensor.element_size()
    base = torch.empty(0, dtype=tensor.dtype)
    offset = whole.storage_offset() + start_bytes
    base.set_(whole.untyped_storage(), offset // size, tensor.shape, tensor.stride())
    tensor.data = base
