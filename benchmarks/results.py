"""A run's results as Markdown, made from its JSON: no figure in a README is typed by hand. Needs
neither Ray nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tables import table

Out = dict[str, Any]
Row = dict[str, Any]

_PHASES = ("begin", "connect", "prepare", "update", "finish", "commit", "rest")
_MEMCPY = "memcpy"

LABELS = {
    "memcpy": "memcpy, one thread of one process",
    "ray_put": "ray.put(state_dict)",
    "ray_put_zero_copy": "ray.put, zero-copy tensors",
    "safetensors_tmpfs": "safetensors through tmpfs",
    "gloo_broadcast": "gloo broadcast per tensor",
    "ray_direct_gloo": "Ray Direct Transport, gloo",
    "torchrl_ray": "TorchRL's Ray weight sync",
    "rayxfer shm, placed": "rayxfer shm + share_memory",
}


def label(row: Row) -> str:
    """What a newcomer reads."""
    name = str(LABELS.get(row["name"], row["name"]))
    return f"{name}, verified" if row.get("verify") == "on" else name


def machine(out: Out) -> str:
    """One paragraph: where and when."""
    where = out["environment"]
    copies = "streamed copies" if where.get("streams") else "plain copies"
    load = f"load {out['load_before'][0]:.2f} at the start, {out['load_after'][0]:.2f} at the end"
    return (
        f"At {where['commit']}: {where['cores']} cores ({where['cpu']}), "
        f"{where['memory_bytes'] / 2**30:.0f} GiB, Python {where['python']}, torch {where['torch']}, "
        f"Ray {where['ray']}, {copies}; {load}; {out['wall_s']:.0f} s in all."
    )


def overview(out: Out) -> str:
    """The README's table: fastest first, in times of ray.put."""
    rows = sorted(out["headline"]["rows"], key=lambda row: row["median_s"])
    head = ["way", "GB/s", "of memcpy", "x ray.put(state_dict)"]
    cells = []
    for row in rows:
        ratio = row["speed_ratio"]
        name = f"**{label(row)}**" if row["verify"] else label(row)
        cells.append(
            [
                name,
                f"{row['gigabytes_per_second']:.2f}",
                _maybe(ratio.get(_MEMCPY), lambda x: f"{x:.0%}"),
                _maybe(ratio.get("ray_put"), lambda x: f"{x:.1f}"),
            ]
        )
    return table(head, cells)


def headline(out: Out) -> str:
    """Every way, with its times and its ratios to each peer, and where rayxfer's time goes."""
    rows = out["headline"]["rows"]
    peers = [row["way"] for row in rows if not row["verify"]]
    head = ["way", "verify", "median s", "min", "max", "GB/s", *(f"x {p}" for p in peers), "calls"]
    cells = []
    for row in rows:
        times = [f"{row[key]:.3f}" for key in ("median_s", "min_s", "max_s")]
        ratios = [f"{row['speed_ratio'][peer]:.2f}" for peer in peers]
        calls = str(row.get("control_calls", ""))
        speed = f"{row['gigabytes_per_second']:.2f}"
        cells.append([row["name"], row["verify"], *times, speed, *ratios, calls])
    return f"{_work(out, 'headline')}\n\n{table(head, cells)}\n\n{phases(rows)}"


def phases(rows: Sequence[Row]) -> str:
    """Milliseconds per phase; those that never take any are left out."""
    phased = [row for row in rows if "phases_s" in row]
    columns = [p for p in _PHASES if any(row["phases_s"][p] >= 5e-5 for row in phased)]
    cells = [
        [row["name"], row["verify"], *(f"{row['phases_s'][p] * 1e3:.1f}" for p in columns)]
        for row in phased
    ]
    return table(["ms in phase", "verify", *columns], cells)


def fixed(out: Out) -> str:
    """What a sync costs with almost nothing to send."""
    found = out["fixed"]
    head = ["way", "verify", "median ms", "min", "max", "ping ms", "x ping", "calls"]
    cells = []
    for row in found["rows"]:
        times = [f"{row[key] * 1e3:.1f}" for key in ("median_s", "min_s", "max_s")]
        ping = [f"{row['ping']['median_s'] * 1e3:.1f}", f"{row['x_ping']:.1f}"]
        cells.append([row["name"], row["verify"], *times, *ping, str(row["control_calls"])])
    title = (
        f"{found['tensors']} tensors of {found['tensor_bytes']} bytes to {found['workers']} workers, "
        f"median of {found['rounds']} rounds, each next to one `ping` fan-out to the same actors."
    )
    return f"{title}\n\n{table(head, cells)}\n\n{phases(found['rows'])}"


def fleet(out: Out) -> str:
    """More workers at the headline's size."""
    head = ["way", "workers", "median s", "min", "max", "time / one memcpy"]
    cells = []
    for row in out["fleet"]["rows"]:
        times = [f"{row[key]:.3f}" for key in ("median_s", "min_s", "max_s")]
        cost = _maybe(row["speed_ratio"].get(_MEMCPY), lambda x: f"{1 / x:.2f}")
        cells.append([row["name"], str(row["workers"]), *times, cost])
    return f"{_work(out, 'fleet', workers=False)}\n\n{table(head, cells)}"


def stall(out: Out) -> str:
    """How long the trainer waits."""
    head = ["call", "trainer waits, ms", "until all workers serve it, ms"]
    cells = []
    for row in out["stall"]["rows"]:
        whole = row["median_s"]
        waits = row["stall"]["median_s"] if "stall" in row else whole
        cells.append([row["name"], f"{waits * 1e3:.1f}", f"{whole * 1e3:.1f}"])
    return f"{_work(out, 'stall')}\n\n{table(head, cells)}"


