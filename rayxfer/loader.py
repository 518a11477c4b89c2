"""How a worker loads: what it expects, where each tensor goes, and proof of what it now holds.

`ModuleLoader` (the default) knows every target: it is strict, casts where that is allowed, keeps ties,
fuses by rule, and can tell the digest of what it wrote. Others are in `opaque.py`, `mapped.py` and
`keeper.py`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from rayxfer.census import Census
from rayxfer.copying import copy_all, copy_bytes, has_memory, is_memory, streams
from rayxfer.digest import XXH3, Digest, digest, digest_memories, memory
from rayxfer.errors import ConfigError, ContractError
from rayxfer.metadata import ParamMeta, dtype_name
from rayxfer.packing import as_bytes
from rayxfer.source import FLOATS, USUAL, Rename, apply_rename, named_tensors, tie_key, tie_keys

__all__ = [
    "EMPTY_OFFER",
    "FuseRule",
    "ModuleLoader",
    "Preflight",
    "WeightLoader",
    "compare_dtypes",
]

EMPTY_OFFER = "empty offer: a full sync has to offer every tensor of the worker"


def compare_dtypes(
    name: str, offered: torch.dtype, expected: torch.dtype
) -> tuple[str | None, str | None]:
    """The rule for dtypes that differ: (cast "from -> to", problem), one of them None; both if equal."""
    if offered == expected:
        return None, None
    if offered in FLOATS and expected in FLOATS:
        return f"{dtype_name(offered)} -> {dtype_name(expected)}", None
    return None, (
        f"dtype mismatch at {name!r}: expected {dtype_name(expected)}, offered {dtype_name(offered)} "
        "(only fp64, fp32, fp16 and bf16 are cast)"
    )


@dataclass
class Preflight:
    """What a loader says about an offer before a byte moves.

    Attributes:
        problems: everything that is wrong, in words; empty means go.
        casts: name → "from -> to".
        kept: names of the worker that the offer leaves alone.
    """

    problems: list[str] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    first_name: str | None = None

    def add(self, name: str | None, text: str) -> None:
        if not self.problems:
            self.first_name = name
        self.problems.append(text)


@dataclass(frozen=True)
class FuseRule:
    """Several offered tensors make one parameter of the worker.

    `*` in the target matches anything and is put in the parts' `*`. Parts are laid side by side
    along `dim` in the order given; with `stack=True` the single part pattern holds "{}", which
    counts 0, 1, 2, … along a new leading dimension (experts).

    Raises:
        ConfigError: no parts, or `stack` with anything but one part pattern that holds "{}".

    Example:
        FuseRule("*.qkv_proj.weight", ("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"))
        FuseRule("*.experts.w1", ("*.experts.{}.w1.weight",), stack=True)
    """

    target: str
    parts: tuple[str, ...]
    dim: int = 0
    stack: bool = False

    def __post_init__(self) -> None:
        if self.stack and (len(self.parts) != 1 or "{}" not in self.parts[0]):
            raise ConfigError(
                f"fuse rule for {self.target!r}: stack=True takes one part with '{{}}' in it, not "
                f"{self.parts!r}"
            )
        if isinstance(self.parts, str) or not self.parts:
            raise ConfigError(f"fuse rule for {self.target!r}: {self.parts!r} is no tuple of parts")

    def parts_of(self, target_name: str, target: torch.Tensor) -> list[str] | None:
        """Names of the parts of a parameter, or None where the rule does not fit its name or has
        a `dim` that it lacks."""
        dim = 0 if self.stack else self.dim
        if not -target.dim() <= dim < target.dim():
            return None
        prefix, star, suffix = self.target.partition("*")
        if not star:
            if target_name != self.target:
                return None
            middle = ""
        else:
            if len(target_name) < len(prefix) + len(suffix):
                return None
            if not (target_name.startswith(prefix) and target_name.endswith(suffix)):
                return None
            middle = target_name[len(prefix) : len(target_name) - len(suffix)]
        names = [part.replace("*", middle) for part in self.parts]
        if self.stack:
            names = [names[0].replace("{}", str(i)) for i in range(target.shape[0])]
        return names


class Claim(Protocol):
    """What a worker says to the process that writes a file, about its use of it.

    Attributes:
        own: this worker's session writes it, and nobody else proves what is in it.
    """

    own: bool

    def going(self) -> None:
        """It is about to use the file. Raises TransferError: it must not, the file may be written again."""

    def live(self) -> None:
        """It uses this file, and no other of the same writer's."""


