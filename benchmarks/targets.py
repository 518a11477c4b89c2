"""What rayxfer promises about its speed and memory, held against one run's results. Pure: from what
`benchmarks.sections` wrote to a verdict per target. A miss is shown; it fails nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

Row = dict[str, Any]
Out = dict[str, Any]

_MEMCPY = "memcpy"
_MIB = 1 << 20
MAPPED_SLACK_BYTES = 64 * _MIB


@dataclass(frozen=True)
class Verdict:
    """One target.

    Attributes:
        value: what was measured; None: it was not, `note` says why.
        bound: None where a figure is only shown.
        at_least: whether `value` has to reach `bound`, or to stay within it.
    """

    name: str
    value: float | None
    bound: float | None
    at_least: bool = True
    note: str = ""

    @property
    def verdict(self) -> str:
        """ "pass", "miss", "shown" or "not measured"."""
        if self.value is None:
            return "not measured"
        if self.bound is None:
            return "shown"
        met = self.value >= self.bound if self.at_least else self.value <= self.bound
        return "pass" if met else "miss"


def find(rows: Sequence[Row], way: str, verify: str = "", **where: Any) -> Row | None:
    """The first row that fits."""
    for row in rows:
        wanted = {"way": way, "verify": verify, **where}
        if all(row[key] == value for key, value in wanted.items()):
            return row
    return None


def times_as_fast(row: Row | None, other: Row | None) -> float | None:
    """How many times as fast as `other` it is, by medians."""
    return None if row is None or other is None else other["median_s"] / row["median_s"]


def best_peer(rows: Sequence[Row]) -> Row | None:
    """The fastest of the peers; the memory copy is none."""
    peers = [row for row in rows if not row["verify"] and row["way"] != _MEMCPY]
    return min(peers, key=lambda row: row["median_s"], default=None)


def verdicts(out: Out) -> list[Verdict]:
    """A verdict per target; one whose section or way is missing was "not measured"."""
    made = [*_headline(out), *_workers(out), *_tensors(out), *_fixed(out), *_memory(out)]
    return [*made, *_stall(out)]


def as_rows(made: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For a JSON file."""
    return [{**asdict(one), "verdict": one.verdict} for one in made]


def _rows(out: Out, section: str) -> list[Row]:
    rows: list[Row] = out.get(section, {}).get("rows", [])
    return rows


def _headline(out: Out) -> list[Verdict]:
    rows = _rows(out, "headline")
    workers = rows[0]["workers"] if rows else 1
    placed, plain = (find(rows, way, "off") for way in ("shm_placed", "shm"))
    memcpy, put, best = find(rows, _MEMCPY), find(rows, "ray_put"), best_peer(rows)
    note = f"best peer: {best['name']}" if best is not None else ""
    to = "" if workers == 1 else f", {workers} workers"
    made = []
    for label, row, bounds in (
        ("shm, source in the memory file", placed, (0.9, 20.0, 3.0)),
        ("shm, source anywhere", plain, (0.7, 15.0, 2.5)),
    ):
        for (other_label, other, what), bound in zip(
            (("memcpy", memcpy, ""), ("ray.put(state_dict)", put, ""), ("best peer", best, note)),
            bounds,
            strict=True,
        ):
            name = f"{label}{to}: x {other_label}"
            made.append(Verdict(name, times_as_fast(row, other), bound, note=what))
    for label, way, bound in (
        ("verification on, source in the memory file", "shm_placed", 0.5),
        ("verification on, source anywhere", "shm", 0.75),
    ):
        ratio = times_as_fast(find(rows, way, "on"), find(rows, way, "off"))
        made.append(Verdict(f"{label}{to}: x off", ratio, bound))
    return made


def _workers(out: Out) -> list[Verdict]:
    rows = _rows(out, "fleet")
    memcpy = find(rows, _MEMCPY)
    made = [
        Verdict(
            f"shm, source anywhere, {count} workers: x one memcpy",
            times_as_fast(find(rows, "shm", "off", workers=count), memcpy),
            bound,
        )
        for count, bound in ((2, 0.4), (4, 0.25))
    ]
    few, many = (find(rows, "shm_mapped", "off", workers=count) for count in (1, 8))
    cost = times_as_fast(few, many)
    return [*made, Verdict("mapped: time of 8 workers / of 1", cost, 1.2, at_least=False)]


def _tensors(out: Out) -> list[Verdict]:
    rows = _rows(out, "tensors")

    def of(way: str, verify: str, tensors: int) -> Row | None:
        return find(rows, way, verify, tensors=tensors)

    made = []
    for section in ("many", "tensors"):
        found = _rows(out, section)
        few, most = (find(found, "shm", "off", tensors=count) for count in (200, 10_000))
        size = f", {round(few['num_bytes'] / 2**20)} MiB" if few is not None else ""
        name = f"shm{size}: time of 10,000 tensors / of 200"
        made.append(Verdict(name, times_as_fast(few, most), 2.0, at_least=False))
    for tensors, bound in ((200, 1.0), (10_000, 4.0)):
        ratio = times_as_fast(of("gloo", "off", tensors), of("gloo_broadcast", "", tensors))
        made.append(
            Verdict(f"gloo, {tensors:,} tensors: x gloo broadcast per tensor", ratio, bound)
        )
    return made


def _fixed(out: Out) -> list[Verdict]:
    rows: list[Row] = out.get("fixed", {}).get("rows", [])
    return [
        Verdict(
            f"fixed cost, {row['name']}, verify {row['verify']}: x ping", row["x_ping"], 8.0, False
        )
        for row in rows
    ] or [Verdict("fixed cost: x ping", None, 8.0, False)]


def _memory(out: Out) -> list[Verdict]:
    rows = _rows(out, "memory")
    row = find(rows, "shm_mapped", "off")
    size = None if row is None else row["num_bytes"]
    bound = None if size is None else 2 + MAPPED_SLACK_BYTES / size
    value = None if row is None else row["host_extra_bytes"] / row["num_bytes"]
    label = "mapped: host's extra memory / model (≤ 2 × model + 64 MiB)"
    if row is not None:
        label = (
            f"mapped, {row['workers']} workers: host's extra memory / model (≤ 2 × model + 64 MiB)"
        )
    return [Verdict(label, value, 2.0 if bound is None else bound, at_least=False)]


def _stall(out: Out) -> list[Verdict]:
    row = find(_rows(out, "stall"), "shm_async", "off")
    whole = find(_rows(out, "stall"), "shm", "off")
    value = None if row is None or whole is None else row["stall"]["median_s"] / whole["median_s"]
    name = "sync_weights_async: trainer's stall / a whole sync_weights"
    return [Verdict(name, value, None, at_least=False)]
