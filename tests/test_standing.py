"""Tensors that are there already are sent and taken by address: which those are, and that bytes agree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rayxfer import ContractError, TransferError, WeightTransferConfig
from rayxfer.background import Snapshots
from rayxfer.binding import Binding
from rayxfer.copying import copy_many, copy_spread
from rayxfer.digest import XXH3, Digest, digest
from rayxfer.feed import Feed
from rayxfer.gpu_digest import WORDS
from rayxfer.loader import ModuleLoader
from rayxfer.metadata import Columns, ParamMeta
from rayxfer.packing import Layout
from rayxfer.source import MappingSource, ModuleSource, Standing, WeightSource, checked_metadata
from rayxfer.testing.local import LocalController
from tests.helpers import assert_same_bytes, poison, raw_bytes

DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.bool]


def zoo() -> dict[str, torch.Tensor]:
    """Dense tensors of many sizes, some with a gradient, one without elements, one without dimensions."""
    out: dict[str, torch.Tensor] = {}
    for i in range(60):
        raw = torch.randint(0, 2, (1 + 37 * i % 500, 8), dtype=torch.uint8)
        dtype = DTYPES[i % len(DTYPES)]
        out[f"t{i}"] = raw.view(dtype) if dtype != torch.bool else raw.bool()
    out["large"] = torch.randn(400_000)
    out["parameter"] = nn.Parameter(torch.randn(30))
    out["empty"] = torch.empty(0, 4)
    out["scalar"] = torch.tensor(3.0)
    out["last"] = torch.randn(11)
    return out


def columns_of(source: WeightSource) -> Columns:
    return Columns(checked_metadata(source))


def standing_of(source: WeightSource) -> Standing | None:
    return source._standing(columns_of(source))


# ---- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rename", [None, {"": "model"}])
def test_what_stands_is_what_iteration_yields(rename: Any) -> None:
    for source in (
        MappingSource(zoo(), rename=rename),
        ModuleSource(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), rename=rename),
    ):
        found = standing_of(source)
        assert found is not None
        pairs = list(source)
        assert list(found.names) == [name for name, _ in pairs]
        assert [t.data_ptr() for _, t in pairs] == list(found.addresses)
        assert [t.nbytes for _, t in pairs] == list(found.sizes)


def test_ties_stand_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    source = ModuleSource(model)
    found = standing_of(source)
    assert found is not None
    assert found.names == ("0.weight",)
    model[1].weight = nn.Parameter(torch.zeros(4, 4))
    assert source._standing(Columns([ParamMeta("0.weight", torch.float32, (4, 4))])) is None


def test_ties_that_came_or_went_are_another_offer() -> None:
    apart = {"a": torch.zeros(3), "b": torch.zeros(3)}
    tied = {"a": apart["a"], "b": apart["a"]}
    assert MappingSource(apart)._standing(columns_of(MappingSource(tied))) is None
    assert MappingSource(tied)._standing(columns_of(MappingSource(apart))) is None


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(4, 6).t(),
        torch.zeros(8)[::2],
        torch.zeros(1).expand(8),
        torch.zeros(4, dtype=torch.complex64).conj(),
        torch.zeros(4, dtype=torch.complex64).conj().imag,
        torch.zeros(4, device="meta"),
        torch.eye(4).to_sparse(),
    ],
    ids=["transposed", "strided", "expanded", "conj", "neg", "meta", "sparse"],
)
def test_what_is_not_dense_memory_does_not_stand(tensor: torch.Tensor) -> None:
    columns = Columns([ParamMeta("x", tensor.dtype, tuple(tensor.shape))])
    assert MappingSource({"x": tensor})._standing(columns) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"a": torch.zeros(3), "c": torch.zeros(2)},
        {"b": torch.zeros(2), "a": torch.zeros(3)},
        {"a": torch.zeros(3)},
        {"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)},
        {"a": torch.zeros(3), "b": torch.zeros(2, dtype=torch.float64)},
        {"a": torch.zeros(3), "b": torch.zeros(1, 2)},
        {},
    ],
)
def test_another_offer_does_not_stand(changed: dict[str, torch.Tensor]) -> None:
    known = columns_of(MappingSource({"a": torch.zeros(3), "b": torch.zeros(2)}))
    assert MappingSource(changed)._standing(known) is None


def test_a_source_of_the_users_own_is_asked() -> None:
    class Iterates(MappingSource):
        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return super().__iter__()

    class Describes(MappingSource):
        def metadata(self) -> list[ParamMeta]:
            return super().metadata()

    class Custom(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta("a", torch.float32, (2,))]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(2)

    tensors = {"a": torch.zeros(2)}
    for source in (
        Iterates(tensors),
        Describes(tensors),
        Custom(),
        MappingSource(tensors, dtype=torch.bfloat16),
    ):
        assert standing_of(source) is None


def test_a_snapshot_stands_where_it_was_copied_to() -> None:
    tensors = {"a": torch.arange(5.0), "b": torch.arange(12.0).view(3, 4).t()}
    snapshot = Snapshots().take(MappingSource(tensors))
    found = standing_of(snapshot)
    assert found is not None
    for name, tensor, address in zip(found.names, found.tensors, found.addresses, strict=True):
        assert torch.equal(tensor, tensors[name])
        assert address == tensor.data_ptr() != tensors[name].data_ptr()
    assert snapshot._standing(columns_of(MappingSource({"a": tensors["a"]}))) is None


@pytest.mark.parametrize("tied", [False, True])
def test_a_snapshot_of_what_stands_is_copied_in_one_go(
    tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ties stay ties, and the source is not iterated."""
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 5), "b": torch.nn.Linear(4, 5)})
    if tied:
        module["b"].weight = module["a"].weight
    calls: list[int] = []

    def counted(targets: Any, sources: Any, sizes: Any, *rest: Any, **options: Any) -> None:
        calls.append(sum(sizes))
        copy_spread(targets, sources, sizes, *rest, **options)

    monkeypatch.setattr("rayxfer.background.copy_spread", counted)
    monkeypatch.setattr("rayxfer.background.Reading", None)
    source = ModuleSource(module)
    snapshot = Snapshots().take(source)
    assert calls == [sum(meta.num_bytes for meta in source.metadata())]
    assert snapshot.metadata() == source.metadata()
    assert any(meta.aliases for meta in snapshot.metadata()) == tied
    found = standing_of(snapshot)
    assert found is not None
    for name, tensor in zip(found.names, found.tensors, strict=True):
        assert raw_bytes(tensor) == raw_bytes(module.state_dict()[name])
    other = [ParamMeta(m.name, m.dtype, m.shape, ("else",)) for m in snapshot.metadata()]
    assert snapshot._standing(Columns(other)) is None


