"""`load_mode="mapped"`: the worker's weights are the sender's memory file, shared by all workers of a host.

A round writes the version that nobody uses. At commit every parameter goes over to it (`param.data`),
which moves no bytes. What the worker writes to its weights stays its own (a private mapping), and is gone
with the next version.
"""

from __future__ import annotations

from typing import Any

import torch

from rayxfer.errors import ContractError
from rayxfer.loader import Claim, ModuleLoader, Preflight
from rayxfer.memfile import ForeignFile
from rayxfer.source import named_tensors, tie_key

__all__ = ["MappedLoader"]


class MappedLoader(ModuleLoader):
    """A staged load whose stage is a file that stays: what fits is kept where it lies, the rest (casts,
    fused or strided parameters, weights that arrive another way) is staged in memory of its own.
    """

    keeps = True

    def __init__(self, module: torch.nn.Module, **rules: Any) -> None:
        super().__init__(module, **rules, staged=True)
        self._memo: dict[str, Any] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._claims: dict[int, tuple[ForeignFile, Claim]] = {}
        self._own: list[list[Any]] = []
        self._live: dict[str, torch.Tensor] = {}

    def preflight(
        self, metadata: Any, *, partial: bool, memo: dict[str, Any] | None = None
    ) -> Preflight:
        self._memo = memo if memo is not None else {}
        out = super().preflight(metadata, partial=partial, memo=self._memo)
        if self._memo.get("movable_of") is not self._targets:
            movable = self._memo["movable"] = self._movable()
            self._memo["movable_of"] = self._targets
            stays = [index for index, together in enumerate(movable) if together is None]
            self._memo["stays"] = frozenset(stays)
        self._own = self._targets
        self._targets = list(self._targets)
        return out

    def _make_stage(self) -> None:
        """Not before it is known what has to be staged."""
        self._stage = {}

    def _movable(self) -> list[list[torch.Tensor] | None]:
        """For each offered tensor, those of the module that are to go over to another place together (a
        tie may be several objects); None where that cannot be done."""
        live = named_tensors(self._module)
        groups = _tied(live)
        sharing = _sharing(live, self._memo.get("file"))
        out: list[list[torch.Tensor] | None] = []
        for places in self._targets:
            base = places[0].tensor if len(places) == 1 else None
            key = None if base is None else tie_key(base)
            # not part of a parameter, of another dtype, in memory with others, or offered once for several
            fits = base is not None and places[0].plain and not base.is_inference()
            movable = fits and key in groups and key not in sharing and key is not None
            out.append(groups[key] if movable else None)
        return out

    # ---- loading --------------------------------------------------------------------------------

    def begin(self) -> None:
        left: ForeignFile | None = self._memo.pop("left", None)
        if left is not None:
            left.hurry()  # while the sender writes

    def keep(self, items: list[tuple[int, torch.Tensor]], file: ForeignFile, claim: Claim) -> None:
        """Take tensors that stay as they are for as long as this worker uses them: from `claim.going` on,
        until it has said `live` of another."""
        file.settle()
        stays: frozenset[int] = self._memo["stays"]
        rest = [item for item in items if item[0] in stays]
        going = [item for item in items if item[0] not in stays] if rest else items
        if going:
            self._kept.update(going)
            self._written.update([index for index, _ in going])
            self._claims[id(file)] = (file, claim)
        if rest:
            self.load(rest)

    def landing(self, index: int) -> torch.Tensor | None:
        self._stage_one(index)
        return super().landing(index)

    def landings(self, run: slice) -> None:
        return None  # those places may be in a file: see `landing`

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        for index, _ in items:
            self._stage_one(index)
        super().load(items)

    def _stage_one(self, index: int) -> None:
        if self._targets[index] is self._own[index]:
            if not self._stage:
                self._live = named_tensors(self._module)
            self._targets[index] = self._staged_targets(self._own[index], self._live)

    def commit(self) -> None:
        for _, claim in self._claims.values():
            claim.going()
        moved = self._leave_files()
        super().commit()
        movable = self._memo["movable"]
        for index, tensor in self._kept.items():
            address = tensor.data_ptr()
            for mine in movable[index]:
                mine.data = tensor
                moved[id(mine)] = address
            self._own[index][0].address = address
        self._memo["places"] = None
        census = self._memo["census"]
        census.moved(moved)
        if not census.holds_memory(self._module):
            self._check_places()
        self._kept = {}
        before = self._memo.get("file")
        for file, claim in self._claims.values():
            claim.live()
            self._memo["file"] = file
            if before is not None and before is not file:
                before.forget_writes()
                self._memo["left"] = before
        self._claims = {}

    def _leave_files(self) -> dict[int, int]:
        """Give memory of its own to what was mapped until now and is staged this time: the file that it
        lies in is about to be left. Returns the addresses of those tensors, by `id`."""
        moved: dict[int, int] = {}
        if not self._stage or not self._claims or self._memo.get("file") is None:
            return moved
        file: ForeignFile = self._memo["file"]
        groups = _tied(named_tensors(self._module))
        for base, _ in self._stage.values():
            if file.holds(base):
                own = torch.empty_like(base, requires_grad=False)
                for mine in groups[tie_key(base)]:
                    mine.data = own
                    moved[id(mine)] = own.data_ptr()
        for places in self._own if moved else ():
            for place in places:
                place.locate()
        return moved

    def _check_places(self) -> None:
        """What was proven is the file; that the module uses it is seen here.

        Raises:
            ContractError: it does not; this worker is TORN.
        """
        live = named_tensors(self._module)
        for index, tensor in self._kept.items():
            for place in self._own[index]:
                held = live.get(place.name)
                if held is None or held.data_ptr() != tensor.data_ptr():
                    raise ContractError(
                        f"{place.name!r} did not go over to the new version: it was replaced meanwhile",
                        name=place.name,
                    )

    def discard(self) -> None:
        super().discard()
        self._kept, self._claims = {}, {}

    # ---- proof ----------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        mine = any(claim.own for _, claim in self._claims.values())
        return bool(self._kept) and not self._stage and not mine

    @property
    def proves_shared(self) -> bool:
        return bool(self._kept)

    @property
    def commits_at_once(self) -> bool:
        return not self._stage

    def _held(self, live: dict[str, torch.Tensor], index: int, place: Any) -> torch.Tensor:
        kept = self._kept.get(index)
        return super()._held(live, index, place) if kept is None else kept


def _tied(live: dict[str, torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """The objects that are one tensor, by `tie_key`."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in live.values():
        same = groups.setdefault(tie_key(tensor), [])
        if not any(tensor is one for one in same):
            same.append(tensor)
    return groups


def _sharing(live: dict[str, torch.Tensor], file: ForeignFile | None) -> set[Any]:
    """Keys of tensors whose storage holds others as well, or is not plain memory. In the mapped file every
    tensor has its own place, though all are one storage: there it is overlaps that count."""
    storages: dict[int, set[Any]] = {}
    ranges: dict[Any, tuple[int, int]] = {}
    found: set[Any] = set()
    for tensor in live.values():
        key = tie_key(tensor)
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            found.add(key)
        elif file is not None and file.holds(tensor):
            ranges[key] = (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
        elif tensor.numel():
            storages.setdefault(tensor.untyped_storage().data_ptr(), set()).add(key)
    for keys in storages.values():
        if len(keys) > 1:
            found |= keys
    end, last = 0, None
    for key, (first, stop) in sorted(ranges.items(), key=lambda item: item[1]):
        if first < end:
            found |= {key, last}
        end, last = max(end, stop), key
    return found
