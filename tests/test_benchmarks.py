"""Every contender and section of `benchmarks.sync`, at a tiny size: that the right bytes arrive and
that what is printed and drawn can be made of it. No time is looked at."""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import pathlib
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks import results, sync, turns
from benchmarks.contenders import MODES, Contender, Rayxfer, Spec, Stage, Unavailable
from benchmarks.memory import Peaks
from benchmarks.peers import PEERS
from benchmarks.sections import Plan
from benchmarks.shapes import equal_shapes, num_bytes, shapes_of
from benchmarks.weights import POISON, make_weights, pieces, poisoned_weights

MIB = 1 << 20
TINY = Plan(
    size_bytes=MIB,
    sweep_bytes=MIB,
    repeats=1,
    fixed_rounds=2,
    ways=("shm", "shm_placed", "shm_mapped", "gloo"),
    peers=("memcpy", "gloo_broadcast"),
    sizes=(MIB,),
    worker_counts=(1, 2),
    tensor_counts=(3, 40),
    many_counts=(3, 40),
    models=("llama", "qwen3"),
)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks at a clock here, so nobody waits for a quiet machine, or for freed memory."""
    for pause in ("_QUIET_S", "_SETTLE_S", "_SETTLE_MAPPED_S", "_FREED_S"):
        monkeypatch.setattr(turns, pause, 0.0)


@pytest.fixture(scope="module")
def stage(ray_session: None) -> Iterator[Stage]:
    made = Stage(equal_shapes(300_000, 7))
    yield made
    made.close()


def run_or_skip(stage: Stage, spec: Spec) -> Contender:
    try:
        return turns.make(stage, spec)
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("way", [*PEERS, "shm", *MODES, "gloo", "object_store"])
def test_each_way_delivers(stage: Stage, way: str, workers: int) -> None:
    contender = run_or_skip(stage, Spec(way, "" if way in PEERS else "on", workers))
    try:
        contender.run()
        contender.poison()
        assert contender.wrong_names() == sorted(stage.shapes)
        assert contender.run() > 0
        assert contender.wrong_names() == []
        if way != "memcpy":
            sender, pids = contender.pids()
            assert len({sender, *pids}) == workers + 1
    finally:
        contender.close()


@pytest.mark.parametrize("count", range(13))
def test_everybody_has_a_turn_and_follows_others_in_turn(count: int) -> None:
    after: Counter[tuple[int, int]] = Counter()
    several = 2 if count % 2 else 1
    last: list[int] = []
    for turn in range(several * count):
        found = turns.order(count, turn)
        assert sorted(found) == list(range(count))
        assert not last or count == 1 or found[0] != last[0], "it follows itself"
        after.update(itertools.pairwise(found))
        last = found[-1:]
    assert count == 2 or max(after.values(), default=0) <= several


def test_wrong_bytes_end_the_run(stage: Stage) -> None:
    contender = turns.make(stage, Spec("memcpy"))
    contender.poison()
    with pytest.raises(SystemExit, match="wrong bytes in 7 tensors"):
        turns.check(contender)


def test_all_peers_of_a_group_get_along(ray_session: None) -> None:
    specs = [Spec(way) for way in PEERS]
    made = turns.measure(specs, {"": equal_shapes(100_000, 5)}, 2, "all peers")
    ran = {row["way"] for row in made["rows"]}
    assert ran | set(made["skipped"]) == set(PEERS)
    assert {"memcpy", "ray_put", "ray_put_zero_copy", "gloo_broadcast", "ray_direct_gloo"} <= ran


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_section_can_be_shown(ray_session: None, tmp_path: pathlib.Path) -> None:
    out: dict[str, Any] = {name: section(TINY) for name, section in sync.SECTIONS.items()}
    out |= {"load_before": (0.0,), "load_after": (0.0,), "wall_s": 1.0, "targets": []}
    out["environment"] = sync.reporting.environment()
    out["targets"] = sync.targets.as_rows(sync.targets.verdicts(out))
    out = json.loads(json.dumps(out))
    text = results.markdown(out)
    for part in ("Overview", "Fixed cost", "By workers", "By model size", "Memory", "Targets"):
        assert f"### {part}" in text
    assert all(out[name]["rows"] for name in sync.SECTIONS)
    assert {row["workers"] for row in out["workers"]["rows"]} == {1, 2}
    assert {row["tensors"] for row in out["tensors"]["rows"]} == {3, 40}
    assert {row["case"] for row in out["models"]["rows"]} == set(TINY.models)
    assert all(row["phases_s"]["update"] > 0 for row in out["fixed"]["rows"])
    pytest.importorskip("matplotlib")
    drawn = sync.plots.draw(out, tmp_path)
    assert {path.stem for path in drawn} == {
        "overview", "phases", "workers", "sizes", "tensors", "models", "memory",
    }  # fmt: skip
    for path in drawn:
        head = path.read_bytes()[:24]
        assert head[:8] == b"\x89PNG\r\n\x1a\n"
        assert min(struct.unpack(">II", head[16:24])) > 100
        assert path.stat().st_size <= 100_000
    saved = tmp_path / "out.json"
    saved.write_text(json.dumps(out))
    sync.main(["--from-json", str(saved), "--markdown"])


def test_workers_are_used_again(stage: Stage) -> None:
    first = Rayxfer(stage, Spec("shm", "off", 2))
    first.run()
    workers = first.workers
    first.close()
    second = Rayxfer(stage, Spec("gloo", "off", 1))
    second.run()
    assert second.workers[0] in workers
    second.close()


def test_what_is_not_there_is_skipped_with_its_reason(
    ray_session: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PEERS, "torchrl_ray", "tests.test_benchmarks:Missing")
    specs = [Spec("memcpy"), Spec("torchrl_ray")]
    made = turns.measure(specs, {"": equal_shapes(1000, 2)}, 1, "one is missing")
    assert [row["way"] for row in made["rows"]] == ["memcpy"]
    assert made["skipped"] == {"torchrl_ray": "not in this house"}


class Missing(Contender):
    def __init__(self, stage: Stage, spec: Spec) -> None:
        raise Unavailable("not in this house")

    def run(self) -> float:
        raise AssertionError


def test_what_does_not_fit_is_refused() -> None:
    specs = [Spec("memcpy", workers=1000)]
    with pytest.raises(turns.TooLarge, match="needs about"):
        turns.measure(specs, {"": equal_shapes(4 << 30, 10)}, 1, "too much")


def test_shapes_of_real_models() -> None:
    for name, tensors in (("qwen3", 310), ("llama", 291), ("moe", 18_867)):
        shapes = shapes_of(name, 1 << 30)
        assert len(shapes) == tensors
        assert 0.98 * 2**30 <= num_bytes(shapes) <= 2**30
    assert shapes_of("qwen3", 1 << 30)["model.layers.0.mlp.up_proj.weight"] == (3072, 1024)
    assert len(equal_shapes(1 << 20, 10_000)) == 10_000
    # whole, with its own vocabulary: 596,049,920 parameters
    assert num_bytes(shapes_of("qwen3", 4 << 30)) == 2 * 596_049_920


def test_weights_are_the_same_everywhere_and_differ_from_each_other() -> None:
    shapes = {"a.weight": (3, 50), "b.weight": (3, 50), "c": (5_000_000,)}
    one, other = make_weights(shapes), make_weights(shapes)
    assert all(torch.equal(one[n].view(torch.int16), other[n].view(torch.int16)) for n in shapes)
    assert not torch.equal(one["a.weight"].view(torch.int16), one["b.weight"].view(torch.int16))
    poisoned = poisoned_weights(shapes)["c"].contiguous()
    assert (poisoned.view(torch.uint8) == POISON).all()


def test_pieces_lose_nothing() -> None:
    arrays = {str(i): torch.zeros(10 * i, dtype=torch.uint8).numpy() for i in range(9)}
    found = list(pieces(arrays, 100))
    assert [name for piece in found for name in piece] == list(arrays)
    assert len(found) > 2


def test_peak_memory_is_seen() -> None:
    gc.collect()  # what earlier tests left is not to go meanwhile
    with Peaks([os.getpid()]) as peaks:
        held = bytearray(os.urandom(1)) * (64 * MIB)
        peaks._look()
        del held
    assert 60 * MIB < peaks.of(os.getpid()) < 200 * MIB
    assert peaks.together() == peaks.of(os.getpid())


def test_arguments() -> None:
    plan = sync.plan_of(sync.parse_args(["--tensors", "20", "--size-bytes", "1MiB", "--quick"]))
    assert (plan.shapes, plan.tensors, plan.size_bytes, plan.repeats) == ("equal", 20, MIB, 3)
    assert sync.plan_of(sync.parse_args(["--all"])).size_bytes == 1 << 30
    assert sync.plan_of(sync.parse_args([])).verify_of("gloo") == ("off",)
    assert sync.plan_of(sync.parse_args(["--verify", "on"])).verify_of("gloo") == ("on",)
    with pytest.raises(SystemExit):
        sync.parse_args(["--tensors", "20", "--shapes", "moe"])
    with pytest.raises(argparse.ArgumentTypeError):
        sync.parse_bytes("much")


def test_specs_of_a_plan() -> None:
    found = Plan(ways=("shm",)).some(["memcpy", "shm", "gloo"], workers=2)
    assert found == [Spec("memcpy", "", 2), Spec("shm", "off", 2)]