# ---- feeds ----------------------------------------------------------------------------------------


def feed_of(source: MappingSource, *, digesting: Digest | None = XXH3) -> tuple[Feed, Layout]:
    feed, standing = Feed(digesting=digesting), standing_of(source)
    assert standing is not None
    feed.stand(standing)
    return feed, Layout(checked_metadata(source), 4096)


def pack_all(feed: Feed, layout: Layout, buffer: torch.Tensor) -> None:
    """As an engine does: what can be packed, else one by one."""
    for bucket, packed, start in zip(
        layout.plan.buckets, layout.packed, layout.starts, strict=True
    ):
        done = 0
        while done < len(bucket.pieces):
            count = feed.pack(buffer.data_ptr() + start, packed, done)
            if not count:
                name, tensor = next(feed)
                at = start + packed.offsets[done]
                assert name == packed.names[done]
                if tensor.nbytes:
                    flat = torch.frombuffer(bytearray(raw_bytes(tensor)), dtype=torch.uint8)
                    buffer[at : at + tensor.nbytes] = flat
                count = 1
            done += count
    assert next(feed, None) is None


@pytest.mark.parametrize("digesting", [XXH3, WORDS, None], ids=["xxh3", "words", "off"])
def test_packed_bytes_and_digests_are_those_of_iteration(digesting: Digest | None) -> None:
    source = MappingSource(zoo())
    feed, layout = feed_of(source, digesting=digesting)
    buffer = torch.full((layout.file_bytes,), 0xA5, dtype=torch.uint8)
    pack_all(feed, layout, buffer)
    for packed, start in zip(layout.packed, layout.starts, strict=True):
        for name, offset, size in zip(packed.names, packed.offsets, packed.sizes, strict=True):
            found = buffer[start + offset : start + offset + size].numpy().tobytes()
            assert found == raw_bytes(dict(source)[name]), name
    expected = None if digesting is None else digesting.many([t for _, t in source])
    feed.finish()
    assert feed.digests == expected
    assert feed.handed == len(zoo())
    assert feed.last_name == "last"


