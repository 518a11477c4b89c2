"""The digest that GPUs compute. Here by a CPU: it is the same operations, so the same numbers."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rayxfer import (
    ContractError,
    ModuleSource,
    TransferError,
    WeightTransferConfig,
    gpu_digest,
    sender,
)
from rayxfer.digest import XXH3, digest_named
from rayxfer.gpu_digest import WORDS
from rayxfer.testing import LocalController, check_engine
from rayxfer.testing.doubles import DoubleIPCEngine
from rayxfer.topology import local_facts
from tests.fleet import Net, held, net
from tests.helpers import assert_same_bytes, poison, raw_bytes
from tests.test_packing import DTYPES, LAYOUTS, random_base

MASK = (1 << 64) - 1


def multiplier(place: int) -> int:
    """splitmix64, as its author writes it."""
    z = (place + 1) * 0x9E3779B97F4A7C15 & MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return (z ^ (z >> 31)) | 1


def by_hand(data: bytes, chunk_words: int) -> int:
    words = [n for (n,) in struct.iter_unpack("<i", data + b"\0" * (-len(data) % 4))]
    total = 0
    for start in range(0, len(words), chunk_words):
        here = words[start : start + chunk_words]
        total = total * 0xD1342543DE82EF95 + sum(w * multiplier(i) for i, w in enumerate(here))
    return total & MASK


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_it_is_a_sum_of_words(
    dtype: torch.dtype, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    tensor = layout(random_base(dtype))
    assert WORDS.of(tensor) == by_hand(raw_bytes(tensor), 1 << 21)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 31, 32, 33, 64, 65, 99])
def test_a_long_tensor_goes_by_chunks(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(gpu_digest, "_CHUNK_WORDS", 8)
    monkeypatch.setattr(gpu_digest, "_SMALL_WORDS", 0)
    data = random_base(torch.uint8).reshape(-1)[:count]
    assert WORDS.of(data) == by_hand(raw_bytes(data), 8)
    if count > 1:  # memory that does not begin at a word
        assert WORDS.of(data[1:]) == by_hand(raw_bytes(data[1:]), 8)


def test_the_real_chunks() -> None:
    words = (1 << 21) + 5
    tensor = torch.randint(
        -(1 << 31), 1 << 31, (words,), generator=torch.Generator().manual_seed(1)
    )
    tensor = tensor.to(torch.int32)
    first = sum(w * multiplier(i) for i, w in enumerate(tensor[: 1 << 21].tolist()))
    rest = sum(w * multiplier(i) for i, w in enumerate(tensor[1 << 21 :].tolist()))
    assert WORDS.of(tensor) == (first * 0xD1342543DE82EF95 + rest) & MASK


def test_every_bit_counts_and_places_do() -> None:
    tensor = torch.zeros(100, dtype=torch.uint8)
    found = {WORDS.of(tensor)}
    for index in range(100):
        for bit in range(8):
            tensor[index] = 1 << bit
            found.add(WORDS.of(tensor))
        tensor[index] = 0
    assert len(found) == 801
    top = torch.zeros(64, dtype=torch.int32)
    sums = set()  # a pair of top bits cancels in a plain sum
    for i in range(64):
        for j in range(i):
            top.zero_()
            top[i] = top[j] = -(1 << 31)
            sums.add(WORDS.of(top))
    assert len(sums | {0}) == 64 * 63 // 2 + 1


def test_many_are_settled_at_once() -> None:
    tensors = [layout(random_base(torch.bfloat16)) for layout in LAYOUTS.values()]
    assert WORDS.many(tensors) == [WORDS.of(tensor) for tensor in tensors]
    assert WORDS.settle([7, WORDS.later(tensors[0]), 8]) == [7, WORDS.of(tensors[0]), 8]
    assert WORDS.many([]) == []


def test_equal_sizes_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of a chunk at most; those that are no whole words, empty or long among them."""
    tensors = [
        random_base(torch.uint8, seed).reshape(-1)[: 4 * (seed % 5) + seed % 2]
        for seed in range(60)
    ]
    expected = [by_hand(raw_bytes(tensor), 8) for tensor in tensors]
    monkeypatch.setattr(gpu_digest, "_CHUNK_WORDS", 8)
    monkeypatch.setattr(gpu_digest, "_SMALL_WORDS", 3)
    assert WORDS.many(iter(tensors)) == expected


def test_names() -> None:
    assert digest_named("xxh3") is XXH3
    assert digest_named("words") is WORDS
    with pytest.raises(ContractError, match=r"'md5'.*'xxh3' or 'words'"):
        digest_named("md5")


# ---- in a round -----------------------------------------------------------------------------------


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every tensor were on a GPU."""
    monkeypatch.setattr(sender, "_digest_for", lambda *_: "words")


@pytest.mark.parametrize("engine", ["gloo", "shm", DoubleIPCEngine])
def test_engines_conform_with_it(words: None, engine: str | type[DoubleIPCEngine]) -> None:
    assert not check_engine(engine).failed


class Opaque(Net):
    """Loads by itself, so `delivered` is what can be proven."""

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        own = dict(self.named_parameters()) | dict(self.named_buffers())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
        return {name for name, _ in weights}


@pytest.mark.parametrize("mode", ["in_place", "staged", "mapped", "opaque"])
@pytest.mark.parametrize("casts", [False, True])
def test_it_proves_what_xxh3_proves(words: None, mode: str, casts: bool) -> None:
    model = net()
    worker = Opaque() if mode == "opaque" else Net()
    if casts:
        worker.to(torch.bfloat16)
    load_mode = "in_place" if mode == "opaque" else mode
    config = WeightTransferConfig(backend="shm", load_mode=load_mode)
    with LocalController([worker], config) as controller:
        for _ in range(2):
            poison(worker)
            report = controller.sync_weights(model)
            assert report.workers[0].verified == ("delivered" if mode == "opaque" else "loaded")
            same = {k: t.to(held(worker)[k].dtype) for k, t in held(model).items()}
            assert_same_bytes(held(worker), same)
        assert report.unchanged == tuple(meta.name for meta in ModuleSource(model).metadata())


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(5))
        self.b = nn.Parameter(torch.zeros(7))


def test_it_finds_a_bit(words: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that flips after the last byte has arrived."""
    worker = Two()
    real = WORDS.many

    def many(tensors: Iterable[torch.Tensor]) -> list[int]:
        with torch.no_grad():
            worker.b.view(torch.int32)[3] ^= 1 << 17
        return real(tensors)

    monkeypatch.setattr(WORDS, "many", many)
    config = WeightTransferConfig(backend="shm")
    with (
        LocalController([worker], config) as controller,
        pytest.raises(TransferError, match="digest mismatch at 'b'"),
    ):
        controller.sync_weights(Two())


def test_which_fleets_take_it() -> None:
    host = local_facts()
    gpu = dataclasses.replace(host, device="cuda:GPU-1234")

    def chosen(sending: object, *workers: object) -> str:
        links = [SimpleNamespace(facts=facts) for facts in workers]
        return sender._digest_for(sending, links)  # type: ignore[arg-type]

    assert chosen(gpu, gpu, gpu) == "words"
    assert chosen(gpu, gpu, host) == "xxh3"
    assert chosen(host, gpu) == "xxh3"
    assert chosen(host, host) == "xxh3"
