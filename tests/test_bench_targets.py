"""The targets' arithmetic, on made-up results."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.targets import Verdict, as_rows, best_peer, verdicts

GIB = 1 << 30


def row(way: str, seconds: float, verify: str = "", **more: Any) -> dict[str, Any]:
    base = {"way": way, "name": way, "verify": verify, "workers": 1, "tensors": 310}
    return {**base, "median_s": seconds, "num_bytes": GIB, **more}


def results() -> dict[str, Any]:
    """Everything is met, each by a figure of its own."""
    return {
        "headline": {
            "rows": [
                row("memcpy", 0.1),
                row("ray_put", 2.5),
                row("ray_put_zero_copy", 0.4),
                row("gloo_broadcast", 0.5),
                row("shm", 0.16, "on"),
                row("shm", 0.125, "off"),
                row("shm_placed", 0.2, "on"),
                row("shm_placed", 0.1, "off"),
            ]
        },
        "fleet": {
            "rows": [
                row("memcpy", 0.1),
                row("shm", 0.2, "off", workers=2),
                row("shm", 0.4, "off", workers=4),
                row("shm_mapped", 0.1, "off", workers=1),
                row("shm_mapped", 0.11, "off", workers=8),
            ]
        },
        "tensors": {
            "rows": [
                row("shm", 0.1, "off", tensors=200),
                row("shm", 0.15, "off", tensors=10_000),
                row("gloo", 0.2, "off", tensors=200),
                row("gloo", 0.3, "off", tensors=10_000),
                row("gloo_broadcast", 0.25, tensors=200),
                row("gloo_broadcast", 1.5, tensors=10_000),
            ]
        },
        "many": {
            "rows": [
                row("shm", 0.4, "off", tensors=200, num_bytes=2 * GIB),
                row("shm", 0.5, "off", tensors=10_000, num_bytes=2 * GIB),
            ]
        },
        "fixed": {"rows": [row("shm", 0.01, "off", x_ping=7.5)]},
        "memory": {
            "rows": [row("shm_mapped", 0, "off", workers=8, host_extra_bytes=2 * GIB + (64 << 20))]
        },
        "stall": {
            "rows": [row("shm", 0.2, "off"), row("shm_async", 0.3, "off", stall={"median_s": 0.05})]
        },
    }


EXPECTED = {
    "shm, source in the memory file: x memcpy": (1.0, 0.9),
    "shm, source in the memory file: x ray.put(state_dict)": (25.0, 20.0),
    "shm, source in the memory file: x best peer": (4.0, 3.0),
    "shm, source anywhere: x memcpy": (0.8, 0.7),
    "shm, source anywhere: x ray.put(state_dict)": (20.0, 15.0),
    "shm, source anywhere: x best peer": (3.2, 2.5),
    "verification on, source in the memory file: x off": (0.5, 0.5),
    "verification on, source anywhere: x off": (0.78125, 0.75),
    "shm, source anywhere, 2 workers: x one memcpy": (0.5, 0.4),
    "shm, source anywhere, 4 workers: x one memcpy": (0.25, 0.25),
    "mapped: time of 8 workers / of 1": (1.1, 1.2),
    "shm, 2048 MiB: time of 10,000 tensors / of 200": (1.25, 2.0),
    "shm, 1024 MiB: time of 10,000 tensors / of 200": (1.5, 2.0),
    "gloo, 200 tensors: x gloo broadcast per tensor": (1.25, 1.0),
    "gloo, 10,000 tensors: x gloo broadcast per tensor": (5.0, 4.0),
    "fixed cost, shm, verify off: x ping": (7.5, 8.0),
    "mapped, 8 workers: host's extra memory / model (≤ 2 × model + 64 MiB)": (2.0625, 2.0625),
    "sync_weights_async: trainer's stall / a whole sync_weights": (0.25, None),
}


def test_each_target_has_its_ratio_and_its_bound() -> None:
    found = {one.name: one for one in verdicts(results())}
    assert found.keys() == EXPECTED.keys()
    for name, (value, bound) in EXPECTED.items():
        assert found[name].value == pytest.approx(value), name
        assert found[name].bound == (None if bound is None else pytest.approx(bound)), name
        assert found[name].verdict == ("shown" if bound is None else "pass"), name


@pytest.mark.parametrize(
    ("section", "index", "missed"),
    [
        ("headline", 0, []),  # a slower memcpy is no miss
        ("headline", 4, ["verification on, source anywhere: x off"]),
        ("headline", 5, [name for name in EXPECTED if name.startswith("shm, source anywhere: ")]),
        ("fleet", 2, ["shm, source anywhere, 4 workers: x one memcpy"]),
        ("fleet", 4, ["mapped: time of 8 workers / of 1"]),
        ("tensors", 1, ["shm, 1024 MiB: time of 10,000 tensors / of 200"]),
        ("many", 1, ["shm, 2048 MiB: time of 10,000 tensors / of 200"]),
        ("tensors", 2, ["gloo, 200 tensors: x gloo broadcast per tensor"]),
    ],
)
def test_what_gets_slower_is_a_miss_and_only_there(
    section: str, index: int, missed: list[str]
) -> None:
    out = results()
    out[section]["rows"][index]["median_s"] *= 10
    made = as_rows(verdicts(out))
    assert [one["name"] for one in made if one["verdict"] == "miss"] == missed


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    made = verdicts({})
    assert {one.verdict for one in made} == {"not measured"}
    assert len(made) == len(EXPECTED)


def test_memcpy_is_no_peer() -> None:
    rows = [
        row("memcpy", 0.1),
        row("ray_put", 2.0),
        row("gloo_broadcast", 0.5),
        row("shm", 0.01, "off"),
    ]
    assert best_peer(rows) == rows[2]
    assert best_peer(rows[:1]) is None


def test_bounds_are_met_at_the_bound() -> None:
    assert Verdict("", 2.0, 2.0).verdict == "pass"
    assert Verdict("", 2.0, 2.0, at_least=False).verdict == "pass"
    assert Verdict("", 1.9, 2.0).verdict == "miss"
    assert Verdict("", 2.1, 2.0, at_least=False).verdict == "miss"