class WeightLoader:
    """What a session drives. One instance per round.

    Attributes:
        copies_only: True: `load` copies out of what it is given and keeps nothing, so it may be
            handed views of a buffer that is used again.
        one_to_one: True: every offered tensor has a known place, so `loaded` digests exist.
        keeps: True: it has `keep` (see `rayxfer.mapped`).
        digest: what the round's sender takes.
    """

    digest: Digest = XXH3
    copies_only = False
    one_to_one = False
    keeps = False
    seen: dict[str, frozenset[str]] = {}  # noqa: RUF012 - what this round taught, if anything

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        """Compare an offer with the worker. Changes nothing, but may remember in `memo`."""
        raise NotImplementedError

    def begin(self) -> None:
        """The update has begun; nothing has arrived yet."""

    def landing(self, index: int) -> torch.Tensor | None:
        """Where tensor `index` may be written directly (flat uint8), or None."""
        return None

    def landed(self, index: int) -> None:
        """The bytes of `landing(index)` are complete."""

    def landings(self, run: slice) -> Sequence[int] | None:
        """The addresses to which these tensors' bytes may be copied, or None if not all of them have one
        place each in the host's memory that takes bytes as they are."""
        return None

    def landed_all(self, run: slice) -> None:
        """The bytes of `landings(run)` are complete."""

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        """Take some tensors, by their index in the metadata."""
        raise NotImplementedError

    def keep(self, items: list[tuple[int, torch.Tensor]], file: Any, claim: Claim) -> None:
        """As `load`, of tensors that may be used where they are (only where `keeps`)."""
        raise NotImplementedError

    @property
    def shared(self) -> bool:
        """Whether all that was loaded is to be used where it lies, as others do."""
        return False

    @property
    def proves_shared(self) -> bool:
        """Whether `loaded_digests` are of what others use as well."""
        return False

    @property
    def commits_at_once(self) -> bool:
        """Whether `commit` has no bytes to move."""
        return False

    def commit(self) -> None:
        """The version was recorded: make it the live one (staged loads)."""

    def discard(self) -> None:
        """The round failed: drop what was kept aside."""

    def loaded_digests(self) -> list[int] | None:
        """Per metadata entry, the digest that the sender must have seen; None if not one to one.

        For a cast tensor that is the digest of what was delivered, after checking here that the
        parameter holds exactly its cast.
        """
        return None

    def unproven(self) -> list[str] | None:
        """Parameters of the worker not shown to be written; None: this loader does not say."""
        return None

    @property
    def touched(self) -> bool:
        """Whether the live weights may have changed."""
        raise NotImplementedError


@dataclass
class _Target:
    """A place for one offered tensor: (part of) a parameter. `cut` finds the part in the whole."""

    name: str
    tensor: torch.Tensor
    cast: bool
    cut: Callable[[torch.Tensor], torch.Tensor] = lambda whole: whole
    delivered: int | None = None
    expected: int | None = None
    plain: bool = False
    """Contiguous memory, not lazy, and of the dtype that is offered: a plain copy of bytes."""
    address: int = 0
    """Of the tensor's memory, where it is plain and on the host; else 0."""

    def locate(self) -> None:
        """Fill in `plain` and `address`, for the tensor as it is now."""
        lazy = self.tensor.is_conj() or self.tensor.is_neg()
        dense = not self.cast and not lazy and self.tensor.is_contiguous()
        self.plain = dense and has_memory(self.tensor)
        on_host = self.plain and self.tensor.device.type == "cpu"
        self.address = self.tensor.data_ptr() if on_host else 0

    @property
    def freed(self) -> bool:
        """Whether it is a tensor that should have memory, but has none."""
        return not self.plain and type(self.tensor) in USUAL and not has_memory(self.tensor)


