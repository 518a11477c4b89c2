"""A run's results as pictures, made from its JSON. Needs matplotlib, and neither Ray nor torch."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

from benchmarks.results import label

Out = dict[str, Any]

_OURS, _PEER, _MEMCPY_COLOR = "#1f6fb4", "#b8b8b8", "#222222"
_CYCLE = ("#1f6fb4", "#e08a1e", "#3a923a", "#8a5fb0", "#c03d3e", "#7f7f7f", "#17becf")
_MEMCPY = "memcpy"
_PHASES = ("begin", "connect", "prepare", "update", "finish", "commit", "rest")


def draw(out: Out, folder: pathlib.Path) -> list[pathlib.Path]:
    """One PNG per section that has results; the files.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams |= {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    figures: dict[str, tuple[str, Callable[[Out, Any], None]]] = {
        "overview": ("headline", _overview),
        "phases": ("headline", _phases),
        "workers": ("workers", _workers),
        "sizes": ("sizes", _sizes),
        "tensors": ("tensors", _tensors),
        "models": ("models", _models),
        "memory": ("memory", _memory),
    }
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for name, (section, paint) in figures.items():
        if not out.get(section, {}).get("rows"):
            continue
        height = 3.2
        if name in ("overview", "phases", "memory"):
            height = 1.2 + 0.3 * len(out[section]["rows"])
        figure, axes = pyplot.subplots(figsize=(7.5, height), layout="constrained")
        paint(out, axes)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=110)
        pyplot.close(figure)
        made.append(path)
    return made


def _work(row: dict[str, Any]) -> str:
    plural = "s" if row["workers"] > 1 else ""
    size = row["num_bytes"] / 2**20
    text = f"{size / 1024:.2g} GiB" if size > 1000 else f"{size:.0f} MiB"
    return f"{text} to {row['workers']} worker{plural}"


def _overview(out: Out, axes: Any) -> None:
    from matplotlib.patches import Patch

    rows = [row for row in out["headline"]["rows"] if row["way"] != _MEMCPY]
    rows.sort(key=lambda row: row["gigabytes_per_second"])
    speeds = [row["gigabytes_per_second"] for row in rows]
    colors = [_OURS if row["verify"] else _PEER for row in rows]
    bars = axes.barh([label(row) for row in rows], speeds, color=colors)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    for row in out["headline"]["rows"]:
        if row["way"] == _MEMCPY:
            speed = row["gigabytes_per_second"]
            text = f"memcpy, one thread of one process: {speed:.1f}"
            axes.axvline(speed, color=_MEMCPY_COLOR, linestyle="--", label=text)
    handles, _ = axes.get_legend_handles_labels()
    handles.append(Patch(color=_OURS, label="rayxfer: versioned, all or nothing"))
    handles.append(Patch(color=_PEER, label="other ways"))
    axes.legend(handles=handles, loc="lower right")
    axes.set_xlabel("GB/s, more is better")
    axes.set_title(f"Weight sync, {_work(out['headline']['rows'][0])} on the same host")


