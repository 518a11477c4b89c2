"""What a tensor is called on the wire: names, dtypes, shapes, and the digest of a whole list.

Everything that arrives from another process is checked here before anything is allocated.
"""

from __future__ import annotations

import hashlib
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.errors import ContractError

__all__ = ["ParamMeta", "dtype_from_name", "dtype_name", "metadata_digest"]

MAX_TENSOR_BYTES = 1 << 62
"""Sizes are 64-bit everywhere; a larger claim is an attack or a bug, and refused."""

_DTYPES: dict[str, torch.dtype] = {
    name: value for name, value in vars(torch).items() if isinstance(value, torch.dtype)
}
_DTYPE_NAMES: dict[torch.dtype, str] = {
    dtype: str(dtype).removeprefix("torch.") for dtype in _DTYPES.values()
}


_brief = reprlib.Repr()
_brief.maxstring = _brief.maxother = 120
_brief.maxlist = _brief.maxtuple = 12


def _shown(value: object) -> str:
    """`repr` for a message: short, and never failing, whatever a hostile peer sent."""
    try:
        return _brief.repr(value)
    except Exception:  # Python refuses to print a very long int
        return f"<{type(value).__name__}>"


def dtype_name(dtype: torch.dtype) -> str:
    """The bare name that travels: `torch.bfloat16` → "bfloat16"."""
    return _DTYPE_NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """The dtype of a bare name.

    Raises:
        ContractError: `name` is not the name of a torch dtype.
    """
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise ContractError(
            f"unknown dtype name {_shown(name)}: expected a bare torch name like 'bfloat16'"
        )
    return dtype


@dataclass(frozen=True, init=False)
class ParamMeta:
    """One tensor of a source.

    Attributes:
        name: the name it travels under.
        dtype: its dtype on the wire.
        shape: its whole shape (not a shard's).
        aliases: other names of the same tensor (tied weights); sent once, current under all.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

    def __init__(
        self,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        aliases: tuple[str, ...] = (),
    ) -> None:
        # a third of what the generated one costs, and a source makes one per tensor and round
        fields = self.__dict__
        fields["name"], fields["dtype"] = name, dtype
        fields["shape"], fields["aliases"] = shape, aliases

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if type(other) is ParamMeta else NotImplemented

    @property
    def numel(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire: dense, no padding."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{dtype_name(self.dtype)}{list(self.shape)}"


def check_metadata(metadata: Iterable[ParamMeta]) -> tuple[ParamMeta, ...]:
    """Validate a source's own metadata and freeze it.

    Raises:
        ContractError: an entry that is no `ParamMeta`, a bad field, or a name offered twice
            (an alias counts as a name).
    """
    seen: dict[str, int] = {}
    out: list[ParamMeta] = []
    for index, meta in enumerate(metadata):
        _check_entry(meta, index)
        if type(meta.shape) is not tuple or type(meta.aliases) is not tuple:
            meta = ParamMeta(meta.name, meta.dtype, tuple(meta.shape), tuple(meta.aliases))
        out.append(meta)
        for name in (meta.name, *meta.aliases):
            if name in seen:
                raise ContractError(
                    f"duplicate name {_shown(name)} in the source's metadata (entries {seen[name]} and "
                    f"{index}): every name is offered once",
                    name=name,
                )
            seen[name] = index
    return tuple(out)


def _check_entry(meta: object, index: int) -> None:
    if not isinstance(meta, ParamMeta):
        raise ContractError(
            f"metadata entry {index} is a {type(meta).__name__}, not a ParamMeta(name, dtype, shape)"
        )
    if not isinstance(meta.name, str) or not meta.name:
        raise ContractError(
            f"metadata entry {index}: name is {_shown(meta.name)}, not a non-empty string"
        )
    if not isinstance(meta.dtype, torch.dtype):
        raise ContractError(
            f"metadata of {_shown(meta.name)}: dtype is {_shown(meta.dtype)}, not a torch.dtype",
            name=meta.name,
        )
    _check_shape(meta.name, meta.shape, meta.dtype)
    aliases = meta.aliases
    if not isinstance(aliases, (tuple, list)) or not all(isinstance(a, str) and a for a in aliases):
        raise ContractError(
            f"metadata of {_shown(meta.name)}: aliases {_shown(aliases)} are no tuple of names",
            name=meta.name,
        )


def _check_shape(name: str, shape: Any, dtype: torch.dtype) -> None:
    num_bytes = dtype.itemsize
    if not isinstance(shape, (tuple, list, torch.Size)):
        raise ContractError(
            f"metadata of {_shown(name)}: shape is {_shown(shape)}, not a tuple", name=name
        )
    for size in shape:
        if type(size) is not int or size < 0:
            raise ContractError(
                f"metadata of {_shown(name)}: shape {_shown(list(shape))} holds {_shown(size)}; sizes "
                "are ints >= 0",
                name=name,
            )
        num_bytes *= size or 1  # strides grow past a size of 0 as past one of 1
        if num_bytes > MAX_TENSOR_BYTES:
            raise ContractError(
                f"metadata of {_shown(name)}: shape {_shown(list(shape))} is more than 2**62 bytes",
                name=name,
            )


class Columns:
    """A list of metadata by its fields: for comparing many at once."""

    def __init__(self, metadata: Sequence[ParamMeta]) -> None:
        self.names = tuple(meta.name for meta in metadata)
        self.aliases = tuple(meta.aliases for meta in metadata)
        self.dtypes = [meta.dtype for meta in metadata]
        self.shapes = [meta.shape for meta in metadata]
        self.num_bytes = [meta.num_bytes for meta in metadata]

    def fit(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are tensors just as described, all of them, in this order."""
        # one by one: lists of thousands of shapes bring on Python's garbage collector
        return (
            self.names == tuple(names)
            and len(tensors) == len(self.names)
            and in_parts(_alike, tensors, self.dtypes, self.shapes)
        )


