"""What only hardware can tell about `ipc` and `nccl`, in one command and at most four minutes.

    python -m benchmarks.gpu_check
    python -m benchmarks.gpu_check --only kit --json out.json
    python -m benchmarks.gpu_check --doubles        # no GPU: shows that this script works, no more

Needs a GPU (two for `nccl` between GPUs), no Ray. Prints one table, writes JSON, and exits with 1 if
anything failed, was slower than expected, or was not reached in time. What needs more GPUs than there
are is listed as not run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import pathlib
import platform
import subprocess
import sys
import threading
import time
import traceback
from typing import Any

import torch

import rayxfer
from benchmarks import gpu_parts, gpu_speed
from benchmarks.gpu_stage import GIB, NotRun, Stage
from benchmarks.tables import table
from rayxfer.engines.device import expandable_segments
from rayxfer.gpus import gpus, link_between, visible_uuids

BUDGET_S = 240.0
_LONGEST_S = 90.0
"""One check that takes longer than this hangs: the rest is still run."""


def environment(on: str) -> dict[str, Any]:
    """When, on what, with which versions."""
    found: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "on": on,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "rayxfer": rayxfer.__version__,
        "commit": _commit(),
        "allocator": expandable_segments() or "default",
        "gpus": [],
    }
    if on != "cuda":
        return found
    for index in range(torch.cuda.device_count()):
        props = torch.cuda.get_device_properties(index)
        found["gpus"].append(
            {"name": props.name, "uuid": str(props.uuid), "GiB": props.total_memory / GIB}
        )
    known = gpus()
    found["driver's GPUs"] = [gpu.uuid for gpu in known]
    found["visible by our rule"] = visible_uuids(os.environ, known)
    uuids = [gpu["uuid"] for gpu in found["gpus"]]
    found["links"] = {f"0-{i}": link_between(uuids[0], uuids[i]) for i in range(1, len(uuids))}
    return found


def _commit() -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def run_check(function: Any, stage: Stage, limit_s: float) -> tuple[str, str, float]:
    """(result, note, seconds). A check that hangs is left behind in its thread."""
    out: list[tuple[str, str]] = []

    def run() -> None:
        try:
            out.append(("passed", function(stage)))
        except NotRun as error:
            out.append(("not run", str(error)))
        except BaseException as error:
            traceback.print_exc()
            text = " ".join(str(error).split())
            out.append(("FAILED", f"{type(error).__name__}: {text}"[:400]))

    start = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    result, note = out[0] if out else ("FAILED", f"hangs: not done after {limit_s:.0f} s")
    stage.close()
    return result, note, time.monotonic() - start


def speed_table(rows: list[dict[str, Any]]) -> str:
    head = ["way", "tensors", "GiB", "ms", "GB/s", "x flat copy", "x batched copy"]
    return table(
        head,
        [
            [
                row["way"],
                str(row["tensors"]),
                f"{row['bytes'] / GIB:.2f}",
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['gigabytes_per_second']:.1f}",
                f"{row['copy, flat']:.2f}",
                f"{row['copy, batched']:.2f}",
            ]
            for row in rows
        ],
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", help="checks whose name contains this ('speed' for the speeds)")
    parser.add_argument("--size-gib", type=float, default=8.0, help="of the large model (8)")
    parser.add_argument("--budget-s", type=float, default=BUDGET_S)
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("gpu_check.json"))
    parser.add_argument("--doubles", action="store_true", help="no GPU: run on the doubles, small")
    options = parser.parse_args(argv)
    missing = [name for name in ("numpy", "xxhash") if importlib.util.find_spec(name) is None]
    if missing:  # now, not one check after the other
        print(f"rayxfer needs {' and '.join(missing)}: not installed in {sys.executable}")
        return 1
    deadline = time.monotonic() + options.budget_s

    if options.doubles:
        stage = Stage("double", 4 << 20, (200, 256), rounds=14)
    elif torch.version.cuda is None or not torch.cuda.is_available():
        print("no CUDA device is visible to this process (torch " + torch.__version__ + ")")
        return 1
    else:
        # the model here and at the worker, and as much twice for the comparison
        room = int(torch.cuda.mem_get_info()[0]) // 5
        stage = Stage("cuda", min(int(options.size_gib * GIB), room), (4000, 64 << 10))
    facts = environment(stage.on)
    print(json.dumps(facts, indent=1), flush=True)

    def wanted(name: str) -> bool:
        return options.only is None or options.only in name

    results: list[dict[str, Any]] = []
    for name, function in gpu_parts.CHECKS:
        if not wanted(name):
            continue
        left = deadline - time.monotonic()
        if left <= 0:
            results.append({"check": name, "result": "FAILED", "note": "no time left", "s": 0.0})
            continue
        result, note, spent = run_check(function, stage, min(_LONGEST_S, left))
        results.append({"check": name, "result": result, "note": note, "s": spent})
        print(f"{result} {name} ({spent:.1f} s): {note}", flush=True)

    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    if wanted("speed"):

        def speed(stage: Stage) -> str:
            found, slow = gpu_speed.measure(stage, lambda: deadline - time.monotonic())
            rows.extend(found)
            problems.extend(slow)
            return f"{len(found)} ways"

        left = max(1.0, deadline - time.monotonic())
        result, note, spent = run_check(speed, stage, left)
        late = [problem for problem in problems if not problem.startswith("note:")]
        if late:
            result = "FAILED"
        note = "; ".join([note, *problems])
        results.append({"check": "speed", "result": result, "note": note, "s": spent})

    print()
    shown = [[r["check"], r["result"], f"{r['s']:.1f}", r["note"]] for r in results]
    print(table(["check", "result", "s", "note"], shown))
    if rows:
        print()
        print(speed_table(rows))
    failed = [r["check"] for r in results if r["result"] == "FAILED"]
    passed = [r["check"] for r in results if r["result"] == "passed"]
    left_out = len(results) - len(failed) - len(passed)
    report = {"environment": facts, "checks": results, "speed": rows, "failed": failed}
    options.json.write_text(json.dumps(report, indent=1))
    print(f"\n{len(passed)} passed, {len(failed)} failed, {left_out} not run; wrote {options.json}")
    if stage.on == "double":
        print("On doubles: this says that the script works, and nothing about a GPU.")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    sys.exit(main())