def test_what_is_skipped_counts_and_is_digested() -> None:
    source = MappingSource(zoo())
    feed, layout = feed_of(source)
    for i, packed in enumerate(layout.packed):
        if i % 2:
            for name in packed.names:
                assert next(feed)[0] == name
            continue
        places = feed.places(packed)
        assert places is not None
        assert list(places) == [dict(source)[name].data_ptr() for name in packed.names]
        feed.skip(packed)
    assert next(feed, None) is None
    feed.finish()
    assert feed.digests == [digest(tensor) for _, tensor in source]


def test_where_later_ones_lie_is_told_before_they_are_due() -> None:
    source = MappingSource({f"t{i}": torch.full((300,), float(i)) for i in range(20)})
    feed, layout = feed_of(source)
    told = [feed.places(packed) for packed in layout.packed]
    assert len(told) > 2
    assert [a for places in told if places is not None for a in places] == [
        tensor.data_ptr() for _, tensor in source
    ]
    with pytest.raises(ValueError, match="places"):
        feed.skip(layout.packed[1])
    for packed in layout.packed:
        feed.skip(packed)
        assert feed.places(packed) is None, "it was handed out"
    assert next(feed, None) is None
    feed.finish()
    assert feed.digests == [digest(tensor) for _, tensor in source]


def test_what_is_skipped_is_read_as_its_pace_allows() -> None:
    source = MappingSource(
        {"large": torch.arange(700_001), "none": torch.empty(0), "small": torch.arange(5)}
    )
    feed, layout = feed_of(source)
    asked: list[int] = []
    for packed in layout.packed:
        feed.skip(packed, asked.append)
    feed.finish()
    assert feed.digests == [digest(tensor) for _, tensor in source]
    assert sum(asked) == sum(tensor.nbytes for _, tensor in source)
    assert max(asked) <= 2 << 20 < 5_600_008 <= sum(asked)


def test_weights_that_move_between_the_telling_and_the_reading_are_named() -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(20)}
    feed, layout = feed_of(MappingSource(tensors))
    assert feed.places(layout.packed[0]) is not None
    tensors["t3"].data = torch.zeros(100)
    with pytest.raises(ContractError, match="'t3' was given other memory"):
        feed.skip(layout.packed[0])


def test_only_what_comes_next_is_packed() -> None:
    source = MappingSource({f"t{i}": torch.full((100,), float(i)) for i in range(20)})
    feed, layout = feed_of(source)
    buffer = torch.empty(8192, dtype=torch.uint8)
    other = Layout(
        [ParamMeta(f"u{i}", torch.float32, (100,)) for i in range(20)],
        4096,
    )
    smaller = Layout([ParamMeta(f"t{i}", torch.float32, (99,)) for i in range(20)], 4096)
    for wrong, start in ((layout.packed[1], 0), (layout.packed[0], 1)):
        assert feed.pack(buffer.data_ptr(), wrong, start) == 0
    for wrong in (other.packed[0], smaller.packed[0]):
        assert feed.pack(buffer.data_ptr(), wrong, 0) == 0
        assert feed.places(wrong) is None
        with pytest.raises(ValueError, match="places"):
            feed.skip(wrong)
    assert feed.handed == 0
    assert feed.pack(buffer.data_ptr(), layout.packed[0], 0) == len(layout.packed[0].sizes)


