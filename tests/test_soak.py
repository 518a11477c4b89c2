"""A short soak, and its judgement of what grows; `make soak` does 300 rounds and 20 minutes."""

from __future__ import annotations

import pytest

from benchmarks import soak
from benchmarks.fleet import Stamped, fingerprint, stamp, stamps_of, token


@pytest.mark.slow
def test_a_short_soak_finds_nothing(ray_session: None) -> None:
    life = soak.Soak(seed=7)
    try:
        life.run(rounds=5, minutes=0)
    finally:
        life.close()
    print(life.summary())
    assert life.problems == []
    assert life.version >= 3
    assert soak.controllers() == []


def test_bytes_and_tokens_follow_the_stamps() -> None:
    one, other = Stamped(4, 64), Stamped(4, 64)
    assert fingerprint(one) == fingerprint(other)
    stamp(one, [7, 7, 7, 7])
    stamp(other, [7, 7, 8, 7])
    assert fingerprint(one) != fingerprint(other)
    assert (stamps_of(one), stamps_of(other)) == ([7] * 4, [7, 7, 8, 7])
    assert token(stamps_of(one)) == 70
    assert token(stamps_of(other)) == 73


def test_growth_is_told_from_noise() -> None:
    flat = [{"round": r, "driver threads": 30.0 + r % 3} for r in range(0, 300, 6)]
    leaking = [{"round": r, "driver threads": 30.0 + r / 10} for r in range(0, 300, 6)]
    assert [row[-1] for row in soak.growth(flat)] == [False]
    assert [row[-1] for row in soak.growth(leaking)] == [True]
    assert soak.growth(leaking)[0][3] == pytest.approx(10.0)
    assert soak.growth([]) == []
