"""What `ipc` says between processes: which memory is exported, and where in it each tensor lies. Pure.

A frame is plain numbers and handles in a slot of the ring. It names no dtype, shape or class: those
come from the round's metadata, which the worker has checked. A handle is taken only from the ring of
the session (whose nonce was proven), once, under a number of the sender's choosing.
"""

from __future__ import annotations

import array
import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from rayxfer.engines.device import HANDLE_BYTES, Block, Device, Opened
from rayxfer.errors import ContractError

__all__ = [
    "FRAME_BYTES",
    "MAX_TENSORS",
    "NOTHING",
    "NO_EVENT",
    "Export",
    "Exports",
    "Frame",
    "Imports",
]

FRAME_BYTES = 128 << 10
MAX_TENSORS = 1024
"""Tensors in one frame: each may bring a new export, and all fit into FRAME_BYTES."""

_MAX_CLOSES = 2048
_WHOLE, _PART = 1, 2
_HEADER_WORDS = 8
_HANDLE_WORDS = HANDLE_BYTES // 8

NOTHING = (1 << 64) - 1
"""The export of a tensor without bytes."""

NO_EVENT = (1 << 64) - 1
"""The event of a frame that can be read at once."""


@dataclass(frozen=True)
class Export:
    """A block on offer: `number` is what places refer to."""

    number: int
    num_bytes: int
    handle: bytes


@dataclass
class Frame:
    """One message of the sender: some consecutive tensors, or a part of one large tensor.

    Attributes:
        first: place of its (first) tensor in the metadata.
        event: which of the session's events to wait for before reading, or NO_EVENT.
        places: (export, offset) of each tensor; of a part, just one.
        part: (start, length) in bytes of a part; None for whole tensors.
        opens, closes: blocks to open before, and to close (by number) before that.
    """

    first: int
    event: int
    places: list[tuple[int, int]]
    part: tuple[int, int] | None = None
    opens: list[Export] = field(default_factory=list)
    closes: list[int] = field(default_factory=list)

    def encode(self) -> bytes:
        """At most FRAME_BYTES."""
        start, length = self.part if self.part is not None else (0, 0)
        words = array.array(
            "Q",
            (
                _WHOLE if self.part is None else _PART,
                self.first,
                len(self.places),
                len(self.opens),
                len(self.closes),
                self.event,
                start,
                length,
            ),
        )
        for export in self.opens:
            words.append(export.number)
            words.append(export.num_bytes)
            words.frombytes(export.handle)
        words.extend(self.closes)
        for place in self.places:
            words.extend(place)
        return words.tobytes()

    @classmethod
    def decode(cls, data: memoryview) -> Frame:
        """The reverse of `encode`; what comes after it in the slot is not read.

        Raises:
            ContractError: it is no frame.
        """
        words = data.cast("B").cast("Q")
        kind, first, tensors, opens, closes, event, start, length = words[:_HEADER_WORDS]
        end = _HEADER_WORDS + opens * (2 + _HANDLE_WORDS) + closes + 2 * tensors
        sound = kind in (_WHOLE, _PART) and (kind == _WHOLE or tensors == 1)
        if not sound or tensors > MAX_TENSORS or end > len(words):
            raise ContractError("ipc: the sender's frame makes no sense")
        at = _HEADER_WORDS
        exports = []
        for _ in range(opens):
            handle = words[at + 2 : at + 2 + _HANDLE_WORDS].tobytes()
            exports.append(Export(words[at], words[at + 1], handle))
            at += 2 + _HANDLE_WORDS
        gone = list(words[at : at + closes])
        flat = words[at + closes : end].tolist()
        places = list(zip(flat[0::2], flat[1::2], strict=True))
        part = None if kind == _WHOLE else (start, length)
        return cls(first, event, places, part, exports, gone)