def _alike(
    tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype], shapes: Sequence[Any]
) -> bool:
    return all(map(operator.is_, map(operator.attrgetter("dtype"), tensors), dtypes)) and all(
        map(operator.eq, map(operator.attrgetter("shape"), tensors), shapes)
    )


_PART = 512


def in_parts(check: Callable[..., bool], *columns: Sequence[Any]) -> bool:
    """Whether `check` holds for these columns of one length. It is asked about so few rows at a time that
    all its passes find them in the processor's cache: ten thousand tensors are looked at in 11 ms, not 14
    to 19."""
    count = len(columns[0])
    if count <= _PART:
        return check(*columns)
    starts = range(0, count, _PART)
    return all(check(*(column[at : at + _PART] for column in columns)) for at in starts)


def metadata_to_wire(metadata: Sequence[ParamMeta]) -> dict[str, Any]:
    """Plain lists (`names`, `dtype_names`, `shapes`, `aliases`), as requests carry them."""
    return {
        "names": [m.name for m in metadata],
        "dtype_names": [dtype_name(m.dtype) for m in metadata],
        "shapes": [list(m.shape) for m in metadata],
        "aliases": {m.name: list(m.aliases) for m in metadata if m.aliases},
    }


def metadata_from_wire(wire: Any) -> tuple[ParamMeta, ...]:
    """The reverse of `metadata_to_wire`, trusting nothing: lengths, types, sizes, duplicates.

    Costs O(entries) and allocates nothing of a size that the sender named.

    Raises:
        ContractError: naming the first offender.
    """
    if not isinstance(wire, dict):
        raise ContractError(f"metadata is a {type(wire).__name__}, not a dict")
    names, dtype_names, shapes = (wire.get(k) for k in ("names", "dtype_names", "shapes"))
    for key, value in (("names", names), ("dtype_names", dtype_names), ("shapes", shapes)):
        if not isinstance(value, (list, tuple)):
            raise ContractError(f"metadata field {key!r} is a {type(value).__name__}, not a list")
    assert isinstance(names, (list, tuple))
    assert isinstance(dtype_names, (list, tuple))
    assert isinstance(shapes, (list, tuple))
    if not len(names) == len(dtype_names) == len(shapes):
        raise ContractError(
            f"metadata disagrees with itself: {len(names)} names, {len(dtype_names)} dtype_names, "
            f"{len(shapes)} shapes"
        )
    aliases = wire.get("aliases", {})
    if not isinstance(aliases, dict):
        raise ContractError(f"metadata field 'aliases' is a {type(aliases).__name__}, not a dict")
    metadata = check_metadata(_entries(names, dtype_names, shapes, aliases))
    unknown = next(iter(aliases.keys() - {m.name for m in metadata}), None) if aliases else None
    if unknown is not None:
        raise ContractError(f"metadata field 'aliases' has {_shown(unknown)}, which is no name")
    return metadata


def _entries(
    names: Sequence[Any], dtype_names: Sequence[Any], shapes: Sequence[Any], aliases: dict[Any, Any]
) -> Iterator[ParamMeta]:
    """One by one, so that the first offender ends the work."""
    for index, (name, dtype, shape) in enumerate(zip(names, dtype_names, shapes, strict=True)):
        if not isinstance(name, str):
            raise ContractError(f"metadata entry {index}: name is {_shown(name)}, not a string")
        try:
            yield ParamMeta(
                name, dtype_from_name(dtype), _tuple(shape), _tuple(aliases.get(name, ()))
            )
        except ContractError as error:
            raise ContractError(f"metadata of {_shown(name)}: {error}", name=name) from None


def _tuple(value: object) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ContractError(f"{_shown(value)} is not a list")
    return tuple(value)


def metadata_digest(metadata: Sequence[ParamMeta]) -> str:
    """A 128-bit hex digest of names, dtypes, shapes, aliases and their order."""
    h = hashlib.blake2b(digest_size=16)
    for m in metadata:
        h.update(repr((m.name, dtype_name(m.dtype), m.shape, m.aliases)).encode())
    return h.hexdigest()
