"""Loading by a function (a model's own `load_weights`, a user's), which does not show what it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

from rayxfer.errors import ContractError
from rayxfer.loader import EMPTY_OFFER, Preflight, WeightLoader
from rayxfer.metadata import ParamMeta
from rayxfer.source import tie_key

__all__ = ["OpaqueLoader", "StagedLoader"]


class OpaqueLoader(WeightLoader):
    """Hands tensors to a function that does what it likes with them.

    Args:
        function: takes `list[(name, tensor)]`; returns the set of the worker's parameter names
            that it wrote, or None (or anything else: the result of `load_state_dict`, say) if it
            does not say.
        module: the model, to know which parameters there are; None: unknown.
        learned: names of the last full sync → the targets that each was seen to write (empty
            before the first).
    """

    def __init__(
        self,
        function: Callable[[list[tuple[str, torch.Tensor]]], Any],
        *,
        module: torch.nn.Module | None = None,
        learned: dict[str, frozenset[str]] | None = None,
    ) -> None:
        self._function = function
        self._module = module
        self._known = learned or {}
        self._names: list[str] = []
        self._returned: set[str] = set()
        self._says = True
        self._touched = False
        self._partial = False
        self.seen = {}

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        out = Preflight()
        self._partial = partial
        self._names = [meta.name for meta in metadata]
        if not metadata and not partial:
            out.add(None, EMPTY_OFFER)
        if not self._known:
            return out
        offered = set(self._names)
        for name in self._names:
            if name not in self._known:
                out.add(name, f"unknown name {name!r}: the last full sync did not offer it")
        if not partial:
            for name in self._known:
                if name not in offered:
                    out.add(name, f"missing name {name!r}: the last full sync offered it")
            return out
        out.kept = [name for name in self._known if name not in offered]
        groups: dict[str, list[str]] = {}
        for name, targets in self._known.items():
            for target in targets:
                groups.setdefault(target, []).append(name)
        for target, parts in groups.items():
            inside = [name for name in parts if name in offered]
            if inside and len(inside) < len(parts):
                missing = next(name for name in parts if name not in offered)
                out.add(
                    missing,
                    f"missing name {missing!r}: {target!r} is made of {parts} and all its parts must "
                    "be offered together",
                )
        return out

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        self._touched = True
        # The first full sync goes one by one, to learn which names make which parameter.
        learning = not self._known and not self._partial
        chunks = [[item] for item in items] if learning else [items]
        for chunk in chunks:
            pairs = [(self._names[index], tensor) for index, tensor in chunk]
            names = _names(self._function(pairs))
            if names is None:
                self._says = False
            else:
                self._returned |= names
            if learning:
                self.seen[pairs[0][0]] = frozenset(names or ())

    def unproven(self) -> list[str] | None:
        if not self._says or self._module is None or self._partial:
            return None
        groups: dict[Any, list[str]] = {}
        for name, parameter in self._module.named_parameters(remove_duplicate=False):
            groups.setdefault(tie_key(parameter), []).append(name)
        return [names[0] for names in groups.values() if not self._returned.intersection(names)]

    @property
    def touched(self) -> bool:
        return self._touched


def _names(result: Any) -> set[str] | None:
    """What a loader returned, where that is a collection of names."""
    if isinstance(result, (Set, list, tuple)) and all(isinstance(name, str) for name in result):
        return set(result)
    return None


class StagedLoader(WeightLoader):
    """Keeps what it is given and lets an opaque loader have it at commit: until then nothing changes.

    Costs one more copy of what is offered. What the inner loader makes of it is known only after
    the version was recorded, so it is not part of the vote; if it raises then, the worker is TORN.
    """

    def __init__(self, inner: WeightLoader) -> None:
        self._inner = inner
        self._kept: list[list[tuple[int, torch.Tensor]]] = []

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        return self._inner.preflight(metadata, partial=partial, memo=memo)

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        self._kept.append(items)

    def commit(self) -> None:
        while self._kept:
            self._inner.load(self._kept.pop(0))
        self.seen = self._inner.seen
        missing = self._inner.unproven()
        if missing:
            raise ContractError(
                f"{len(missing)} parameters were not written, the first is {missing[0]!r}",
                name=missing[0],
            )

    def discard(self) -> None:
        self._kept = []

    @property
    def touched(self) -> bool:
        return self._inner.touched