def sweep(out: Out, section: str) -> str:
    """GB/s of each way (rows) by what the section varies (columns)."""
    rows = out[section]["rows"]
    columns = list(dict.fromkeys(variable(row, section) for row in rows))
    ways = list(dict.fromkeys(label(row) for row in rows))
    found = {(label(row), variable(row, section)): row for row in rows}
    cells = []
    for way in ways:
        picked = [found.get((way, column)) for column in columns]
        speeds = ["" if r is None else f"{r['gigabytes_per_second']:.2f}" for r in picked]
        cells.append([way, *speeds])
    return table(["GB/s (one pass over the weights)", *map(str, columns)], cells)


def variable(row: Row, section: str) -> str:
    """What a sweep varies, as text."""
    if section == "workers":
        return f"{row['workers']}"
    if section == "models":
        return f"{row['case']} ({row['tensors']:,} tensors)"
    return str(row["case"]) or f"{row['num_bytes']:,} bytes"


def memory(out: Out) -> str:
    """Peak memory beyond what was held, and growth over many rounds."""
    head = ["way", "workers", "sender, MiB", "a worker, MiB", "host, MiB", "host / model"]
    cells = [
        [
            label(row),
            str(row["workers"]),
            *(_mib(row[f"{side}_extra_bytes"]) for side in ("sender", "worker", "host")),
            f"{row['host_extra_bytes'] / row['num_bytes']:.2f}",
        ]
        for row in out["memory"]["rows"]
    ]
    title = (
        f"{_mib(out['memory']['rows'][0]['num_bytes'])} MiB of weights; peaks above what was held before "
        "the first sync, as proportional sets (a page that n processes map counts 1/n). Host: sender, "
        "workers and Ray's object store together. Mapped workers bring no copy of their own; the "
        "others hold one already, which does not count."
        if cells
        else ""
    )
    flat = [
        [
            row["name"],
            *(_mib(row[key], 1) for key in ("private_growth_bytes", "shared_growth_bytes")),
        ]
        for row in out["memory"]["flat"]
    ]
    if not flat:
        return f"{title}\n\n{table(head, cells)}"
    first = out["memory"]["flat"][0]
    story = (
        f"{first['rounds']} rounds of {_mib(first['num_bytes'])} MiB: growth after the first "
        f"{first['after']} (shared: Ray's object store touches new pages before it uses old ones)."
    )
    growth = table(["way", "private, MiB", "shared, MiB"], flat)
    return f"{title}\n\n{table(head, cells)}\n\n{story}\n\n{growth}"


def targets(out: Out) -> str:
    """Each promise with what was measured."""
    rows = out.get("headline", {}).get("rows")
    small = rows and rows[0]["num_bytes"] < 0.95 * 2**30
    note = "The bounds are meant for 1 GiB; this run had less.\n\n" if small else ""
    cells = []
    for one in out["targets"]:
        value = "-" if one["value"] is None else f"{one['value']:.2f}"
        sign = "≥" if one["at_least"] else "≤"
        bound = "-" if one["bound"] is None else f"{sign} {one['bound']:.2f}"
        name = f"{one['name']} ({one['note']})" if one["note"] else one["name"]
        cells.append([name, value, bound, one["verdict"]])
    return note + table(["target", "measured", "bound", "verdict"], cells)


def skipped(out: Out) -> str:
    """What did not run, and why, once each."""
    found: dict[str, str] = {}
    for part in out.values():
        if isinstance(part, dict):
            found |= part.get("skipped", {})
    return "\n".join(f"- {name}: {reason}" for name, reason in found.items())


def _heading(title: str, text: str) -> str:
    return f"### {title}\n\n{text}\n"


def markdown(out: Out) -> str:
    """Everything that was measured, as it goes into a README."""
    parts = [machine(out), ""]
    made: tuple[tuple[str, str, Callable[[Out], str]], ...] = (
        ("headline", "Overview", overview),
        ("headline", "By way", headline),
        ("fleet", "More workers", fleet),
        ("stall", "The trainer's wait", stall),
        ("fixed", "Fixed cost", fixed),
        ("workers", "By workers", lambda out: sweep(out, "workers")),
        ("sizes", "By model size", lambda out: sweep(out, "sizes")),
        ("tensors", "By number of tensors", lambda out: sweep(out, "tensors")),
        ("many", "Many tensors at full size", lambda out: sweep(out, "many")),
        ("models", "By model", lambda out: sweep(out, "models")),
        ("memory", "Memory", memory),
    )
    for section, title, text in made:
        if out.get(section, {}).get("rows"):
            parts.append(_heading(title, text(out)))
    if out.get("targets"):
        parts.append(_heading("Targets", targets(out)))
    if skipped(out):
        parts.append(_heading("Skipped", skipped(out)))
    return "\n".join(parts)


def _work(out: Out, section: str, workers: bool = True) -> str:
    row = out[section]["rows"][0]
    plural = "s" if row["workers"] > 1 else ""
    to = f" to {row['workers']} worker{plural}" if workers else ""
    return (
        f"{row['num_bytes']:,} bytes of bf16 as {row['tensors']:,} tensors{to}, median of "
        f"{len(row['samples_s'])} interleaved turns. x: times as fast as."
    )


def _mib(size_bytes: float, digits: int = 0) -> str:
    return f"{size_bytes / 2**20:.{digits}f}"


def _maybe(value: float | None, text: Callable[[float], str]) -> str:
    return "-" if value is None else text(value)
