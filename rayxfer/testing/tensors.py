"""What tests of transfers share: poison a receiver before, compare bytes after.

Values are never compared as numbers: NaN differs from itself, -0.0 equals 0.0, and bool, complex
and fp8 have no common arithmetic. Bytes have none of these problems.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

POISON = 0xA5


def poison(module: nn.Module) -> None:
    """Fill every parameter and every persistent buffer with the byte 0xA5.

    A receiver that was poisoned cannot pass by holding the right weights already, by being left
    as it was, or by being zeroed. Non-persistent buffers are never sent, so they are not touched.
    Only the elements of a tensor are written, not the rest of the storage that it may share.
    """
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None:
                _memory(parameter).fill_(POISON)
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                _memory(buffer).fill_(POISON)


def raw_bytes(tensor: Tensor) -> bytes:
    """The elements of a tensor in row-major order, bit for bit, whatever its dtype or strides."""
    # A lazily conjugated or negated view holds other bits than the values that it stands for.
    resolved = tensor.detach().resolve_conj().resolve_neg()
    return _memory(resolved).cpu().contiguous().numpy().tobytes()


def assert_same_bytes(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Fail unless both hold the same names with the same dtype, shape and bytes.

    The message names the first offender, in the order of `a`, then of `b`.
    """
    for name, left in a.items():
        if name not in b:
            raise AssertionError(f"{name!r} is only in the first mapping")
        right = b[name]
        if left.dtype != right.dtype:
            raise AssertionError(f"{name!r}: dtype {left.dtype} != {right.dtype}")
        if left.shape != right.shape:
            raise AssertionError(f"{name!r}: shape {tuple(left.shape)} != {tuple(right.shape)}")
        left_bytes, right_bytes = raw_bytes(left), raw_bytes(right)
        if left_bytes != right_bytes:
            raise AssertionError(f"{name!r}: {_first_difference(left_bytes, right_bytes)}")
    for name in b:
        if name not in a:
            raise AssertionError(f"{name!r} is only in the second mapping")


def relocate(module: nn.Module, move: Callable[[Tensor], Tensor]) -> nn.Module:
    """Put every storage of a module where `move` puts its bytes (flat uint8 to flat uint8).

    Parameters stay the same objects. Shapes, strides, offsets, lazy bits, ties and views of one
    storage stay as they are.
    """
    moved: dict[int, Tensor] = {}

    def there(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in moved:
            flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            moved[storage.data_ptr()] = move(flat.set_(storage))
        flat = moved[storage.data_ptr()]
        out = torch.empty(0, dtype=tensor.dtype, device=flat.device)
        out.set_(flat.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        out = out.conj() if tensor.is_conj() else out
        return torch._neg_view(out) if tensor.is_neg() else out

    seen: dict[int, Tensor] = {}
    for owner in module.modules():
        for parameter in owner._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen[id(parameter)] = parameter
                parameter.data = there(parameter.detach())
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                if id(buffer) not in seen:
                    seen[id(buffer)] = there(buffer)
                owner._buffers[name] = seen[id(buffer)]
    return module


def _memory(tensor: Tensor) -> Tensor:
    """The memory of each element as a uint8 view: the tensor's shape with its item size appended.

    `Tensor.view(torch.uint8)` would refuse 0-d tensors, many strides and lazy conjugation.
    """
    storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    storage.set_(tensor.untyped_storage())
    item_bytes = tensor.element_size()
    return storage.as_strided(
        (*tensor.shape, item_bytes),
        (*(stride * item_bytes for stride in tensor.stride()), 1),
        tensor.storage_offset() * item_bytes,
    )


def _first_difference(left: bytes, right: bytes) -> str:
    differing = [i for i, (x, y) in enumerate(zip(left, right, strict=True)) if x != y]
    first = differing[0]
    return (
        f"{len(differing)} of {len(left)} bytes differ, "
        f"the first at {first}: 0x{left[first]:02x} != 0x{right[first]:02x}"
    )
