"""What is kept of a run: medians, phases, and where it took place."""

from __future__ import annotations

import importlib.metadata
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
from rayxfer.copying import can_stream

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
        **{name: _version(name) for name in ("numpy", "safetensors", "torchrl", "tensordict")},
        "rayxfer": rayxfer.__version__,
        "streams": can_stream(),
        "commit": _commit(),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


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
        changed = git("status", "--porcelain", "--untracked-files=no", "rayxfer", "benchmarks")
        return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
