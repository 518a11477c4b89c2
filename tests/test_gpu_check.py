"""`benchmarks/gpu_check.py` on doubles: so that it works on the day that a GPU is there."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check, gpu_parts
from benchmarks.gpu_stage import Failed, NotRun, Stage, layer_shapes

WITHOUT_RAY = """
    import importlib.abc, sys

    class NoRay(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("ray", "psutil", "matplotlib"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoRay())
    from benchmarks.gpu_check import main
    sys.exit(main(sys.argv[1:]))
"""


def run(*args: str) -> subprocess.CompletedProcess[str]:
    from textwrap import dedent

    return subprocess.run(
        [sys.executable, "-c", dedent(WITHOUT_RAY), *args],
        capture_output=True,
        text=True,
        timeout=110,
    )


def test_in_one_process_without_ray(tmp_path: Path) -> None:
    done = run("--doubles", "--only", "kit: ipc", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    assert [row["result"] for row in report["checks"]] == ["passed"] * 2
    assert report["environment"]["on"] == "double"
    assert "nothing about a GPU" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", ["zoo", "endurance", "killed in", "device", "kit: nccl"])
def test_parts_with_processes_of_their_own(part: str, tmp_path: Path) -> None:
    assert gpu_check.main(["--doubles", "--only", part, "--json", str(tmp_path / "o.json")]) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_speeds(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert gpu_check.main(["--doubles", "--only", "speed", "--json", str(out)]) == 0
    ways = {row["way"] for row in json.loads(out.read_text())["speed"]}
    for way in ("copy, flat", "copy, batched", "direct", "staged", "sync_weights, verify on"):
        assert {f"{way}, layers", f"{way}, small"} <= ways


def test_a_failed_check_is_told_and_the_rest_is_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    hang = threading.Event()

    def fails(stage: Stage) -> str:
        raise Failed("other bytes")

    def hangs(stage: Stage) -> str:
        hang.wait(60)
        return "late"

    def passes(stage: Stage) -> str:
        return "fine"

    def needs_more(stage: Stage) -> str:
        raise NotRun("needs two GPUs")

    monkeypatch.setattr(gpu_check, "_LONGEST_S", 0.5)
    monkeypatch.setattr(
        gpu_parts,
        "CHECKS",
        (
            ("a check", fails),
            ("b check", hangs),
            ("c check", passes),
            ("d check", needs_more),
        ),
    )
    out = tmp_path / "out.json"
    assert gpu_check.main(["--doubles", "--only", "check", "--json", str(out)]) == 1
    hang.set()
    report = json.loads(out.read_text())
    assert report["failed"] == ["a check", "b check"]
    notes = [row["note"] for row in report["checks"]]
    assert "other bytes" in notes[0]
    assert "hangs" in notes[1]
    assert notes[2] == "fine"
    assert "1 passed, 2 failed, 1 not run" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--json", str(tmp_path / "out.json"))
    assert done.returncode == 1
    assert "no CUDA device" in done.stdout


def test_shapes_are_those_of_a_decoder() -> None:
    for size in (1 << 20, 512 << 20, 8 << 30):
        shapes = layer_shapes(size)
        total = sum(2 * torch.Size(shape).numel() for _, shape in shapes)
        assert size <= total < 1.8 * size or size == 1 << 20
        assert len({name for name, _ in shapes}) == len(shapes)


def test_a_missing_package_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu_check.main(["--doubles"]) == 1
    assert "needs numpy and xxhash" in capsys.readouterr().out
