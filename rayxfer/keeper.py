"""`retain="host"`: one more copy of the weights, as they travelled, on the controller's host.

The keeper is a hidden member of the fleet. It takes part in every round like a worker, serves nothing,
and gives the committed version to whoever joins when no peer can: it holds names and wire dtypes, so
what it sends is exactly what the trainer sent, to any kind of loader.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from rayxfer.loader import Preflight, WeightLoader
from rayxfer.metadata import ParamMeta
from rayxfer.packing import as_bytes
from rayxfer.source import WeightSource
from rayxfer.worker import WorkerMixin

__all__ = ["Keeper"]


class Keeper(WorkerMixin):
    """The plain class; `Controller` makes a Ray actor of it."""

    def __init__(self) -> None:
        store = _Store()
        self.rayxfer_bind(
            torch.nn.Module(),
            make_loader=lambda: _KeeperLoader(store),
            make_source=lambda: _KeeperSource(store),
        )


class _Store:
    """What is kept, by name."""

    def __init__(self) -> None:
        self.metadata: dict[str, ParamMeta] = {}
        self.tensors: dict[str, torch.Tensor] = {}

    def place(self, meta: ParamMeta) -> torch.Tensor:
        """Memory for one tensor: what is there, if it fits."""
        tensor = self.tensors.get(meta.name)
        if tensor is None or tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
            tensor = self.tensors[meta.name] = torch.empty(meta.shape, dtype=meta.dtype)
        self.metadata[meta.name] = meta
        return tensor


class _KeeperSource(WeightSource):
    """What the keeper gives: the last full offer, and the parts that came after it."""

    stable = True

    def __init__(self, store: _Store) -> None:
        self._store = store

    def metadata(self) -> list[ParamMeta]:
        return list(self._store.metadata.values())

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._store.metadata:
            yield name, self._store.tensors[name]


class _KeeperLoader(WeightLoader):
    """Takes anything: whether an offer fits is for the workers to say."""

    copies_only = True
    one_to_one = True

    def __init__(self, store: _Store) -> None:
        self._store = store
        self._offer: tuple[ParamMeta, ...] = ()
        self._partial = False
        self._touched = False

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        self._offer, self._partial = tuple(metadata), partial
        return Preflight()

    def _place(self, index: int) -> torch.Tensor:
        if not self._touched:
            self._touched = True
            if not self._partial:
                wanted = {meta.name for meta in self._offer}
                for name in [n for n in self._store.metadata if n not in wanted]:
                    del self._store.metadata[name], self._store.tensors[name]
        return self._store.place(self._offer[index])

    def landing(self, index: int) -> torch.Tensor | None:
        return as_bytes(self._place(index))

    def landed(self, index: int) -> None:
        """Written in place: nothing to do."""

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        for index, tensor in items:
            self._place(index).copy_(tensor)

    def loaded_digests(self) -> list[int]:
        return self.digest.many(self._store.tensors[meta.name] for meta in self._offer)

    @property
    def touched(self) -> bool:
        return self._touched
