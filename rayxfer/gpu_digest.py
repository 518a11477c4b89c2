"""A 64-bit digest that a GPU computes where the tensor lies, in torch's own operations.

xxh3 needs the bytes in the host's memory, and the way there is a hundred times slower than a GPU reads
its own. This is the sum of the tensor's 32-bit words, each times an odd 64-bit number that depends on its
place, modulo 2**64 (multilinear hashing; Lemire and Kaser, "Strongly universal string hashing is fast",
2014). A change to one word is always found, any other that was not made on purpose with probability of at
least 1 - 2**-32, and nearly always 1 - 2**-64. Device and strides make no difference: a CPU gets the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch

from rayxfer.digest import Digest
from rayxfer.packing import as_bytes, plain

__all__ = ["WORDS"]

_CHUNK_WORDS = 1 << 21
"""Taken at a time: the products of so many, 16 MiB, stay in a large GPU's cache."""

_SMALL_WORDS = 1 << 16

_NEXT_CHUNK = 0xD1342543DE82EF95
"""What a chunk's sum is multiplied by when another follows: 5 modulo 8, so its powers do not repeat."""

_MASK = (1 << 64) - 1


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift to the right; torch's is arithmetical."""
    return (numbers >> by) & ((1 << (64 - by)) - 1)


@functools.lru_cache(maxsize=64)
def _multipliers(device: torch.device) -> torch.Tensor:
    """splitmix64 of 1, 2, … made odd: as good as random."""
    z = torch.arange(1, _CHUNK_WORDS + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    z = ((z ^ _shifted(z, 31)) | 1).to(device)
    int(z[-1])  # there before any other stream asks for it
    return z


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's dense bytes as 32-bit words, the last one filled up with zeros."""
    usual = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    offset = int(tensor.storage_offset()) * tensor.element_size()
    at_word = not (tensor.data_ptr() | offset) % 4
    if usual and at_word and not tensor.nbytes % 4 and tensor.numel() > 1:
        return tensor.detach().reshape(-1).view(torch.int32)
    flat = as_bytes(plain(tensor))
    missing = -flat.numel() % 4
    # memory of its own begins at a word
    return torch.cat([flat, flat.new_zeros(missing)]).view(torch.int32)


class _Words(Digest):
    name = "words"

    def later(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self._later(_words(tensor))

    def _later(self, words: torch.Tensor) -> torch.Tensor:
        multipliers = _multipliers(words.device)
        count = words.numel()
        total = (words[:_CHUNK_WORDS] * multipliers[: min(count, _CHUNK_WORDS)]).sum()
        for start in range(_CHUNK_WORDS, count, _CHUNK_WORDS):
            part = words[start : start + _CHUNK_WORDS]
            total = total * _signed(_NEXT_CHUNK) + (part * multipliers[: part.numel()]).sum()
        return total

    def of(self, tensor: torch.Tensor) -> int:
        return self.settle([self.later(tensor)])[0]

    def many(self, tensors: Iterable[torch.Tensor]) -> list[int]:
        """Small ones of the same size together: what they cost is mostly calls."""
        found: list[int | torch.Tensor] = []
        groups: dict[tuple[torch.device, int], list[tuple[int, torch.Tensor]]] = {}
        with torch.no_grad():
            for index, tensor in enumerate(tensors):
                words = _words(tensor)
                small = 0 < words.numel() <= _SMALL_WORDS
                found.append(0 if small else self._later(words))
                if small:
                    group = groups.setdefault((words.device, words.numel()), [])
                    group.append((index, words))
                    if len(group) * words.numel() >= _CHUNK_WORDS:
                        self._together(groups.pop((words.device, words.numel())), found)
            for group in groups.values():
                self._together(group, found)
        return self.settle(found)

    @staticmethod
    def _together(group: list[tuple[int, torch.Tensor]], found: list[int | torch.Tensor]) -> None:
        rows = torch.stack([words for _, words in group])
        sums = (rows * _multipliers(rows.device)[: rows.shape[1]]).sum(1)
        for (index, _), total in zip(group, sums.unbind(), strict=True):
            found[index] = total

    def settle(self, found: Sequence[int | torch.Tensor]) -> list[int]:
        """One transfer to the host per device, not one per tensor."""
        out: list[int] = [one if isinstance(one, int) else 0 for one in found]
        places: dict[torch.device, list[int]] = {}
        for index, one in enumerate(found):
            if isinstance(one, torch.Tensor):
                places.setdefault(one.device, []).append(index)
        for indices in places.values():
            values = torch.stack([found[index] for index in indices]).tolist()  # type: ignore[misc]
            for index, value in zip(indices, values, strict=True):
                out[index] = value & _MASK
        return out


WORDS = _Words()
