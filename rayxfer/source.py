"""What to send: a source names its tensors first and then yields them, whole and in that order."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rayxfer.copying import has_memory
from rayxfer.errors import ConfigError, ContractError
from rayxfer.metadata import Columns, ParamMeta, check_metadata, in_parts

__all__ = [
    "MappingSource",
    "ModuleSource",
    "ParamMeta",
    "Rename",
    "WeightSource",
    "apply_rename",
    "as_source",
]

Rename = Mapping[str, str] | Callable[[str], str]
"""How names change: a function, or prefix rules (see `apply_rename`)."""


def apply_rename(name: str, rename: Rename | None) -> str:
    """`name` under its new name.

    A mapping holds rules `{old prefix: new prefix}`: the longest that fits wins, a prefix fits at
    a dot or at the whole name only ("model" fits "model.x", not "models.x"), "" fits always, and a
    name that none fits stays as it is. A dot at the end of either prefix makes no difference.

    Raises:
        ConfigError: the new name is no non-empty string.
    """
    if rename is None:
        return name
    new: Any = name
    if not isinstance(rename, Mapping):
        new = rename(name)
    else:
        for old in sorted(rename, key=len, reverse=True):
            prefix = old.removesuffix(".")
            if not prefix or name == prefix or name.startswith(prefix + "."):
                new = rename[old]
                if isinstance(new, str):
                    rest = name[len(prefix) :].removeprefix(".")
                    new = ".".join(part for part in (new.removesuffix("."), rest) if part)
                break
    if not isinstance(new, str) or not new:
        raise ConfigError(f"rename of {name!r} gave {new!r}: expected a non-empty string")
    return new


@dataclass(frozen=True, slots=True)
class Standing:
    """Tensors that are there already, each of them dense bytes in the host's memory: what a pass over such
    a source would yield, without the pass.

    Attributes:
        names, tensors, addresses, sizes: one entry per tensor; sizes in bytes. The tensors are the source's
            own (ten thousand more would call for Python's garbage collection): see `check`.
    """

    names: tuple[str, ...]
    tensors: Sequence[torch.Tensor]
    addresses: Sequence[int]
    sizes: Sequence[int]

    def check(self, here: slice) -> Sequence[int]:
        """The addresses of these, right before they are read, or after.

        Raises:
            ContractError: one has other memory now.
        """
        known, now = self.addresses[here], addresses_of(self.tensors[here])
        if now == known:
            return known
        at = next(i for i, (a, b) in enumerate(zip(known, now, strict=True)) if a != b)
        name = self.names[here][at]
        raise ContractError(f"{name!r} was given other memory while it was being sent", name=name)


class WeightSource(ABC):
    """Weights on offer. Subclass it for whatever shape your trainer's weights are in.

    Both channels must agree: `metadata()` declares what iteration will yield, in order. Iteration
    gives a fresh pass each time (a failed round is retried from the start).
    """

    stable: ClassVar[bool] = False
    """True: every yielded tensor keeps its memory and values until the `sync_weights` that reads them
    returns, so that several may be in flight. False (the default): only until the next one is asked
    for."""

    @abstractmethod
    def metadata(self) -> list[ParamMeta]:
        """Name, wire dtype and whole shape of every tensor; transfers nothing."""

    @abstractmethod
    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A fresh pass: whole tensors, in metadata order."""

    def weights_device(self) -> torch.device:
        """Where the tensors live: decides, with `backend="auto"`, how they travel. Default: the CPU."""
        return torch.device("cpu")

    def held_names(self) -> Collection[str] | None:
        """Names that this trainer rank can yield; None (the default): all of them."""
        return None

    def _standing(self, known: Columns) -> Standing | None:
        """What iteration would yield, if `metadata()` would be `known`. None may also mean that it was not
        looked into. For rayxfer's own sources: iteration is not asked then."""
        return None


class MappingSource(WeightSource):
    """A mapping of names to tensors: a state dict, an adapter.

    Entries that are the same tensor object or the very same view of the same memory are sent once
    under the first name; the others become its aliases (a worker must know those names too).

    Args:
        tensors: what to send. Not copied: sent as it is when a round reads it.
        dtype: cast floating-point tensors to this on the trainer (fewer bytes on the wire).
        rename: new names (see `apply_rename`).
    """

    stable = True

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        if not isinstance(tensors, Mapping):
            raise ConfigError(
                f"MappingSource takes a mapping of names to tensors, not a {type(tensors).__name__}"
            )
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype={dtype!r}: expected a floating-point torch.dtype or None")
        self._mapping = tensors
        self._dtype = dtype
        self._rename = rename
        # A cast makes a new tensor for each step, so memory is only bounded one at a time.
        self.stable = dtype is None  # type: ignore[misc]

    def _tensors(self) -> dict[str, torch.Tensor]:
        tensors = dict(self._mapping)
        usual = USUAL.issuperset(map(type, tensors.values())) and {str}.issuperset(
            map(type, tensors)
        )
        for name, tensor in () if usual else tensors.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise ContractError(
                    f"entry {name!r} is a {type(tensor).__name__}: a source maps names to tensors",
                    name=str(name),
                )
        return tensors

    def weights_device(self) -> torch.device:
        """Where the first tensor lives."""
        first = next(iter(self._tensors().values()), None)
        return torch.device("cpu") if first is None else first.device

    def _unique(self) -> Iterable[tuple[str, torch.Tensor, tuple[str, ...]]]:
        tensors = self._tensors()
        values = list(tensors.values())
        if _all_on_host(values) and _all_apart(addresses_of(values)):
            # one by one: ten thousand at a time call for Python's garbage collection
            return ((apply_rename(n, self._rename), t, ()) for n, t in tensors.items())
        return self._grouped(tensors)

    def _grouped(
        self, tensors: dict[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, tuple[str, ...]]]:
        groups: dict[Any, tuple[torch.Tensor, list[str]]] = {}
        keys = tie_keys(tensors)
        for old, tensor in tensors.items():
            if _is_freed(tensor):
                raise ContractError(f"{old!r} has no memory: its storage was freed", name=old)
            groups.setdefault(keys[old], (tensor, []))[1].append(apply_rename(old, self._rename))
        return [(names[0], tensor, tuple(names[1:])) for tensor, names in groups.values()]

    def _wire_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        castable = self._dtype is not None and tensor.dtype in FLOATS
        return self._dtype if castable and self._dtype is not None else tensor.dtype

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name, self._wire_dtype(tensor), tuple(tensor.shape), aliases)
            for name, tensor, aliases in self._unique()
        ]

    def _standing(self, known: Columns) -> Standing | None:
        ours = all(getattr(type(self), m) is getattr(MappingSource, m) for m in _PASS)
        if self._dtype is not None or not ours:
            return None
        tensors = self._tensors()
        values = list(tensors.values())
        if not all_memory(values):
            return None
        addresses = addresses_of(values)
        if _all_apart(addresses):
            if any(known.aliases):
                return None
            names = tuple(tensors)
            if self._rename is not None:
                names = tuple([apply_rename(name, self._rename) for name in names])
        else:
            names, grouped, aliases = zip(*self._grouped(tensors), strict=True)
            if aliases != known.aliases:
                return None
            values = list(grouped)
            addresses = addresses_of(values)
        if not known.fit(names, values):
            return None
        return Standing(known.names, values, addresses, known.num_bytes)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor, _ in self._unique():
            value = whole(tensor)
            yield name, value if self._dtype is None else value.to(self._wire_dtype(tensor))