def test_an_abort_ends_it() -> None:
    feed, layout = feed_of(MappingSource({"a": torch.zeros(4)}))
    feed.abort(TransferError("over"))
    for call in (
        lambda: feed.pack(0, layout.packed[0], 0),
        lambda: feed.skip(layout.packed[0]),
        lambda: next(feed),
    ):
        with pytest.raises(TransferError, match="over"):
            call()


# ---- places at the worker -------------------------------------------------------------------------


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i in range(8):
            self.register_parameter(f"p{i}", nn.Parameter(torch.zeros(10 + i)))


def loader_for(model: nn.Module, offer: dict[str, torch.Tensor], **settings: Any) -> ModuleLoader:
    loader = ModuleLoader(model, **settings)
    preflight = loader.preflight(checked_metadata(MappingSource(offer)), partial=False)
    assert not preflight.problems
    return loader


def offered() -> dict[str, torch.Tensor]:
    return {f"p{i}": torch.randn(10 + i) for i in range(8)}


@pytest.mark.parametrize("staged", [False, True])
def test_bytes_may_be_copied_to_plain_places(staged: bool) -> None:
    model, offer = Mixed(), offered()
    poison(model)
    before = {name: raw_bytes(p) for name, p in model.named_parameters()}
    loader = loader_for(model, offer, staged=staged)
    tensors = list(offer.values())
    for run in (slice(0, 3), slice(3, 8)):
        places = loader.landings(run)
        assert places is not None
        copy_many(
            places, [t.data_ptr() for t in tensors[run]], [t.nbytes for t in tensors[run]], None
        )
        loader.landed_all(run)
    assert loader.touched is not staged
    assert loader.unproven() == []
    assert loader.loaded_digests() == [digest(tensor) for tensor in tensors]
    if staged:
        assert {name: raw_bytes(p) for name, p in model.named_parameters()} == before
    loader.commit()
    assert_same_bytes(offer, dict(model.named_parameters()))


def _cast(model: nn.Module) -> None:
    model.p3 = nn.Parameter(torch.zeros(13, dtype=torch.bfloat16))


def _stride(model: nn.Module) -> None:
    model.p3 = nn.Parameter(torch.zeros(26)[::2], requires_grad=False)


@pytest.mark.parametrize("change", [_cast, _stride])
def test_no_addresses_where_one_place_is_not_plain(change: Callable[[nn.Module], None]) -> None:
    model, offer = Mixed(), offered()
    change(model)
    loader = loader_for(model, offer)
    assert loader.landings(slice(0, 8)) is None
    assert not loader.touched
    assert loader.landings(slice(0, 3)) is not None
    assert loader.landings(slice(4, 8)) is not None


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("verify", ["digest", "off"])
@pytest.mark.parametrize("change", [None, _cast, _stride])
def test_whole_rounds(backend: str, verify: Any, change: Any) -> None:
    worker, offer = Mixed(), offered()
    if change is not None:
        change(worker)
    with LocalController(
        [worker], WeightTransferConfig(backend=backend, verify=verify)
    ) as controller:
        for step in range(3):
            offer["p0"].fill_(step)
            poison(worker)
            controller.sync_weights(offer)
            dtypes = {name: p.dtype for name, p in worker.named_parameters()}
            expected = {name: tensor.to(dtypes[name]) for name, tensor in offer.items()}
            assert_same_bytes(expected, dict(worker.named_parameters()))


