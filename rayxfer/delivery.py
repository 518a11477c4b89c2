"""One round at one worker: what was offered, and what of it has arrived. The engine hands weights over to a
`Delivery`, which counts, checks and digests them before the loader gets them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rayxfer.digest import Digest
from rayxfer.errors import ContractError, TransferError, portable_cause
from rayxfer.loader import Claim, WeightLoader
from rayxfer.metadata import (
    Columns,
    ParamMeta,
    dtype_name,
    metadata_digest,
    metadata_from_wire,
)
from rayxfer.report import WorkerState
from rayxfer.source import USUAL

__all__ = ["Delivery", "Offer", "Round", "RoundAborted"]


class RoundAborted(TransferError):
    """Raised out of `load_weights` when its round was aborted."""


@dataclass
class Round:
    """Everything about the round under way."""

    round_id: int
    attempt: int
    version: int
    metadata: tuple[ParamMeta, ...]
    partial: bool
    update_info: Any
    loader: WeightLoader
    digest: Digest | None
    previous: WorkerState
    checkpoint_format: bool
    casts: bool
    columns: _Columns
    aborted: threading.Event = field(default_factory=threading.Event)
    pushed: dict[int, threading.Event] = field(default_factory=dict)
    pausing: bool = False
    prove: bool = True
    gate: int | None = None
    preflight: dict[str, Any] = field(default_factory=dict)
    voted: bool = False
    finished: bool = False


@dataclass(frozen=True)
class Offer:
    """What the sender offers, kept from round to round: it is sent again only when it changed."""

    digest: str
    metadata: tuple[ParamMeta, ...]
    wire: dict[str, Any]
    columns: _Columns

    @classmethod
    def read(cls, wire: Any, digest: str) -> Offer:
        metadata = metadata_from_wire(wire)
        if metadata_digest(metadata) != digest:
            raise ContractError("the metadata does not match its digest")
        fields = {k: wire[k] for k in ("names", "dtype_names", "shapes")}
        return cls(digest, metadata, fields, _Columns(metadata))


class _Columns(Columns):
    """An offer's metadata by columns: neighbours are compared in one go, not field by field."""

    def __init__(self, metadata: Sequence[ParamMeta]) -> None:
        super().__init__(metadata)
        self.index = {name: index for index, name in enumerate(self.names)}

    def neighbours(self, names: tuple[str, ...]) -> slice | None:
        """Where these names are in the offer, side by side in this order."""
        first = self.index.get(names[0]) if names else None
        if first is None:
            return None
        here = slice(first, first + len(names))
        return here if names == self.names[here] else None

    def run(self, weights: Sequence[tuple[str, torch.Tensor]]) -> slice | None:
        """Where `weights` are neighbours in the offer, and just as offered: their slice of it."""
        names, tensors = zip(*weights, strict=True) if weights else ((), ())
        here = self.neighbours(names)
        if here is None or not USUAL.issuperset(map(type, tensors)):
            return None
        fits = [tensor.dtype for tensor in tensors] == self.dtypes[here]
        fits = fits and [tensor.shape for tensor in tensors] == self.shapes[here]
        return here if fits else None