def _phases(out: Out, axes: Any) -> None:
    rows = [row for row in reversed(out["headline"]["rows"]) if "phases_s" in row]
    left = [0.0] * len(rows)
    for index, phase in enumerate(_PHASES):
        values = [max(0.0, row["phases_s"][phase] * 1e3) for row in rows]
        if max(values, default=0.0) < 0.05:
            continue
        color = _CYCLE[index % len(_CYCLE)]
        axes.barh([label(row) for row in rows], values, left=left, label=phase, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_xlabel("ms, less is better")
    axes.set_title(f"Time per phase, {_work(rows[0])}")
    axes.legend(ncols=3)


def _lines(rows: list[dict[str, Any]], axes: Any, x: str, y: Callable[[Any], float]) -> None:
    ways = dict.fromkeys(label(row) for row in rows)
    for index, way in enumerate(ways):
        points = sorted((row[x], y(row)) for row in rows if label(row) == way)
        is_memcpy = way.startswith(_MEMCPY)
        style = {"color": _MEMCPY_COLOR, "linestyle": "--"} if is_memcpy else {}
        style = style or {"color": _CYCLE[(index - 1) % len(_CYCLE)], "marker": "o"}
        axes.plot(*zip(*points, strict=True), label=way, **style)
    axes.legend(fontsize=7, loc="best")


def _ticks(axes: Any, values: list[float], labels: list[str]) -> None:
    axes.set_xticks(values, labels)
    axes.minorticks_off()


def _workers(out: Out, axes: Any) -> None:
    rows = [row for row in out["workers"]["rows"] if row["way"] != _MEMCPY]
    copies = [row for row in out["workers"]["rows"] if row["way"] == _MEMCPY]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    if copies:
        one = sum(row["median_s"] for row in copies) / len(copies) * 1e3
        axes.axhline(one, color=_MEMCPY_COLOR, linestyle="--", label="one memcpy")
    for index, way in enumerate(dict.fromkeys(label(row) for row in rows)):
        points = sorted((r["workers"], r["median_s"] * 1e3) for r in rows if label(r) == way)
        color = _CYCLE[index % len(_CYCLE)]
        axes.plot(*zip(*points, strict=True), label=way, color=color, marker="o")
    axes.legend(fontsize=7)
    counts = sorted({row["workers"] for row in rows})
    _ticks(axes, counts, [str(count) for count in counts])
    axes.set_xlabel("workers on one host")
    axes.set_ylabel("ms, less is better")
    axes.set_title(f"Time by number of workers, {rows[0]['num_bytes'] / 2**20:.0f} MiB")


def _sizes(out: Out, axes: Any) -> None:
    rows = out["sizes"]["rows"]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _lines(rows, axes, "num_bytes", lambda row: row["gigabytes_per_second"])
    cases = {row["case"]: row["num_bytes"] for row in rows}
    _ticks(axes, list(cases.values()), list(cases))
    axes.set_xlabel("model size")
    axes.set_ylabel("GB/s, more is better")
    axes.set_title("Throughput by model size (Llama's shapes), 1 worker")


def _tensors(out: Out, axes: Any) -> None:
    rows = out["tensors"]["rows"]
    axes.set_xscale("log")
    axes.set_yscale("log")
    _lines(rows, axes, "tensors", lambda row: row["median_s"] * 1e3)
    counts = sorted({row["tensors"] for row in rows})
    _ticks(axes, counts, [f"{count:,}" for count in counts])
    axes.set_xlabel(f"tensors, {rows[0]['num_bytes'] / 2**20:.0f} MiB together")
    axes.set_ylabel("ms, less is better")
    axes.set_title("Time by number of tensors, 1 worker")


def _models(out: Out, axes: Any) -> None:
    rows = out["models"]["rows"]
    names = list(dict.fromkeys(f"{r['case']}\n{r['tensors']:,} tensors" for r in rows))
    ways = list(dict.fromkeys(label(row) for row in rows))
    width = 0.8 / len(ways)
    for index, way in enumerate(ways):
        picked = [row for row in rows if label(row) == way]
        at = [names.index(f"{r['case']}\n{r['tensors']:,} tensors") for r in picked]
        color = _MEMCPY_COLOR if way.startswith(_MEMCPY) else _CYCLE[(index - 1) % len(_CYCLE)]
        places = [place + (index - (len(ways) - 1) / 2) * width for place in at]
        speeds = [row["gigabytes_per_second"] for row in picked]
        axes.bar(places, speeds, width, label=way, color=color)
    axes.set_xticks(range(len(names)), names)
    axes.set_ylabel("GB/s, more is better")
    axes.set_title(f"Real models' shapes, scaled to about {rows[0]['num_bytes'] / 2**20:.0f} MiB")
    axes.legend(fontsize=7)


def _memory(out: Out, axes: Any) -> None:
    rows = list(reversed(out["memory"]["rows"]))
    sides = (("worker", "a worker"), ("sender", "the sender"), ("host", "the host, all together"))
    height = 0.8 / len(sides)
    for index, (side, text) in enumerate(sides):
        places = [place + (index - 1) * height for place in range(len(rows))]
        values = [row[f"{side}_extra_bytes"] / row["num_bytes"] for row in rows]
        axes.barh(places, values, height, label=text, color=_CYCLE[index])
    names = [f"{label(r)} ({r['workers']} workers)" if r["workers"] > 1 else label(r) for r in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.set_xlabel("peak extra memory, in copies of the model; less is better")
    axes.set_title(f"Memory beyond what was held, {rows[0]['num_bytes'] / 2**20:.0f} MiB")
    axes.legend(fontsize=7)