class Exports:
    """The sender's side: which blocks were exported, each once while it lives.

    Args:
        device: on which they are.
        keep_open: False: workers close everything at the end of a round, so it is offered anew.
    """

    def __init__(self, device: Device, *, keep_open: bool = True) -> None:
        self._device, self._keep_open = device, keep_open
        self._blocks: dict[int, tuple[Block, Export]] = {}
        self._bases: list[int] = []
        self._by_base: dict[int, int] = {}
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        self._frames: dict[int, tuple[list[int], list[tuple[int, int]], list[int]]] = {}
        self._next = 0
        self._opens: list[Export] = []
        self._closes: list[int] = []

    def begin(self) -> None:
        """A new round: blocks that were freed since are closed, and exported no more."""
        if not self._keep_open:
            self._opens = [export for _, export in self._blocks.values()]
        for number in self._dead(list(self._blocks)):
            self._drop(number)

    def _dead(self, numbers: Sequence[int]) -> list[int]:
        alive = self._device.alive([self._blocks[number][0] for number in numbers])
        return [number for number, lives in zip(numbers, alive, strict=True) if not lives]

    def _drop(self, number: int) -> None:
        block, export = self._blocks.pop(number)
        self._bases.remove(block.base)
        del self._by_base[block.base]
        self._places = {k: v for k, v in self._places.items() if v[0] != number}
        self._frames = {}
        if export in self._opens:
            self._opens.remove(export)  # nobody was told of it yet
        else:
            self._closes.append(number)

    def place(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(export, offset) of a contiguous tensor; None where it cannot be reached in place."""
        item_bytes = tensor.element_size()
        num_bytes = tensor.numel() * item_bytes
        if not num_bytes:
            return NOTHING, 0
        if tensor.device != self._device.torch_device:
            return None
        address = tensor.data_ptr()
        found = self._places.get((address, num_bytes))
        if found is None:
            number = self._within(address, num_bytes)
            if number is None:
                block = self._device.block_of(tensor)
                if block is None:
                    return None
                number = self._add(block)
            found = (number, address - self._blocks[number][0].base)
            if found[1] % item_bytes:
                return None
            self._places[(address, num_bytes)] = found
        return found

    def _within(self, address: int, num_bytes: int) -> int | None:
        at = bisect.bisect_right(self._bases, address) - 1
        if at < 0:
            return None
        number = self._by_base[self._bases[at]]
        block = self._blocks[number][0]
        return number if address + num_bytes <= block.base + block.num_bytes else None

    def _add(self, block: Block) -> int:
        stale = self._by_base.get(block.base)
        if stale is not None:
            self._drop(stale)
        number, self._next = self._next, self._next + 1
        export = Export(number, block.num_bytes, self._device.export(block))
        self._blocks[number] = (block, export)
        self._by_base[block.base] = number
        bisect.insort(self._bases, block.base)
        self._opens.append(export)
        return number

    def checked(
        self, tensors: Sequence[torch.Tensor], key: int | None = None
    ) -> list[tuple[int, int]] | None:
        """`place` of each, or None if one cannot be reached in place. Right also when the allocator
        has given blocks back since the round began: those that are meant are looked at again.

        `key`: what these tensors are called from round to round; most rounds they lie where they lay.
        """
        addresses = [tensor.data_ptr() for tensor in tensors]
        for _ in range(2):
            known = self._frames.get(key) if key is not None else None
            if known is not None and known[0] == addresses:
                _, places, used = known
            else:
                found = [self.place(tensor) for tensor in tensors]
                places = [place for place in found if place is not None]
                if len(places) < len(found):
                    return None
                used = list({place[0] for place in places} - {NOTHING})
            dead = self._dead(used)
            if not dead:
                if key is not None:
                    self._frames[key] = (addresses, places, used)
                return places
            for number in dead:
                self._drop(number)
        return None

    def forget(self) -> None:
        """Another layout: keys mean other tensors."""
        self._frames = {}

    def take_news(self) -> tuple[list[Export], list[int]]:
        """What to open and to close with the next frame."""
        opens, self._opens = self._opens[:MAX_TENSORS], self._opens[MAX_TENSORS:]
        closes, self._closes = self._closes[:_MAX_CLOSES], self._closes[_MAX_CLOSES:]
        return opens, closes

    @property
    def more_news(self) -> bool:
        """Whether a frame is needed for announcements alone (the next may add a staging buffer)."""
        return len(self._opens) >= MAX_TENSORS


class Imports:
    """A worker's side: what it has open. Every block is opened once and closed once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._opened: dict[int, tuple[Opened, int]] = {}
        self._views: dict[int, tuple[list[tuple[int, int]], list[tuple[str, torch.Tensor]]]] = {}

    def __len__(self) -> int:
        return len(self._opened)

    def news(self, frame: Frame, before_closing: Callable[[], None]) -> None:
        """Close and open what the frame says. `before_closing`: called if anything is to be closed,
        returns when nothing reads it any more.

        Raises:
            ContractError: a number that is open already, or not open.
            TransferError: a block cannot be opened; those before it stay open.
        """
        if frame.closes:
            before_closing()
        for number in frame.closes:
            opened, _ = self._find(number)
            self._views = {}
            del self._opened[number]
            self._device.close(opened)
        for export in frame.opens:
            if export.number in self._opened or export.number == NOTHING or not export.num_bytes:
                raise ContractError(f"ipc: export {export.number} is announced twice, or empty")
            opened = self._device.open(export.handle, export.num_bytes)
            self._opened[export.number] = (opened, export.num_bytes)

    def _find(self, number: int) -> tuple[Opened, int]:
        if number not in self._opened:
            raise ContractError(f"ipc: export {number} was never announced, or is closed")
        return self._opened[number]

    def memory(self, place: tuple[int, int], num_bytes: int) -> torch.Tensor:
        """Bytes of an open block (flat uint8).

        Raises:
            ContractError: they are not all in it.
        """
        number, offset = place
        if not num_bytes:
            return torch.empty(0, dtype=torch.uint8, device=self._device.torch_device)
        opened, length = self._find(number)
        if offset + num_bytes > length:
            raise ContractError(
                f"ipc: bytes {offset} to {offset + num_bytes} of export {number}, which has {length}"
            )
        return opened.memory[offset : offset + num_bytes]

    def views(
        self, frame: Frame, make: Callable[[int, tuple[int, int]], tuple[str, torch.Tensor]]
    ) -> list[tuple[str, torch.Tensor]]:
        """The tensors of a frame: made (`make(index, place)`) once, for as long as they stay there."""
        known = self._views.get(frame.first)
        if known is None or known[0] != frame.places:
            views = [make(frame.first + i, place) for i, place in enumerate(frame.places)]
            known = self._views[frame.first] = (frame.places, views)
        return known[1]

    def forget_views(self) -> None:
        """Another layout: indices mean other tensors."""
        self._views = {}

    def close_all(self) -> None:
        """Close everything. Safe to call twice."""
        self._views = {}
        while self._opened:
            _, (opened, _) = self._opened.popitem()
            self._device.close(opened)