class _Places:
    """What is the same for every round into the same targets, in lists over the offer.

    Attributes:
        small: 1 for an entry that one call copies together with its neighbours: one plain target.
        targets: that target.
        addresses: of its memory, on the host.
        memories: of all targets in order, if each is its dense bytes on the host; else None.
        streams: whether copies to them should go past the caches.
        freed: the name of one that has no memory at present.
    """

    def __init__(self, targets: list[list[_Target]]) -> None:
        self.small = bytearray(
            len(places) == 1 and places[0].plain and places[0].tensor.nbytes < _LARGE_BYTES
            for places in targets
        )
        self.targets = [places[0].tensor if places else _NOTHING for places in targets]
        self.addresses = [places[0].address if places else 0 for places in targets]
        self._in_memory = bytearray(
            len(places) == 1 and places[0].plain and places[0].tensor.is_cpu for places in targets
        )
        flat = [place for places in targets for place in places]
        dense = all(p.address or (p.plain and not p.tensor.nbytes) for p in flat)
        self.memories = [memory(place.tensor) for place in flat] if dense else None
        self.streams = streams(sum(place.tensor.nbytes for place in flat))
        self.freed = next((place.name for place in flat if place.freed), None)

    def in_memory(self, run: slice) -> bool:
        """Whether each of these has one target, plain memory of the host: then `addresses` has it."""
        found = self._in_memory.count(1, run.start, run.stop)
        return found == int(run.stop - run.start)

    def run(self, items: list[tuple[int, torch.Tensor]]) -> slice | None:
        """Where `items` are neighbours in the offer, in its order, and small: their slice of it."""
        first, end = items[0][0], items[0][0] + len(items)
        if self.small.count(1, first, end) != len(items):
            return None
        if [index for index, _ in items] != list(range(first, end)):
            return None
        return slice(first, end)