class ModuleSource(MappingSource):
    """A module's parameters and persistent buffers, as they are when a round reads them.

    A tied tensor is sent once, its other names as aliases. Non-persistent buffers are not sent.

    Args:
        module: any `nn.Module`. Never changed; may be changed again once `sync_weights` returned.
        dtype: cast floating-point tensors to this on the trainer.
        rename: new names (see `apply_rename`).
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        dtype: torch.dtype | None = None,
        rename: Rename | None = None,
    ) -> None:
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"ModuleSource takes an nn.Module, not a {type(module).__name__}")
        super().__init__({}, dtype=dtype, rename=rename)
        self._module = module

    def _tensors(self) -> dict[str, torch.Tensor]:
        return named_tensors(self._module)


FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""The dtypes among which a mismatch is cast, exactly as `tensor.to(dtype)` does."""


def named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under every one of its names, ties included."""
    if is_plain_module(module):
        return _walk(module)
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    for prefix, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                tensors[f"{prefix}.{name}" if prefix else name] = buffer
    return tensors


def is_plain_module(module: torch.nn.Module) -> bool:
    """Whether the module names its tensors as `nn.Module` does, so that they can be found without
    asking it."""
    own, plain = type(module), torch.nn.Module
    return (
        own.named_parameters is plain.named_parameters
        and own.named_modules is plain.named_modules
        and not isinstance(module, torch.jit.ScriptModule)
    )


def _walk(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """`named_tensors`, at a third of the cost."""
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    _visit(module, "", parameters, buffers)
    return parameters | buffers


def _visit(
    module: torch.nn.Module,
    prefix: str,
    parameters: dict[str, torch.Tensor],
    buffers: dict[str, torch.Tensor],
) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            parameters[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            buffers[prefix + name] = buffer
    for name, child in module._modules.items():
        if child is not None:
            _visit(child, f"{prefix}{name}.", parameters, buffers)


def tie_key(tensor: torch.Tensor) -> Any:
    """Equal for tensors that are one and the same: same object, or same view of the same memory."""
    if is_sharded(tensor) or tensor.numel() == 0 or tensor.layout != torch.strided:
        return id(tensor)
    if tensor.device.type == "meta":
        return id(tensor)
    return (
        tensor.device,
        tensor.data_ptr(),
        tensor.dtype,
        tuple(tensor.shape),
        tensor.stride(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def tie_keys(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """`tie_key` of each, cheaper: memory that starts where no other's does is nobody else's."""
    starts = {name: _start(tensor) for name, tensor in tensors.items()}
    shared = {
        start for start, count in Counter(starts.values()).items() if count > 1 or start is None
    }
    return {
        name: tie_key(tensors[name]) if start in shared else start for name, start in starts.items()
    }


USUAL = frozenset((torch.Tensor, torch.nn.Parameter))
"""Classes whose tensors keep their values in memory of their own; another may do as it likes."""
_PASS = ("metadata", "__iter__", "_unique")
"""What a source's class must not have changed, for its tensors to be what it would yield."""


