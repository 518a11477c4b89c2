"""A group of contenders takes turns, and every one's bytes are checked."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil

from benchmarks import reporting
from benchmarks.contenders import MODES, Contender, Rayxfer, Spec, Stage, Unavailable
from benchmarks.peers import MEMCPY, OVER_GLOO, OWN_SENDER, PEERS, peer_class
from benchmarks.shapes import Shapes, num_bytes


class TooLarge(Exception):
    """A group would not fit into memory; the message says how much it needs."""


_WARM_UPS = 2
"""Channels are opened and memory is touched for the first time; of two versions that take turns, both."""

_SETTLE_S = 0.05
"""Between two turns at the least: what the last one let go of (objects, pages) is freed meanwhile."""

_SETTLE_MAPPED_S = 0.6
"""The same after mapped workers: a quarter of a second after a commit they look for pages of their own in
the version that they left, which takes each 13 ms for 1 GiB."""

_QUIET_S = 1.0
_LOOK_S = 0.05
_QUIET_CORES = 0.4
"""Then until no more of the machine is busy, for so long at the most: what one leaves to Ray or to the
system is not the next one's work."""


def measure(
    specs: Sequence[Spec], cases: Mapping[str, Shapes], repeats: int, title: str
) -> dict[str, Any]:
    """All of `specs` interleaved (see `order`), each over the shapes that its `case` names.

    Returns:
        "rows": a dict per spec, in order; "skipped": way → why it is not among them.

    Raises:
        TooLarge: it would not fit into memory. SystemExit: a receiver holds wrong bytes.
    """
    check_memory(specs, cases, title)
    stages = {case: Stage(shapes) for case, shapes in cases.items()}
    try:
        return measure_on(stages, specs, repeats, title)
    finally:
        for stage in stages.values():
            stage.close()


def measure_on(
    stages: Mapping[str, Stage], specs: Sequence[Spec], repeats: int, title: str
) -> dict[str, Any]:
    """The same over stages that stay the caller's."""
    print(f"{title}: {len(specs)} contenders, {repeats} turns", file=sys.stderr, flush=True)
    contenders: list[Contender] = []
    skipped: dict[str, str] = {}
    try:
        for spec in specs:
            try:
                contenders.append(make(stages[spec.case], spec))
            except Unavailable as error:
                skipped[spec.name] = str(error)
        for name, reason in skipped.items():
            print(f"  skipped {name}: {reason}", file=sys.stderr, flush=True)
        samples = take_turns(contenders, repeats)
        rows = [row(c, s) for c, s in zip(contenders, samples, strict=True)]
    finally:
        for contender in contenders:
            contender.close()
    add_ratios(rows)
    return {"rows": rows, "skipped": skipped}


def make(stage: Stage, spec: Spec) -> Contender:
    """Raises: Unavailable."""
    return peer_class(spec.way)(stage, spec) if spec.way in PEERS else Rayxfer(stage, spec)


def take_turns(contenders: Sequence[Contender], repeats: int) -> list[list[float]]:
    """Seconds per contender and repetition. Then each one's receivers are poisoned, it runs once more, off
    the clock, and their bytes are compared."""
    for contender in contenders:
        for _ in range(_WARM_UPS):
            contender.run()
        if isinstance(contender, Rayxfer):
            contender.forget()
    samples: list[list[float]] = [[] for _ in contenders]
    before = contenders[-1] if contenders else None
    for turn in range(repeats):
        for number in order(len(contenders), turn):
            mapped = before is not None and before.spec.way == "shm_mapped"
            time.sleep(_SETTLE_MAPPED_S if mapped else _SETTLE_S)
            _await_quiet()
            before = contenders[number]
            samples[number].append(before.run())
    for contender in contenders:
        contender.poison()
        contender.run()
        check(contender)
        if isinstance(contender, Rayxfer):
            contender.forget(keep=repeats)
    return samples


