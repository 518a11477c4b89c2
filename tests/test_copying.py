"""Batched copies are of bits, not of values; streamed ones write what they should, and not a byte more."""

from __future__ import annotations

import ctypes
import gc
import importlib.machinery
import importlib.util
import itertools
import platform
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from rayxfer import WeightTransferConfig, copying
from rayxfer.copying import (
    PIECE_BYTES,
    Hasher,
    _bits,
    can_stream,
    copy_all,
    copy_bits,
    copy_bytes,
    copy_many,
    copy_spread,
    streams,
)
from rayxfer.digest import digest_memory
from rayxfer.errors import TransferError
from rayxfer.testing import check_engine, raw_bytes
from rayxfer.testing.conformance import _DTYPES
from rayxfer.testing.local import LocalController
from rayxfer.threads import spread
from tests.helpers import POISON, assert_same_bytes, poison
from tests.test_placement import Zoo


def _filled(dtype: torch.dtype, byte: int) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.full((6,), byte > 0x7F)
    return torch.full((6 * dtype.itemsize,), byte, dtype=torch.uint8).view(dtype)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_every_dtype_is_copied_bit_for_bit(dtype: torch.dtype) -> None:
    for copy in (copy_all, copy_bits):
        targets = [_filled(dtype, 0), _filled(dtype, 0)[2]]
        values = [_filled(dtype, 0xFD), _filled(dtype, 0x7D)[1]]  # NaNs with a payload
        for _ in range(2):
            copy(targets, values)
            assert [raw_bytes(t) for t in targets] == [raw_bytes(v) for v in values]


def test_floats_of_16_and_8_bits_are_copied_as_whole_numbers() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e5m2):
        tensor = torch.zeros(4, 3, dtype=dtype).t()
        bits = _bits(tensor)
        assert not bits.dtype.is_floating_point
        assert (bits.data_ptr(), bits.shape, bits.stride()) == (
            tensor.data_ptr(),
            tensor.shape,
            tensor.stride(),
        )
        assert _bits(tensor) is bits  # kept
        tensor.data = torch.ones(4, 3, dtype=dtype)  # unless the tensor has other memory now
        assert _bits(tensor).data_ptr() == tensor.data_ptr()


def test_what_is_kept_goes_with_its_tensor() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    gone = weakref.ref(_bits(tensor))
    del tensor
    gc.collect()
    assert gone() is None


# ---- streamed ----------------------------------------------------------------------------------