_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def _all_on_host(tensors: list[torch.Tensor]) -> bool:
    """Whether all are plain strided CPU tensors. By `map`, as below: a loop costs thrice as much."""
    return (
        USUAL.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and {torch.strided}.issuperset(map(operator.attrgetter("layout"), tensors))
    )


def all_memory(tensors: list[torch.Tensor]) -> bool:
    """`is_memory` of each, of plain tensors only."""
    return in_parts(_all_memory, tensors)


def _all_memory(tensors: list[torch.Tensor]) -> bool:
    return (
        _all_on_host(tensors)
        and all(map(torch.Tensor.is_contiguous, tensors))
        and not any(map(torch.Tensor.is_neg, tensors))
        and not any(map(torch.Tensor.is_conj, tensors))
    )


def addresses_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    return list(map(torch.Tensor.data_ptr, tensors))


def _all_apart(addresses: list[int]) -> bool:
    """Whether no two of them can be tied: each has memory, which begins elsewhere."""
    return len(set(addresses) - {0}) == len(addresses)


def _is_freed(tensor: torch.Tensor) -> bool:
    """A plain CPU tensor with elements, but without a storage to hold them."""
    return _all_on_host([tensor]) and not has_memory(tensor)


def _start(tensor: torch.Tensor) -> int | None:
    """Address of a plain CPU tensor's memory; None for any other kind."""
    return (tensor.data_ptr() or None) if _all_on_host([tensor]) else None


def is_sharded(tensor: torch.Tensor) -> bool:
    """A DTensor: reading it whole is a collective over the trainer's ranks."""
    return hasattr(tensor, "full_tensor")


def num_shards(tensor: Any) -> int:
    """Over how many ranks a DTensor is laid out."""
    return int(tensor.device_mesh.size())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, detached; gathered first if it is a DTensor."""
    if type(tensor) in USUAL:
        return tensor.detach()
    gather = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach()


def as_source(model: object) -> WeightSource:
    """A source for what `sync_weights` was given: a source, a module, or a mapping.

    Raises:
        ConfigError: it is none of them.
    """
    if isinstance(model, WeightSource):
        return model
    if isinstance(model, torch.nn.Module):
        return ModuleSource(model)
    if isinstance(model, Mapping):
        return MappingSource(model)
    raise ConfigError(
        f"sync_weights got a {type(model).__name__}: expected an nn.Module, a mapping of names to "
        "tensors, a WeightSource, or handles of trainer actors"
    )


def checked_metadata(source: WeightSource, metadata: object = ...) -> tuple[ParamMeta, ...]:
    """The source's metadata, validated; `metadata` is what `source.metadata()` gave, if asked.

    Raises:
        ContractError: what `check_metadata` raises, or metadata() is no list of ParamMeta.
    """
    if metadata is ...:
        metadata = source.metadata()
    if not isinstance(metadata, (list, tuple)):
        raise ContractError(
            f"{type(source).__name__}.metadata() gave a {type(metadata).__name__}, not a list of ParamMeta"
        )
    return check_metadata(metadata)