class Delivery:
    """The `load_weights` that an engine is given: counts, checks, digests, then loads.

    Attributes:
        copies_only: the loader keeps nothing; views are welcome.
        keeps: it uses what `keep` gives it where it lies.
    """

    def __init__(self, current: Round) -> None:
        self._round = current
        self._columns = current.columns
        self._index = current.columns.index
        self._handed = bytearray(len(current.metadata))
        self._delivered: list[int | torch.Tensor] = [0] * len(current.metadata)
        self._digest = None if current.loader.one_to_one else current.digest
        self.copies_only = current.loader.copies_only
        self.keeps = current.loader.keeps
        self.num_bytes = 0
        self.in_loader = False
        self.at_gate = False
        self.last_name: str | None = None
        self.loader_error: TransferError | None = None

    def landing(self, name: str) -> torch.Tensor | None:
        """Where the bytes of `name` may be written directly (flat uint8), or None. Follow up with
        `landed(name)`."""
        self._check_abort()
        if self.loader_error is not None:
            return None
        return self._round.loader.landing(self._take(name, claim=False))

    def landed(self, name: str) -> None:
        """All bytes of `landing(name)` were written."""
        index = self._take(name)
        self._round.loader.landed(index)
        self._count(name, self._round.metadata[index].num_bytes)

    def landings(self, names: tuple[str, ...], sizes: Sequence[int]) -> Sequence[int] | None:
        """The addresses to which the bytes of these tensors may be copied, neighbours in the offer, each
        of so many bytes; None where not every one has such a place in the host's memory. Follow up with
        `landed_all(names)`."""
        self._check_abort()
        here = self._columns.neighbours(names)
        if self.loader_error is not None or here is None or 1 in self._handed[here]:
            return None
        if self._columns.num_bytes[here] != sizes:
            return None
        return self._round.loader.landings(here)

    def landed_all(self, names: tuple[str, ...]) -> None:
        """All bytes of `landings(names, …)` were written."""
        here = self._columns.neighbours(names)
        assert here is not None
        self._handed[here] = b"\1" * len(names)
        self._round.loader.landed_all(here)
        self._count(names[-1], sum(self._columns.num_bytes[here]))
        self._check_abort()

    def progress(self, num_bytes: int) -> None:
        """Bytes arrived that no `load_weights` call has shown yet: keeps a slow link from looking
        stalled, and is where an abort gets through."""
        self.num_bytes += num_bytes
        self._check_abort()

    def __call__(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._load(weights, self._round.loader.load)

    def _load(
        self,
        weights: Sequence[tuple[str, torch.Tensor]],
        load: Callable[[list[tuple[int, torch.Tensor]]], None],
    ) -> None:
        self._check_abort()
        if not isinstance(weights, (list, tuple)):
            weights = list(weights)
        items: list[tuple[int, torch.Tensor]] = []
        run = self._columns.run(weights)
        if run is not None and 1 not in self._handed[run]:
            self._handed[run] = b"\1" * len(weights)
            items = [(index, tensor) for index, (_, tensor) in enumerate(weights, start=run.start)]
        else:  # one by one, to name the first offender
            for name, tensor in weights:
                index = self._take(name)
                self._compare(self._round.metadata[index], tensor)
                items.append((index, tensor))
        if self._digest is not None:
            for index, tensor in items:
                self._delivered[index] = self._digest.later(tensor)
        if self.loader_error is None and items:
            self.in_loader = True
            try:
                load(items)
            except Exception as error:  # the user's loader: keep draining, so that others go on
                first = self._round.metadata[items[0][0]].name
                text = f"the loader raised at {first!r}: {type(error).__name__}: {error}"
                self.loader_error = TransferError(
                    text, phase="load", name=first, cause=portable_cause(error)
                )
            finally:
                self.in_loader = False
        if items:
            sizes = self._columns.num_bytes
            self._count(weights[-1][0], sum([sizes[index] for index, _ in items]))
        self._check_abort()

    def keep(
        self,
        weights: Sequence[tuple[str, torch.Tensor]],
        file: Any,
        claim: Claim,
    ) -> None:
        """As a call, with tensors in a file, which stay as they are while it is claimed: those may be used
        where they lie. See `rayxfer.mapped`."""
        loader = self._round.loader
        if loader.keeps:
            self._load(weights, lambda items: loader.keep(items, file, claim))
        elif loader.copies_only:
            self(weights)
        else:
            self([(name, tensor.clone()) for name, tensor in weights])

    def _check_abort(self) -> None:
        if self._round.aborted.is_set():
            raise RoundAborted(
                f"round {self._round.round_id} was aborted",
                phase="update",
                weight_version=self._round.version,
                name=self.last_name,
            )

    def _count(self, name: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.last_name = name

    def _take(self, name: str, *, claim: bool = True) -> int:
        index = self._index.get(name)
        if index is None:
            raise ContractError(f"the engine delivered {name!r}, which was not offered", name=name)
        if self._handed[index]:
            raise ContractError(f"the engine delivered {name!r} twice", name=name)
        if claim:
            self._handed[index] = 1
        return index

    @staticmethod
    def _compare(meta: ParamMeta, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, torch.Tensor):
            raise ContractError(
                f"the engine delivered a {type(tensor).__name__} as {meta.name!r}", name=meta.name
            )
        if tensor.dtype != meta.dtype or tuple(tensor.shape) != meta.shape:
            raise ContractError(
                f"the engine delivered {meta.name!r} as {dtype_name(tensor.dtype)}"
                f"{list(tensor.shape)}, offered was {meta}",
                name=meta.name,
            )

    def check_complete(self) -> None:
        if 0 not in self._handed:
            return
        missing = [
            m.name
            for m, handed in zip(self._round.metadata, self._handed, strict=True)
            if not handed
        ]
        if missing:
            total = len(self._handed)
            raise ContractError(
                f"the engine delivered {total - len(missing)} of {total} tensors; the first missing "
                f"is {missing[0]!r}",
                name=missing[0],
            )

    def delivered_digests(self) -> list[int]:
        return (
            [0] * len(self._delivered)
            if self._digest is None
            else self._digest.settle(self._delivered)
        )