@pytest.fixture(params=["native", "memmove"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With `copies.c`, and as where there was no compiler for it."""
    if request.param == "memmove":
        monkeypatch.setattr(copying, "_native", None)
    elif not can_stream():
        pytest.skip("copies.c was not built, or does not stream on this processor")
    return str(request.param)


def random_bytes(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator)


def test_it_was_built_where_it_can_be() -> None:
    """Without it everything works, only slower: nothing else would tell."""
    if not (shutil.which("cc") or shutil.which("gcc")) or platform.machine() != "x86_64":
        pytest.skip("no compiler here, or another processor")
    assert can_stream(), "pip install -e . builds it"


@pytest.mark.parametrize("to", [0, 1, 8, 63])
@pytest.mark.parametrize("source", [0, 1, 8, 63])
def test_any_size_at_any_address_and_nothing_beside_it(build: str, to: int, source: int) -> None:
    values = random_bytes(4096)
    target = torch.empty(4096, dtype=torch.uint8)
    for size in (*range(0, 600), 1023, 1024, 1025, 3000):
        target.fill_(POISON)
        copy_bytes(target.data_ptr() + to, values.data_ptr() + source, size, stream=True)
        assert torch.equal(target[to : to + size], values[source : source + size]), size
        assert (target[:to] == POISON).all(), size
        assert (target[to + size :] == POISON).all(), size


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 17])
def test_a_digest_is_of_what_was_copied(build: str, size: int, stream: bool) -> None:
    values, target = random_bytes(size), torch.zeros(size, dtype=torch.uint8)
    hasher = Hasher()
    copy_bytes(target.data_ptr(), values.data_ptr(), size, hasher, stream=stream)
    assert torch.equal(target, values)
    assert (hasher.value(), hasher.num_bytes) == (digest_memory(values.data_ptr(), size), size)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("digests", [None, []])
def test_many_memories(build: str, stream: bool, digests: list[int] | None) -> None:
    sizes = [0, 1, 5, 255, 256, 257, 4096, 0, 70_001]
    values = [random_bytes(size) for size in sizes]
    targets = [torch.full((size + 2,), POISON, dtype=torch.uint8) for size in sizes]
    found = None if digests is None else list(digests)
    copy_many(
        [t.data_ptr() + 1 for t in targets],
        [v.data_ptr() for v in values],
        sizes,
        found,
        stream=stream,
    )
    for target, value in zip(targets, values, strict=True):
        assert torch.equal(target[1:-1], value)
        assert target[0] == target[-1] == POISON
    if found is not None:
        assert found == [digest_memory(v.data_ptr(), v.nbytes) for v in values]
    copy_many([], [], [], found, stream=stream)


def _spread(sizes: list[int], *, digested: bool, stream: bool = False) -> None:
    """Everything is copied to its place, nothing beside it, and every digest is that of its own memory."""
    values = random_bytes(sum(sizes))
    target = torch.full((sum(sizes) + 64 * len(sizes),), POISON, dtype=torch.uint8)
    starts = list(itertools.accumulate(sizes, initial=0))[:-1]
    places = [start + 64 * index + 32 for index, start in enumerate(starts)]
    found: list[int] | None = [7] if digested else None
    copy_spread(
        [target.data_ptr() + place for place in places],
        [values.data_ptr() + start for start in starts],
        sizes,
        found,
        stream=stream,
    )
    for place, start, size in zip(places, starts, sizes, strict=True):
        assert torch.equal(target[place : place + size], values[start : start + size])
        assert (target[place - 32 : place] == POISON).all()
        assert (target[place + size : place + size + 32] == POISON).all()
    if found is not None:
        own = [digest_memory(values.data_ptr() + a, n) for a, n in zip(starts, sizes, strict=True)]
        assert found == [7, *own]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("digested", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_memories_of_any_size_are_copied_by_several_threads(
    build: str, threads: int, digested: bool, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "cores", lambda: threads)
    monkeypatch.setattr(copying, "_WORTH_BYTES", 0)
    monkeypatch.setattr(copying, "_SHARE_BYTES", 70_000)
    monkeypatch.setattr(copying, "_MOST_THREADS", 5)
    monkeypatch.setattr(copying, "THREADED_BYTES", 0)
    for sizes in (
        [],
        [0],
        [1],
        [0, 0, 5, 0],
        [69_999, 70_000, 70_001, 139_999, 140_000, 140_001],
        [200_000, *[13] * 300, 0, 1_500_000, 69_000, 1000, 1000, 0],
        [35_000] * 9,
    ):
        _spread(sizes, digested=digested, stream=stream)


def test_shares_are_every_byte_once_and_balanced() -> None:
    sizes = [3 << 20, 1, 0, 5 << 20, 2 << 20, 2 << 20, 1, 40 << 20]
    for whole in (False, True):
        seen: list[tuple[int, int, int]] = []
        for first, stop, offset, size in copying.shares(sizes, 4 << 20, whole=whole):
            assert stop == first + 1 or (offset == 0 and size == sum(sizes[first:stop]))
            assert size <= 4 << 20 or (whole and stop == first + 1)
            spans = [(first, offset, size)] if stop == first + 1 else []
            seen += spans or [(i, 0, sizes[i]) for i in range(first, stop)]
        for index, size in enumerate(sizes):
            parts = sorted((at, n) for i, at, n in seen if i == index)
            assert sum(n for _, n in parts) == size
            assert all(a + n == b for (a, n), (b, _) in itertools.pairwise(parts))


def test_threads_only_where_there_is_something_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def counted(function: Any, todo: Any, threads: int) -> list[Any]:
        asked.append(threads)
        return spread(function, todo, threads)

    monkeypatch.setattr(copying, "spread", counted)
    monkeypatch.setattr(copying, "cores", lambda: 2)
    _spread([10 << 20, 5 << 20], digested=False)  # little
    _spread([30_000] * 1200, digested=True)  # small, and digests of small ones are taken in turns
    assert not asked
    _spread([30_000] * 1200, digested=False)
    _spread([20 << 20, 14 << 20], digested=True)
    assert asked == [2, 2]
    monkeypatch.setattr(copying, "cores", lambda: 1)
    _spread([20 << 20, 14 << 20], digested=True)
    assert asked == [2, 2]


@pytest.mark.parametrize("digested", [False, True])
@pytest.mark.parametrize("threads", [1, 3])
def test_nobody_writes_any_more_once_it_was_called_off(
    digested: bool, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "cores", lambda: threads)
    values, target = random_bytes(64 << 20), torch.zeros(64 << 20, dtype=torch.uint8)
    asked = itertools.count(1)

    def check() -> None:
        if next(asked) == 4:
            raise TransferError("called off")

    with pytest.raises(TransferError, match="called off"):
        copy_spread(
            [target.data_ptr(), target.data_ptr() + (40 << 20)],
            [values.data_ptr(), values.data_ptr() + (40 << 20)],
            [40 << 20, 24 << 20],
            [] if digested else None,
            check=check,
        )
    target.zero_()
    time.sleep(0.05)
    assert not target.any()


def test_what_a_thread_raises_is_raised_when_all_have_stopped() -> None:
    at_it, begun = set[int](), threading.Barrier(3)

    def work(number: int) -> int:
        at_it.add(number)
        if number < 3:
            begun.wait(30)
        if number == 1:
            raise ValueError("one")
        time.sleep(0.05)
        at_it.discard(number)
        return number

    with pytest.raises(ValueError, match="one"):
        spread(work, range(100), 3)
    assert at_it == {1}
    assert threading.active_count() < 50
    assert spread(lambda n: n * n, range(7), 3) == [n * n for n in range(7)]
    assert spread(lambda n: n, [], 3) == []


def test_columns_of_different_length_are_an_error(build: str) -> None:
    target = torch.full((8,), POISON, dtype=torch.uint8)
    with pytest.raises(ValueError, match="2 targets, 1 sources, 1 sizes"):
        copy_many([target.data_ptr()] * 2, [target.data_ptr()], [8], None)
    assert (target == POISON).all()


def test_another_thread_sees_all_of_it_once_it_is_told(build: str) -> None:
    """Streamed stores are ordered with what is said after them."""
    size = 1 << 20
    values, target = random_bytes(size), torch.zeros(size, dtype=torch.uint8)
    told, wrong = threading.Semaphore(0), []

    def reader() -> None:
        for _ in range(50):
            told.acquire()
            if not torch.equal(target, values):
                wrong.append(True)
            ready.release()

    ready = threading.Semaphore(0)
    thread = threading.Thread(target=reader)
    thread.start()
    for _ in range(50):
        target.fill_(POISON)
        copy_bytes(target.data_ptr(), values.data_ptr(), size, stream=True)
        told.release()
        ready.acquire()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert not wrong


def test_only_what_no_cache_can_hold_is_streamed() -> None:
    assert not streams(0)
    assert not streams(1 << 20)
    assert streams(1 << 30)


@pytest.mark.parametrize("content", [b"", b"no library", None])
def test_what_cannot_be_loaded_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes | None
) -> None:
    """Another machine's build on a shared disk, half of a file, none at all."""
    path = tmp_path / "_copies.abi3.so"
    if content is not None:
        path.write_bytes(content)
    spec = importlib.machinery.ModuleSpec("rayxfer._copies", None, origin=str(path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert copying._load_native() is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert copying._load_native() is None


def test_a_library_without_our_functions_is_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ctypes.CDLL(None)
    monkeypatch.setattr(copying.ctypes, "CDLL", lambda path: other)
    assert copying._load_native() is None


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Small weights are streamed too, and by several threads; the sizes that were."""
    seen: list[int] = []
    for name, value in (("_WORTH_BYTES", 0), ("THREADED_BYTES", 0), ("_SHARE_BYTES", 4096)):
        monkeypatch.setattr(copying, name, value)
    monkeypatch.setattr(copying, "cores", lambda: 3)
    monkeypatch.setattr(copying, "_CACHE_BYTES", 0)
    if copying._native is None:
        pytest.skip("copies.c was not built")
    one, many = copying._native

    def counted_one(to: int, source: int, size: int) -> None:
        seen.append(size)
        one(to, source, size)

    def counted_many(to: int, source: int, sizes: int, count: int, stream: bool) -> None:
        seen.append(int(stream))
        many(to, source, sizes, count, stream)

    monkeypatch.setattr(copying, "_native", (counted_one, counted_many))
    return seen


@pytest.mark.parametrize("engine", ["shm", "gloo"])
def test_an_engine_conforms_with_weights_that_are_streamed(always: list[int], engine: str) -> None:
    assert not check_engine(engine).failed
    assert any(always)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("load_mode", ["in_place", "staged", "mapped"])
@pytest.mark.parametrize("verify", ["digest", "off"])
def test_every_way_of_loading_streams(
    always: list[int], backend: str, load_mode: str, verify: str
) -> None:
    if (backend, load_mode) == ("gloo", "mapped"):
        pytest.skip("bytes arrive at their places")
    model, receiver = Zoo(), Zoo(1)
    config = WeightTransferConfig(backend=backend, load_mode=load_mode, verify=verify)  # type: ignore[arg-type]
    with LocalController([receiver], config) as controller:
        for step in range(3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)
            if load_mode != "mapped" or not step:
                poison(receiver)
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), receiver.state_dict())
    assert any(always)


def test_a_snapshot_streams(always: list[int]) -> None:
    model, receiver = Zoo(), Zoo(1)
    with LocalController([receiver], WeightTransferConfig(backend="shm")) as controller:
        poison(receiver)
        handle = controller.sync_weights_async(model)
        sizes = sum(always)
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        handle.wait(60)
        assert_same_bytes(before, receiver.state_dict())
    assert sizes