# ---- memory that moves, or is not there -------------------------------------------------------------


class _Wrapper(torch.Tensor):
    """Keeps its values in another tensor, and has no memory of its own."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> _Wrapper:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*[a.inner if isinstance(a, cls) else a for a in args], **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return cls(out) if isinstance(out, torch.Tensor) else out


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_tensor_without_memory_of_its_own_is_written_by_torch(backend: str) -> None:
    worker, offer = Mixed(), offered()
    inner = torch.full((13,), -1.0)
    worker.p3 = nn.Parameter(_Wrapper(inner), requires_grad=False)
    with LocalController(
        [worker], WeightTransferConfig(backend=backend, verify="off")
    ) as controller:
        for step in range(2):
            offer["p3"].fill_(step)
            controller.sync_weights(offer)
            assert raw_bytes(inner) == raw_bytes(offer["p3"])
            assert raw_bytes(worker.p4) == raw_bytes(offer["p4"])  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["shm", "gloo"])
@pytest.mark.parametrize("verify", ["digest", "off"])
def test_memory_that_moved_after_the_preflight_is_found_again(backend: str, verify: Any) -> None:
    worker, offer = Mixed(), offered()
    left: list[torch.Tensor] = []

    def move(mode: str) -> None:
        for parameter in worker.parameters():
            left.append(parameter.data)  # kept, so that a stray write would be seen
            parameter.data = torch.full_like(parameter.data, 7.0)

    with LocalController(
        [Binding(worker, pause=move, resume=lambda: None)],
        WeightTransferConfig(backend=backend, verify=verify),
    ) as controller:
        for step in range(3):
            offer["p0"].fill_(step)
            poison(worker)
            del left[:]
            report = controller.sync_weights(offer)
            assert report.attempts == 1
            assert_same_bytes(offer, dict(worker.named_parameters()))
            assert all(set(raw_bytes(tensor)) == {0xA5} for tensor in left)


def test_a_tensor_that_was_replaced_after_the_preflight_is_told_before_a_byte_lands() -> None:
    model, offer = Mixed(), offered()
    poison(model)
    loader = loader_for(model, offer)
    model.p3 = nn.Parameter(torch.zeros(99))
    with pytest.raises(ContractError, match="'p3' was replaced"):
        loader.landings(slice(0, 3))
    assert not loader.touched


def test_a_storage_that_was_freed_is_an_error_on_either_side() -> None:
    worker, offer = Mixed(), offered()
    with LocalController([worker], WeightTransferConfig(backend="shm")) as controller:
        controller.sync_weights(offer)
        kept = worker.p3.untyped_storage().nbytes()  # type: ignore[union-attr, operator]
        worker.p3.untyped_storage().resize_(0)  # type: ignore[union-attr, operator]
        with pytest.raises(TransferError, match="'p3' has no memory here"):
            controller.sync_weights(offer)
        worker.p3.untyped_storage().resize_(kept)  # type: ignore[union-attr, operator]
        controller.sync_weights(offer)
        assert_same_bytes(offer, dict(worker.named_parameters()))
        offer["p5"] = torch.zeros(15)
        offer["p5"].untyped_storage().resize_(0)
        with pytest.raises(ContractError, match="'p5' has no memory"):
            controller.sync_weights(offer)


@pytest.mark.parametrize("how", ["pack", "places"])
def test_weights_that_move_while_they_are_sent_are_named(how: str) -> None:
    tensors = {f"t{i}": torch.full((100,), float(i)) for i in range(20)}
    feed, layout = feed_of(MappingSource(tensors))
    tensors["t3"].data = torch.zeros(100)
    buffer = torch.empty(8192, dtype=torch.uint8)
    with pytest.raises(ContractError, match="'t3' was given other memory"):
        if how == "pack":
            feed.pack(buffer.data_ptr(), layout.packed[0], 0)
        else:
            feed.places(layout.packed[0])