class ModuleLoader(WeightLoader):
    """Writes by name into a module's parameters and persistent buffers.

    Args:
        module: the live model; its tensors are looked up anew each round.
        rename: from offered names to the module's (see `rayxfer.source.apply_rename`).
        fuse: rules for parameters that are made of several offered tensors.
        staged: write into copies and swap the content in at `commit`.
    """

    copies_only = True
    one_to_one = True

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        rename: Rename | None = None,
        fuse: Sequence[FuseRule] = (),
        staged: bool = False,
        verify: bool = True,
    ) -> None:
        self._module = module
        self._rename = rename
        self._fuse = tuple(fuse)
        self._staged = staged
        self._verify = verify
        self._targets: list[list[_Target]] = []
        self._places = _Places(self._targets)
        self._census: Census | None = None
        self._stage: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written: set[int] = set()
        self._touched = False
        self._inference = False
        self._found_again = False

    # ---- preflight -----------------------------------------------------------------------------

    def preflight(
        self,
        metadata: Sequence[ParamMeta],
        *,
        partial: bool,
        memo: dict[str, Any] | None = None,
    ) -> Preflight:
        # The same offer to the same tensors has the same answer, and most rounds are that.
        key = (metadata, partial, self._rename, self._fuse)
        known = memo is not None and "key" in memo and memo["key"][0] is metadata
        if memo is not None and known and memo["key"] == key and memo["census"].holds(self._module):
            self._census, self._inference = memo["census"], memo["inference"]
            self._targets = memo["targets"]
            if not self._staged:
                self._places = memo["places"] = memo["places"] or _Places(self._targets)
            for places in self._targets if memo["casts"] else ():
                for place in places:
                    place.delivered = place.expected = None
            if self._staged:
                self._make_stage()
            return Preflight(casts=dict(memo["casts"]), kept=list(memo["kept"]))
        census = Census(self._module)
        live = census.tensors
        self._inference = any(t.is_inference() for t in live.values())
        out = self._compare_all(live, metadata, partial)
        if out.problems:
            return out
        self._census = census
        if not self._staged:
            self._places = _Places(self._targets)
        if memo is not None:
            memo |= {"key": key, "census": census, "inference": self._inference}
            memo |= {"targets": self._targets, "places": None}
            memo |= {"casts": dict(out.casts), "kept": list(out.kept)}
        if self._staged:
            self._make_stage()
        return out

    def _compare_all(
        self, live: dict[str, torch.Tensor], metadata: Sequence[ParamMeta], partial: bool
    ) -> Preflight:
        out = Preflight()
        keys = tie_keys(live)
        parts = self._parts(live)
        covered: set[Any] = set()
        fused: dict[str, dict[str, ParamMeta]] = {}
        owner: dict[str, str] = {}
        self._targets = []
        fused_places: dict[str, tuple[int, str]] = {}
        for index, meta in enumerate(metadata):
            places: dict[Any, _Target] = {}
            for offered in (meta.name, *meta.aliases):
                name = apply_rename(offered, self._rename)
                if name in owner and owner[name] != offered:
                    out.add(
                        offered,
                        f"{offered!r} and {owner[name]!r} both become {name!r} here: duplicate name",
                    )
                    continue
                owner[name] = offered
                if name in parts:
                    fused.setdefault(parts[name], {})[name] = meta
                    fused_places[name] = (index, offered)
                elif name not in live:
                    extra = f" (renamed to {name!r})" if name != offered else ""
                    out.add(
                        offered, f"unknown name {offered!r}{extra}: this worker has no such tensor"
                    )
                else:
                    covered.add(keys[name])
                    target = live[name]
                    if self._compare(out, offered, meta, tuple(target.shape), target.dtype):
                        places[keys[name]] = _Target(name, target, meta.dtype != target.dtype)
            self._targets.append(list(places.values()))
        self._place_fused(out, live, keys, fused, fused_places, covered)
        seen: set[Any] = set()
        for name, key in keys.items():
            if key in covered or key in seen:
                continue
            seen.add(key)
            if partial:
                out.kept.append(name)
            else:
                target = live[name]
                what = f"{dtype_name(target.dtype)}{list(target.shape)}"
                out.add(name, f"missing name {name!r}: expected {what}, nothing offered")
        if not metadata and not partial:
            out.problems.insert(0, EMPTY_OFFER)
        for found in self._targets:
            for place in found:
                place.locate()
        return out

    def _parts(self, live: dict[str, torch.Tensor]) -> dict[str, str]:
        """Offered name of a part → its fused parameter."""
        found: dict[str, str] = {}
        for target_name, target in live.items():
            for rule in self._fuse:
                for part in rule.parts_of(target_name, target) or ():
                    if part not in live:
                        found[part] = target_name
        return found

    def _place_fused(
        self,
        out: Preflight,
        live: dict[str, torch.Tensor],
        keys: dict[str, Any],
        fused: dict[str, dict[str, ParamMeta]],
        places: dict[str, tuple[int, str]],
        covered: set[Any],
    ) -> None:
        whole = frozenset(covered)
        for target_name, offered in fused.items():
            target = live[target_name]
            rule, names = next(
                (rule, names)
                for rule in self._fuse
                if (names := rule.parts_of(target_name, target)) is not None
            )
            missing = [name for name in names if name not in offered]
            if missing:
                out.add(
                    missing[0],
                    f"missing name {missing[0]!r}: {target_name!r} is made of {names} and all its "
                    "parts must be offered together",
                )
                covered.add(keys[target_name])
                continue
            if keys[target_name] in whole:
                out.add(
                    places[names[0]][1],
                    f"duplicate name {places[names[0]][1]!r}: {target_name!r} is offered both whole "
                    "and in parts",
                )
                continue
            start, dim = 0, rule.dim % target.dim()
            for position, name in enumerate(names):
                index, offered_name = places[name]
                meta = offered[name]
                cut: Callable[[torch.Tensor], torch.Tensor]
                if rule.stack:
                    cut = functools.partial(torch.select, dim=0, index=position)
                else:
                    size = meta.shape[dim] if len(meta.shape) > dim else 0
                    if start + size > target.shape[dim]:
                        out.add(
                            offered_name,
                            f"shape mismatch at {offered_name!r}: the parts of {target_name!r} "
                            f"{list(target.shape)} add up to more than it along dim {dim}",
                        )
                        break
                    cut = functools.partial(torch.narrow, dim=dim, start=start, length=size)
                    start += size
                place = cut(target)
                if self._compare(out, offered_name, meta, tuple(place.shape), target.dtype):
                    self._targets[index].append(
                        _Target(target_name, place, meta.dtype != target.dtype, cut)
                    )
            else:
                if not rule.stack and start != target.shape[dim]:
                    out.add(
                        names[-1],
                        f"shape mismatch at {target_name!r}: its parts {names} add up to {start} along "
                        f"dim {dim}, expected {target.shape[dim]}",
                    )
            covered.add(keys[target_name])

    @staticmethod
    def _compare(
        out: Preflight, name: str, meta: ParamMeta, shape: tuple[int, ...], dtype: torch.dtype
    ) -> bool:
        fits = True
        if meta.shape != shape:
            out.add(
                name,
                f"shape mismatch at {name!r}: expected {list(shape)}, offered {list(meta.shape)}",
            )
            fits = False
        cast, problem = compare_dtypes(name, meta.dtype, dtype)
        if cast is not None:
            out.casts[name] = cast
        if problem is not None:
            out.add(name, problem)
            fits = False
        return fits

    # ---- loading -------------------------------------------------------------------------------

    def _make_stage(self) -> None:
        """Copies of all targets, keyed by the whole tensor's memory, and targets in them.

        Those in the live weights stay as they are: another round may remember them.
        """
        self._stage = {}
        live = named_tensors(self._module)
        self._targets = [self._staged_targets(places, live) for places in self._targets]
        self._places = _Places(self._targets)

    def _staged_targets(
        self, places: list[_Target], live: dict[str, torch.Tensor]
    ) -> list[_Target]:
        targets: list[_Target] = []
        for place in places:
            base = live[place.name]
            key = tie_key(base)
            if key not in self._stage:
                copy = torch.empty_like(_compact(base), requires_grad=False)
                self._stage[key] = (base, copy.expand(base.shape))
            tensor = place.cut(self._stage[key][1])
            copied = dataclasses.replace(place, tensor=tensor)
            copied.locate()
            targets.append(copied)
        return targets

    def _find_again(self) -> None:
        """Once, before the first byte: since the preflight the tensors may have been given other memory (by
        a hook, by whoever uses the model while others are waited for), and what was found is addresses.

        Raises:
            ContractError: a tensor is gone, or is another one, or has no memory.
        """
        if self._found_again:
            return
        self._found_again = True
        if self._staged:
            return
        if self._census is None or not self._census.holds_memory(self._module):
            live = named_tensors(self._module)
            self._targets = [[_now(place, live) for place in places] for places in self._targets]
            self._places = _Places(self._targets)
        if self._places.freed is not None:
            name = self._places.freed
            raise ContractError(f"{name!r} has no memory here: its storage was freed", name=name)

    def landing(self, index: int) -> torch.Tensor | None:
        self._find_again()
        places = self._targets[index]
        if len(places) != 1 or not places[0].plain:
            return None
        tensor = places[0].tensor
        if tensor.device.type not in ("cpu", "cuda") or tensor.is_inference():
            return None
        self._touched = True
        return as_bytes(tensor)

    def landed(self, index: int) -> None:
        self._written.add(index)

    def landings(self, run: slice) -> Sequence[int] | None:
        self._find_again()
        if not self._places.in_memory(run):
            return None
        self._touched = True
        return self._places.addresses[run]

    def landed_all(self, run: slice) -> None:
        self._written.update(range(run.start, run.stop))

    def load(self, items: list[tuple[int, torch.Tensor]]) -> None:
        self._find_again()
        self._touched = True
        mode = torch.inference_mode() if self._inference else torch.no_grad()
        run = self._places.run(items)
        if run is not None:
            with mode:
                copy_all(self._places.targets[run], [tensor for _, tensor in items])
            self._written.update(range(run.start, run.stop))
            return
        plain_targets: list[torch.Tensor] = []
        plain_values: list[torch.Tensor] = []
        with mode:
            for index, tensor in items:
                for place in self._targets[index]:
                    if place.address and tensor.nbytes >= _LARGE_BYTES and is_memory(tensor):
                        source, stream = tensor.data_ptr(), self._places.streams
                        copy_bytes(place.address, source, tensor.nbytes, stream=stream)
                        continue
                    if place.plain:
                        plain_targets.append(place.tensor)
                        plain_values.append(tensor)
                        continue
                    # Not left to copy_: into strided memory it rounds a NaN to other bits.
                    cast = tensor.to(place.tensor.dtype)
                    if place.cast and self._verify:
                        place.delivered, place.expected = self.digest.many([tensor, cast])
                    _write(place, cast)
                self._written.add(index)
            copy_all(plain_targets, plain_values)  # a whole bucket of small tensors

    def commit(self) -> None:
        if not self._stage:
            return
        mode = torch.inference_mode() if self._inference else torch.no_grad()
        with mode:
            for whole, copy in self._stage.values():
                target, value = _compact(whole), _compact(copy)
                if is_memory(target) and is_memory(value):
                    stream = self._places.streams
                    copy_bytes(target.data_ptr(), value.data_ptr(), value.nbytes, stream=stream)
                else:
                    target.copy_(value)
        self._stage = {}

    def discard(self) -> None:
        self._stage = {}

    # ---- proof ---------------------------------------------------------------------------------

    def loaded_digests(self) -> list[int] | None:
        # What the module holds *now* under these names, not what was written to: the proof must not
        # rest on the bookkeeping that it proves.
        memories, census = self._places.memories, self._census
        held = census is not None and not self._staged and census.holds_memory(self._module)
        found: list[int] | None = None
        if memories is not None and held and self.digest is XXH3:
            found = digest_memories(memories)
            if len(found) == len(self._targets) and all(self._targets):  # no ties: one each
                return found
        flat = [(index, place) for index, places in enumerate(self._targets) for place in places]
        if found is None:
            live = {} if self._staged else named_tensors(self._module)
            found = self.digest.many([self._held(live, index, place) for index, place in flat])
        out: list[int | None] = [None] * len(self._targets)
        for (index, place), value in zip(flat, found, strict=True):
            if place.cast:
                if value != place.expected or place.delivered is None:
                    raise ContractError(
                        f"digest mismatch at {place.name!r}: the parameter does not hold the cast of "
                        "what was delivered",
                        name=place.name,
                    )
                value = place.delivered
            if out[index] is not None and out[index] != value:
                raise ContractError(
                    f"digest mismatch at {place.name!r}: it differs from its tied names",
                    name=place.name,
                )
            out[index] = value
        return [value if value is not None else 0 for value in out]

    def _held(self, live: dict[str, torch.Tensor], index: int, place: _Target) -> torch.Tensor:
        """What will be served under this name, once committed."""
        return place.tensor if self._staged else _held(live, place)

    def unproven(self) -> list[str] | None:
        if len(self._written) == len(self._targets):
            return []
        return [
            place.name
            for index, places in enumerate(self._targets)
            if index not in self._written
            for place in places
        ]

    @property
    def touched(self) -> bool:
        return self._touched and not self._staged