def order(count: int, turn: int) -> list[int]:
    """Who comes when in this turn: everybody once, and hardly ever twice after the same one. A fixed order
    would have one always suffer from what another leaves behind.

    Rows of a Latin square that is balanced for neighbours, of two of them where the count is odd (E. J.
    Williams, "Experimental designs balanced for the estimation of residual effects of treatments",
    Australian J. of Scientific Research, 1949).
    """
    if count == 2:
        return [0, 1]  # anything else has one follow itself
    zigzag = [0, *(one for i in range(1, count // 2 + 1) for one in (i, count - i))]
    back = bool(count % 2 and turn // count % 2)
    row = [(one + (-turn if back else turn)) % count for one in dict.fromkeys(zigzag[:count])]
    return row[::-1] if back else row


def _await_quiet() -> None:
    deadline = time.monotonic() + _QUIET_S
    quiet = 100.0 * _QUIET_CORES / (psutil.cpu_count() or 1)
    while time.monotonic() < deadline and psutil.cpu_percent(_LOOK_S) > quiet:
        pass


def check(contender: Contender) -> None:
    """Raises: SystemExit: a receiver does not hold the stage's bytes."""
    wrong = contender.wrong_names()
    if wrong:
        raise SystemExit(f"{contender.spec}: wrong bytes in {len(wrong)} tensors: {wrong[:3]}")


def row(contender: Contender, samples: Sequence[float]) -> dict[str, Any]:
    """What is kept of one contender."""
    spec, shapes = contender.spec, contender.stage.shapes
    made: dict[str, Any] = {**dataclasses.asdict(spec), "name": spec.name}
    made |= {"num_bytes": num_bytes(shapes), "tensors": len(shapes)}
    made |= reporting.summary(samples)
    made["gigabytes_per_second"] = num_bytes(shapes) / 1e9 / made["median_s"]
    if isinstance(contender, Rayxfer):
        reports = contender.reports
        made["control_calls"] = max(report.control_calls for report in reports)
        made["attempts"] = max(report.attempts for report in reports)
        made["verified"] = reports[-1].workers[0].verified
        made["phases_s"] = reporting.phase_medians(reports)
        if contender.stalls_s:
            made["stall"] = reporting.summary(contender.stalls_s)
    return made


def add_ratios(rows: Sequence[dict[str, Any]]) -> None:
    """To each row, how many times as fast as each peer it is, where both did the same work. A memcpy
    is to one worker, whatever the number of them."""
    for made in rows:
        made["speed_ratio"] = {
            other["way"]: other["median_s"] / made["median_s"]
            for other in rows
            if other["case"] == made["case"]
            and other["way"] in PEERS
            and (other["workers"] == made["workers"] or other["way"] == MEMCPY)
        }


def copies_held(specs: Sequence[Spec]) -> int:
    """How many copies of one case's weights are in memory at once, at the most."""
    peers = [spec for spec in specs if spec.way in PEERS and spec.way != MEMCPY]
    copies = 1 + sum(spec.workers for spec in specs if spec.way == MEMCPY)
    copies += max((spec.workers for spec in peers), default=0)
    copies += len({spec.way in OVER_GLOO for spec in peers if spec.way in OWN_SENDER})  # senders
    copies += 3 * bool(peers)  # on the way, and what Ray's store keeps of what went before
    copies += any(spec.way == "shm_placed" for spec in specs)
    for spec in specs:
        if spec.way not in PEERS:
            copies += 2 if MODES.get(spec.way) == "mapped" else spec.workers
            copies += (
                MODES.get(spec.way) == "async"
            )  # what it sends from, while the trainer goes on
    return copies


_FREED_S = 15.0


def _free(wanted: float) -> int:
    """Bytes that are free; waits for those that processes which were ended a moment ago still hold."""
    deadline = time.monotonic() + _FREED_S
    while True:
        free = psutil.virtual_memory().available
        if free >= wanted or time.monotonic() > deadline:
            return int(free)
        time.sleep(0.5)


def check_memory(specs: Sequence[Spec], cases: Mapping[str, Shapes], title: str) -> None:
    """Raises: TooLarge."""
    need = sum(
        num_bytes(shapes) * copies_held([spec for spec in specs if spec.case == case])
        for case, shapes in cases.items()
    )
    free = _free(need / 0.85)
    if need > 0.85 * free:
        raise TooLarge(
            f"{title} needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: choose a "
            "smaller --size-bytes, or fewer --workers, --backends or --peers"
        )
