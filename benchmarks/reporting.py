"""Medians, ratios, tables, and where a run took place."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from typing import Any

import psutil
import ray
import torch

import rayxfer
from benchmarks.tables import table

__all__ = [
    "bulk_table",
    "environment",
    "fixed_table",
    "phase_medians",
    "phase_table",
    "summary",
    "table",
]

PHASES = ("begin", "connect", "prepare", "update", "finish", "commit")


def summary(samples: Sequence[float]) -> dict[str, Any]:
    return {
        "median_s": statistics.median(samples),
        "min_s": min(samples),
        "max_s": max(samples),
        "samples_s": list(samples),
    }


def phase_medians(reports: Sequence[rayxfer.SyncReport]) -> dict[str, float]:
    """Seconds per phase; what lies outside of all phases is "rest"."""
    found = {p: [r.phases.get(p, 0.0) for r in reports] for p in PHASES}
    found["rest"] = [r.seconds - sum(r.phases.values()) for r in reports]
    return {phase: statistics.median(values) for phase, values in found.items()}


def environment() -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "cpu": _cpu_model(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ray": ray.__version__,
        "rayxfer": rayxfer.__version__,
        "commit": _commit(),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            line = next(line for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()
    return line.split(":", 1)[1].strip()


def _commit() -> str:
    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "rayxfer")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def bulk_table(results: Sequence[dict[str, Any]]) -> str:
    peers = [r["name"] for r in results if not r["verify"]]
    head = ["way", "verify", "median s", "min", "max", "GB/s", *(f"x {p}" for p in peers), "calls"]
    rows = []
    for r in results:
        ratios = [f"{r['speed_ratio'][p]:.2f}" for p in peers]
        calls = "" if r.get("control_calls") is None else str(r["control_calls"])
        times = [f"{r[key]:.3f}" for key in ("median_s", "min_s", "max_s")]
        rows.append(
            [r["name"], r["verify"], *times, f"{r['gigabytes_per_second']:.2f}", *ratios, calls]
        )
    return table(head, rows)


def phase_table(results: Sequence[dict[str, Any]]) -> str:
    phased = [r for r in results if "phases_s" in r]
    columns = [p for p in (*PHASES, "rest") if any(r["phases_s"][p] >= 5e-5 for r in phased)]
    head = ["ms in phase", "verify", *columns]
    rows = [
        [r["name"], r["verify"], *(f"{r['phases_s'][p] * 1e3:.1f}" for p in columns)]
        for r in phased
    ]
    return table(head, rows)


def fixed_table(fixed: dict[str, Any]) -> str:
    head = ["way", "verify", "median ms", "min", "max", "ping ms", "x ping", "calls"]
    rows = []
    for r in fixed["results"]:
        times = [f"{r[key] * 1e3:.1f}" for key in ("median_s", "min_s", "max_s")]
        ping = [f"{r['ping']['median_s'] * 1e3:.1f}", f"{r['x_ping']:.1f}"]
        rows.append([r["name"], r["verify"], *times, *ping, str(r["control_calls"])])
    return table(head, rows)