_NOTHING = torch.empty(0)
_LARGE_BYTES = 64 << 10
"""From here on a `memmove` of one tensor costs less than its share of torch's call for many."""


def _held(live: dict[str, torch.Tensor], place: _Target) -> torch.Tensor:
    if place.name not in live:
        raise ContractError(f"{place.name!r} is gone from the model after loading", name=place.name)
    return place.cut(live[place.name])


def _now(place: _Target, live: dict[str, torch.Tensor]) -> _Target:
    """The same place in the module as it is now."""
    whole = live.get(place.name)
    found = None if whole is None else place.cut(whole)
    before = place.tensor
    if found is None or (found.shape, found.dtype) != (before.shape, before.dtype):
        raise ContractError(
            f"{place.name!r} was replaced after this worker had agreed to the offer",
            name=place.name,
        )
    now = dataclasses.replace(place, tensor=found)
    now.locate()
    return now


def _compact(tensor: torch.Tensor, *, like: torch.Tensor | None = None) -> torch.Tensor:
    """One of each element that `like` (default: itself) repeats by a stride of 0, since an expanded
    tensor cannot be written to."""
    like = tensor if like is None else like
    for dim, (size, stride) in enumerate(zip(like.shape, like.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _write(place: _Target, tensor: torch.Tensor) -> None:
    target = _compact(place.tensor)
    target.copy_(_compact(tensor, like=place.tensor))
    if target is not place.tensor and digest(place.tensor) != digest(tensor):
        raise ContractError(
            f"{place.name!r} is an expanded tensor here: one element stands for several, and what "
            "was offered differs between them",
            name=place.name,
        )
