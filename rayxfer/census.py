"""Whether a module still holds the very tensors that it held before, found out cheaply.

Walking a module by its names costs more than copying small weights into it, and what was found out
about its tensors stays true as long as they are the same ones. One `Census` is taken when they are looked
at; later `holds` compares without making a name.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from rayxfer.metadata import in_parts
from rayxfer.source import USUAL, addresses_of, is_plain_module, named_tensors

__all__ = ["Census"]


class Census:
    """The named tensors of a module (see `named_tensors`), and what tells whether they changed.

    Attributes:
        tensors: name → tensor.
        exact: False for a module that is to be looked at by its own methods alone (it overrides
            them), or that holds tensors of other classes: `holds` never says yes then.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors = named_tensors(module)
        self._module = module
        self.exact = False
        try:
            self._structure, values = _walk(module)
        except (AttributeError, KeyError, TypeError):  # a scripted module keeps them elsewhere
            return
        found = set(map(id, values))
        all_there = all(id(tensor) in found for tensor in self.tensors.values())
        if is_plain_module(module) and all_there and all(map(_has_memory, values)):
            self._geometry = _geometry(values)
            self._identities = list(map(id, values))
            self.exact = True

    def moved(self, addresses: Mapping[int, int]) -> None:
        """Tensors, by their `id`, have other memory now, which begins there; all else is as before."""
        if self.exact:
            before = self._geometry[0]
            self._geometry[0] = list(map(addresses.get, self._identities, before))

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether `module` is the same, with the same tensors under the same names, in the same
        memory, of the same dtypes and shapes."""
        if not self.exact or module is not self._module:
            return False
        structure, values = _walk(module)
        return structure == self._structure and _has_geometry(values, self._geometry)

    def holds_memory(self, module: torch.nn.Module) -> bool:
        """`holds`, but for how the memory is laid out."""
        if not self.exact or module is not self._module:
            return False
        structure, values = _walk(module)
        return structure == self._structure and addresses_of(values) == self._geometry[0]


def _has_memory(tensor: torch.Tensor) -> bool:
    return type(tensor) in USUAL and tensor.device.type != "meta"


def _walk(module: torch.nn.Module) -> tuple[list[Any], list[torch.Tensor]]:
    """All names and identities in the tree of modules, in a fixed order; and its tensors."""
    modules: list[Any] = [module]
    keys: list[str] = []
    values: list[Any] = []
    for one in modules:  # grows
        if one is None:
            continue
        inside = one.__dict__
        if children := inside["_modules"]:
            keys.extend(children)
            modules.extend(children.values())
        if parameters := inside["_parameters"]:
            keys.extend(parameters)
            values.extend(parameters.values())
        if buffers := inside["_buffers"]:
            keys.extend(buffers)
            keys.extend(inside["_non_persistent_buffers_set"])
            values.extend(buffers.values())
    structure = [keys, list(map(id, modules)), list(map(id, values))]
    return structure, [value for value in values if value is not None]


def _geometry(tensors: list[torch.Tensor]) -> list[Any]:
    return [
        addresses_of(tensors),
        [tensor.shape for tensor in tensors],
        # the strides of what is contiguous follow from its shape, and to ask for them costs twice as much
        [None if tensor.is_contiguous() else tensor.stride() for tensor in tensors],
        [tensor.dtype for tensor in tensors],
    ]


def _has_geometry(tensors: list[torch.Tensor], geometry: list[Any]) -> bool:
    """Compared one by one: lists of ten thousand shapes that live at a time bring on Python's garbage
    collector, which looks at all of the process."""
    return len(tensors) == len(geometry[0]) and in_parts(_are, tensors, *geometry)


def _are(
    tensors: list[torch.Tensor],
    addresses: list[int],
    shapes: list[torch.Size],
    strides: list[tuple[int, ...] | None],
    dtypes: list[torch.dtype],
) -> bool:
    if not (
        addresses_of(tensors) == addresses
        and all(map(operator.eq, map(_SHAPE, tensors), shapes))
        and all(map(operator.is_, map(_DTYPE, tensors), dtypes))
    ):
        return False
    if not any(strides):
        return all(map(torch.Tensor.is_contiguous, tensors))
    return all(
        tensor.is_contiguous() if stride is None else tensor.stride() == stride
        for tensor, stride in zip(tensors, strides, strict=True)
    )


_SHAPE, _DTYPE = operator.attrgetter("shape"), operator.attrgetter("dtype")
