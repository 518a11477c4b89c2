"""A few kills of each kind; `make drills` does 160 of them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from benchmarks.drills import DRILLS, Fleet, Kill, summary

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[("gloo", "in_place")], ids="-".join)
def fleet(ray_session: None, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    backend, load_mode = request.param
    made = Fleet(backend, load_mode, random.Random(3), size=(16, 1 << 16), delay_s=0.02)
    try:
        made.measure()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("kind", ["worker", "trainer", "controller"])
def test_a_kill_leaves_the_rest_whole(fleet: Fleet, kind: str) -> None:
    kills = [DRILLS[kind](fleet) for _ in range(2)]
    print(summary(kills))
    assert [problem for kill in kills for problem in kill.problems] == []


def test_a_summary_counts_what_was_bad() -> None:
    kills = [
        Kill("worker", "shm", landed=True, call_s=1.0, back_s=4.0),
        Kill("worker", "shm", landed=False, call_s=9.0, back_s=6.0, problems=["wrong bytes"]),
    ]
    row = summary(kills).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["worker", "all", "2", "1", "1.00 / 1.00", "5.00 / 6.00", "-", "1"]
