"""One pass over a source: every tensor is checked against the metadata, and made dense."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from rayxfer.copying import is_memory
from rayxfer.errors import ContractError, RayxferError, TransferError, portable_cause
from rayxfer.metadata import ParamMeta
from rayxfer.packing import plain
from rayxfer.source import MappingSource, WeightSource, whole

__all__ = ["Reading", "yields_at_once"]


class Reading:
    """Iterate it once: (metadata entry, dense tensor, whether that was made for this pass alone).

    Attributes:
        at_name: the last name that the source yielded.
        in_source_since: when the source was asked for what it has not yielded yet, or None.

    Raises (from iteration):
        ContractError: the source yields other than it declares; the first disagreement is named.
        TransferError: the source raised.
    """

    def __init__(
        self, source: WeightSource, metadata: tuple[ParamMeta, ...], version: int | None = None
    ) -> None:
        self._source, self._metadata, self._version = source, metadata, version
        self.at_name: str | None = None
        self.in_source_since: float | None = None

    def __iter__(self) -> Iterator[tuple[ParamMeta, torch.Tensor, bool]]:
        metadata = self._metadata
        own = yields_at_once(self._source)  # then what it yields is nobody else's object
        count = 0
        for name, tensor in self._items():
            if count >= len(metadata):
                raise ContractError(
                    f"the source yielded {name!r} after its last name: metadata() declares "
                    f"{len(metadata)} tensors",
                    name=name,
                )
            meta = metadata[count]
            count += 1
            if own and _as_declared(meta, name, tensor):
                yield meta, tensor, False
            else:
                value = _checked(meta, name, tensor)
                yield meta, value, value.data_ptr() != tensor.data_ptr()
                del value
            del tensor
        if count < len(metadata):
            raise ContractError(
                f"the source yielded {count} tensors, metadata() declares {len(metadata)}; the first "
                f"missing is {metadata[count].name!r}",
                name=metadata[count].name,
            )

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The source's own iteration, timed, its errors labelled."""
        self.in_source_since = time.monotonic()
        try:
            iterator = iter(self._source)
        except Exception as error:
            raise self._source_error(error) from error
        while True:
            self.in_source_since = time.monotonic()
            try:
                item = next(iterator)
            except StopIteration:
                return
            except Exception as error:
                raise self._source_error(error) from error
            finally:
                self.in_source_since = None
            if not isinstance(item, tuple) or len(item) != 2:
                raise ContractError(f"the source yielded {item!r}, not a pair (name, tensor)")
            self.at_name = str(item[0])
            yield item

    def _source_error(self, error: Exception) -> RayxferError:
        if isinstance(error, RayxferError):
            return error
        where = "before its first tensor" if self.at_name is None else f"after {self.at_name!r}"
        return TransferError(
            f"the source raised {where}: {type(error).__name__}: {error}",
            phase="update",
            weight_version=self._version,
            name=self.at_name,
            cause=portable_cause(error),
        )


def yields_at_once(source: WeightSource) -> bool:
    """Whether the iteration is our own: views of tensors that are there, made without waiting."""
    return type(source).__iter__ is MappingSource.__iter__


def _as_declared(meta: ParamMeta, name: str, tensor: torch.Tensor) -> bool:
    """The usual case, found out at little cost: a plain detached tensor that needs nothing done to it."""
    return (
        name == meta.name
        and type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and is_memory(tensor)
        and not tensor.requires_grad
        and tensor.dtype == meta.dtype
        and tensor.shape == meta.shape
    )


def _checked(meta: ParamMeta, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name != meta.name:
        raise ContractError(
            f"the source yielded {name!r} where metadata() declares {meta.name!r}",
            name=meta.name,
        )
    if not isinstance(tensor, torch.Tensor):
        raise ContractError(
            f"the source yielded a {type(tensor).__name__} as {name!r}, not a tensor", name=name
        )
    if tensor.layout != torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise ContractError(
            f"{name!r} is a {tensor.layout} tensor on {tensor.device}: only dense tensors with data "
            "can be sent",
            name=name,
        )
    value = plain(whole(tensor))
    if value.dtype != meta.dtype or tuple(value.shape) != meta.shape:
        found = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        raise ContractError(
            f"the source yielded {name!r} as {found}, metadata() declares {meta}", name=name
        )
    return value
