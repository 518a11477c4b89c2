"""Kill workers, trainers and the controller at random moments, and look at what is left.

    python -m benchmarks.drills --worker-kills 100 --trainer-kills 30 --controller-kills 30 --seed 0

Every kill is a real SIGKILL to a real Ray actor. What a worker holds is judged by digests of its own
bytes that share no code with rayxfer. Exits with 1 if anything was not as it has to be.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import ray

from benchmarks import reporting
from benchmarks.fleet import (
    Later,
    Stamped,
    end_actors,
    fingerprint,
    fingerprint_in,
    pid_of,
    send_signal,
    spawn_trainer,
    spawn_worker,
    stamp,
    start_ray,
    state_of,
    until,
)
from benchmarks.tables import table
from rayxfer import Controller, PartialUpdate, RayxferError, SyncReport, WeightTransferConfig
from rayxfer.testing import Fault, faulty

BACKENDS = ("shm", "gloo", "object_store")
REJOIN_S = 20.0
FREE_S = 10.0
SLACK_S = 3.0
_WORKERS = 3
_CLEAN_SYNCS = 5
_MEASURE_AGAIN = 0.5
"""How often two clean syncs come before a kill of a worker. Otherwise the sync that is hit has to
connect first, for the worker that was killed before is a new process."""
_IN_SYNC = 0.7
"""Share of the controller's kills that are in a sync; the others are between two."""


@dataclass
class Kill:
    """One kill and what came of it.

    Attributes:
        kind: "worker", "trainer" or "controller".
        landed: it hit a transfer that was under way.
        call_s: how long the sync took that was hit.
        back_s: from the kill until everything was whole again (worker: rejoined; trainer: its
            workers were free; controller: it answered).
        repair_s: trainer: how long the next trainer's sync took; controller: the next sync.
        problems: what was not as it has to be.
    """

    kind: str
    setting: str
    landed: bool = False
    call_s: float = 0.0
    back_s: float = 0.0
    repair_s: float = 0.0
    result: str = ""
    problems: list[str] = field(default_factory=list)


class Fleet:
    """Three workers, one controller, and the truth about every version.

    Args:
        backend: the engine; it is slowed down at every tensor, so that a kill hits the transfer.
        size: tensors, elements of each.
        delay_s: the pause of the sender at each tensor.
    """

    def __init__(
        self,
        backend: str,
        load_mode: str,
        rng: random.Random,
        size: tuple[int, int] = (32, 1 << 19),
        delay_s: float = 0.01,
    ) -> None:
        self.setting = f"{backend}, {load_mode}"
        self.staged = load_mode != "in_place"
        self.rng = rng
        self.tensors = size[0]
        self.transfer_s = self.tensors * delay_s
        self._build: Callable[[], Stamped] = lambda: Stamped(*size)
        self.model = self._build()
        self._stamp = 0
        self.digests = {0: fingerprint(self.model)}
        faults = [
            Fault("sender", "delay", at=at, seconds=delay_s, once=False) for at in range(size[0])
        ]
        self.config = WeightTransferConfig(
            backend=faulty(backend, *faults),
            load_mode=load_mode,  # type: ignore[arg-type]
            on_worker_failure="continue",
        )
        self.workers = [spawn_worker(self._build) for _ in range(_WORKERS)]
        self.name = f"drill-{backend}-{load_mode}-{rng.randrange(1 << 40):x}"
        self.controller = Controller(self.workers, self.config, name=self.name)
        self._trainers: list[Any] = []
        self._clean: collections.deque[float] = collections.deque(maxlen=_CLEAN_SYNCS)
        self.clean_s = 0.0

    def close(self) -> None:
        self.controller.shutdown()
        end_actors([*self.workers, *self._trainers])

    # ---- syncs ----------------------------------------------------------------------------------

    def next_stamp(self) -> int:
        self._stamp += 1
        return self._stamp

    def train(self) -> str:
        """New weights in the driver's model; their digest."""
        stamp(self.model, [self.next_stamp()] * self.tensors)
        return fingerprint(self.model)

    def sync(self) -> tuple[SyncReport, float]:
        start = time.monotonic()
        try:
            report = self.controller.sync_weights(self.model)
        except PartialUpdate as partial:
            report = partial.report
        return report, time.monotonic() - start

    def measure(self, syncs: int = _CLEAN_SYNCS) -> None:
        """How long a sync takes when nothing happens: the median of the last few.

        Asked again and again, since others may use the machine. The first connects: not counted.
        """
        for turn in range(-1, syncs):
            digest = self.train()
            report, seconds = self.sync()
            self.digests[report.version] = digest
            if turn >= 0:
                self._clean.append(seconds)
        self.clean_s = statistics.median(self._clean)

    def trainer(self) -> Any:
        """A trainer actor; the next one is already starting."""
        while len(self._trainers) < 2:
            self._trainers.append(spawn_trainer(self._build))
        return self._trainers[0]

    def replace_trainer(self) -> Any:
        self._trainers.pop(0)
        return self.trainer()

    def train_in(self, trainer: Any) -> str:
        """New weights in a trainer actor; their digest."""
        stamps = [self.next_stamp()] * self.tensors
        ray.get(trainer.apply.remote(lambda model: stamp(model, stamps)), timeout=60)
        found: str = ray.get(trainer.apply.remote(fingerprint), timeout=60)
        return found

    # ---- checks ---------------------------------------------------------------------------------

    def wrong(self, ranks: Sequence[int], version: int) -> list[str]:
        """What these workers do not hold as they should: READY at this version, every byte."""
        problems = []
        for rank in ranks:
            found = state_of(self.workers[rank])
            if found != ("READY", version):
                problems.append(f"worker {rank} is {found[0]} v{found[1]}, not READY v{version}")
            elif fingerprint_in(self.workers[rank]) != self.digests[version]:
                problems.append(f"worker {rank}: wrong bytes at version {version}")
        return problems

    def ready(self, ranks: Sequence[int], version: int) -> bool:
        """These workers, and the controller's view of them, are READY at this version."""
        rows = {row.rank: row for row in self.controller.status().workers}
        return all(
            (rows[rank].state, rows[rank].version) == ("READY", version)
            and state_of(self.workers[rank]) == ("READY", version)
            for rank in ranks
        )


def kill_worker(fleet: Fleet) -> Kill:
    """SIGKILL to one of three workers while a sync runs."""
    kill = Kill("worker", fleet.setting)
    if fleet.rng.random() < _MEASURE_AGAIN:
        fleet.measure(1)
    before = fleet.controller.status().version
    digest = fleet.train()
    victim = fleet.rng.randrange(_WORKERS)
    others = [rank for rank in range(_WORKERS) if rank != victim]
    pid = pid_of(fleet.workers[victim])
    later = Later(pid, fleet.rng.uniform(0.05, 0.95) * fleet.clean_s)
    try:
        report, kill.call_s = fleet.sync()
    except RayxferError as error:
        kill.problems.append(f"the sync failed: {type(error).__name__}: {error}")
        later.wait()
        return kill
    at = later.wait()
    row = report.workers[victim]
    kill.landed, kill.result = report.attempts > 1, f"{row.state}, {report.attempts} passes"
    fleet.digests[report.version] = digest
    limit = 2 * fleet.clean_s + SLACK_S
    if kill.call_s > limit:
        spent = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in report.phases.items())
        kill.problems.append(f"the sync took {kill.call_s:.2f} s ({spent}), limit {limit:.2f} s")
    if report.version != before + 1:
        kill.problems.append(f"version {before} was followed by {report.version}")
    kill.problems += [
        f"survivor {rank} did not take the version: {report.workers[rank].error}"
        for rank in others
        if report.workers[rank].error is not None
    ]
    kill.problems += fleet.wrong(others, report.version)
    kill.problems += _rejoin(fleet, kill, victim, report.version, at)
    return kill


def _rejoin(fleet: Fleet, kill: Kill, victim: int, version: int, at: float) -> list[str]:
    """The killed worker comes back, at the committed version, without the trainer."""

    def back() -> bool:
        return pid_of(fleet.workers[victim]) > 0 and fleet.ready([victim], version)

    if until(back, REJOIN_S, 0.1) is None:
        row = fleet.controller.status().workers[victim]
        return [f"worker {victim} did not rejoin within {REJOIN_S:g} s: {row.state} {row.error}"]
    kill.back_s = time.monotonic() - at
    return fleet.wrong(range(_WORKERS), version)


def kill_trainer(fleet: Fleet) -> Kill:
    """SIGKILL to a trainer actor while it sends; another one attaches by name and repairs."""
    kill = Kill("trainer", fleet.setting)
    trainer = fleet.trainer()
    before = fleet.controller.status().version
    digest = fleet.train_in(trainer)
    pid = pid_of(trainer)
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append(fleet.controller.sync_weights(trainer))
        except Exception as error:
            outcome.append(error)

    start = time.monotonic()
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    until(lambda: fleet.controller.status().busy or not thread.is_alive(), 30.0, 0.005)
    time.sleep(fleet.rng.uniform(0.0, 1.0) * fleet.transfer_s)
    send_signal(pid)
    at = time.monotonic()
    thread.join(FREE_S + 5.0)
    kill.call_s = time.monotonic() - start
    if thread.is_alive():
        kill.problems.append("sync_weights did not return after its trainer died")
    elif not isinstance(outcome[0], (RayxferError, SyncReport)):
        kill.problems.append(f"sync_weights raised {type(outcome[0]).__name__}: {outcome[0]}")

    def free() -> bool:
        busy = fleet.controller.status().busy
        return not busy and all(state_of(w)[0] != "UPDATING" for w in fleet.workers)

    if until(free, FREE_S) is None:
        kill.problems.append(f"workers were not free within {FREE_S:g} s")
    kill.back_s = time.monotonic() - at
    version = fleet.controller.status().version
    if version not in (before, before + 1):
        kill.problems.append(f"version {before} was followed by {version}")
    kill.landed = version == before
    fleet.digests.setdefault(before + 1, digest)
    if version > before:
        fleet.digests[version] = digest
    kill.problems += _left_behind(fleet, kill, before, version)
    kill.problems += _repair(fleet, kill, version)
    return kill


def _left_behind(fleet: Fleet, kill: Kill, before: int, version: int) -> list[str]:
    """What a dead trainer leaves: old and whole, or TORN and holding; staged: old and whole."""
    problems, states = [], []
    for rank, worker in enumerate(fleet.workers):
        state, held = state_of(worker)
        states.append(state)
        if state == "READY":
            if held not in (before, version):
                problems.append(f"worker {rank} is READY at {held}, committed is {version}")
            elif fingerprint_in(worker) != fleet.digests[held]:
                problems.append(f"worker {rank} is READY v{held} with wrong bytes")
        elif state != "TORN" or (fleet.staged and version == before):
            problems.append(f"worker {rank} was left {state} v{held}")
        if state == "TORN" and _serves(worker):
            problems.append(f"worker {rank} is TORN and served a request")
    kill.result = "+".join(sorted(set(states)))
    return problems


def _serves(worker: Any) -> bool:
    """Whether a request is answered within half a second."""
    try:
        ray.get(worker.generate.remote([[1]], max_new_tokens=1, timeout_s=0.5), timeout=10)
    except Exception:
        return False
    return True


def _repair(fleet: Fleet, kill: Kill, version: int) -> list[str]:
    trainer = fleet.replace_trainer()
    digest = fleet.train_in(trainer)
    start = time.monotonic()
    name = fleet.name
    try:
        report = ray.get(
            trainer.__ray_call__.remote(lambda self: self.sync_weights(Controller(name=name))),
            timeout=60,
        )
    except Exception as error:
        return [f"the next trainer's sync failed: {type(error).__name__}: {error}"]
    kill.repair_s = time.monotonic() - start
    fleet.digests[report.version] = digest
    problems = fleet.wrong(range(_WORKERS), report.version)
    if report.version <= version:
        problems.append(f"version {version} was followed by {report.version}")
    return problems


def kill_controller(fleet: Fleet) -> Kill:
    """SIGKILL to the controller's actor, in a sync or between two.

    The sync that was hit needs the controller once more, to commit. The usual limit holds for it, too:
    Ray's restart of that actor is part of the time.
    """
    kill = Kill("controller", fleet.setting)
    before = fleet.controller.status().version
    pid = pid_of(fleet.controller._actor)
    digest = fleet.train()
    in_sync = fleet.rng.random() < _IN_SYNC
    committed, start = before, time.monotonic()
    later = Later(pid, fleet.rng.uniform(0.0, 1.0) * fleet.clean_s if in_sync else 0.0)
    answered: list[float] = []

    def watch() -> None:
        later.wait()
        pid_of(fleet.controller._actor, 60.0)
        answered.append(time.monotonic())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    if in_sync:
        try:
            report, kill.call_s = fleet.sync()
        except RayxferError as error:
            kill.result, kill.call_s = f"failed: {error}", time.monotonic() - start
        else:
            kill.result, committed = "completed", report.version
            fleet.digests[committed] = digest
    at = later.wait()
    kill.landed = in_sync and later.at is not None and at < start + kill.call_s
    watcher.join(60.0)
    if not answered:
        return _with(kill, "Ray did not restart the controller's actor within 60 s")
    kill.back_s = answered[0] - at
    limit = 2 * fleet.clean_s + SLACK_S  # Ray's restart of the actor included
    if kill.call_s > limit:
        kill.problems.append(f"the sync took {kill.call_s:.2f} s, limit {limit:.2f} s")
    try:
        version = fleet.controller.status().version
    except RayxferError as error:
        return _with(kill, f"status() did not answer: {type(error).__name__}: {error}")
    if version < committed:
        kill.problems.append(f"status() says version {version} after {committed} was committed")
    if version > before:  # a sync that failed may still have committed
        fleet.digests.setdefault(version, digest)
    digest = fleet.train()
    try:
        report, kill.repair_s = fleet.sync()
    except RayxferError as error:
        return _with(kill, f"the next sync failed: {type(error).__name__}: {error}")
    fleet.digests[report.version] = digest
    if report.version <= max(version, committed):
        kill.problems.append(f"version {max(version, committed)} was followed by {report.version}")
    kill.problems += fleet.wrong(range(_WORKERS), report.version)
    return kill


def _with(kill: Kill, problem: str) -> Kill:
    kill.problems.append(problem)
    return kill


DRILLS: dict[str, Callable[[Fleet], Kill]] = {
    "worker": kill_worker,
    "trainer": kill_trainer,
    "controller": kill_controller,
}


def run(
    counts: dict[str, int],
    settings: Sequence[tuple[str, str]],
    rng: random.Random,
    kills: list[Kill],
    say: Callable[[str], None] = print,
) -> None:
    """So many kills of each kind that hit a transfer (controllers: anywhere), shared out over one
    fleet for each of `settings` (backend, load mode).

    What comes of them is added to `kills`; those that came too late are in there, but not counted.
    """
    for index, (backend, mode) in enumerate(settings):
        start = time.monotonic()
        fleet = Fleet(backend, mode, rng)
        try:
            fleet.measure()
            for kind, count in counts.items():
                share = (index + 1) * count // len(settings) - index * count // len(settings)
                _run_some(fleet, kind, share, kills, say)
        finally:
            fleet.close()
        say(f"{fleet.setting} took {time.monotonic() - start:.0f} s")


def _run_some(
    fleet: Fleet, kind: str, share: int, kills: list[Kill], say: Callable[[str], None]
) -> None:
    mine: list[Kill] = []
    while sum(kill.landed or kind == "controller" for kill in mine) < share:
        try:
            kill = DRILLS[kind](fleet)
        except RayxferError as error:  # from a call that nothing disturbed
            kill = Kill(kind, fleet.setting, problems=[f"{type(error).__name__}: {error}"])
        mine.append(kill)
        kills.append(kill)
        for problem in kill.problems:
            say(f"VIOLATION {kind} kill {len(mine)} ({fleet.setting}): {problem}")
        if len(mine) >= 2 * share + 4:
            kill.problems.append("too few kills hit a transfer")
            break
    bad = sum(bool(kill.problems) for kill in mine)
    hit = sum(kill.landed for kill in mine)
    say(
        f"{fleet.setting}: {len(mine)} {kind} kills, {hit} mid-transfer, {bad} with violations; clean "
        f"sync {fleet.clean_s:.2f} s"
    )


def summary(kills: Sequence[Kill]) -> str:
    """One row per kind and backend, one per kind."""

    def seconds(values: list[float]) -> str:
        found = [value for value in values if value > 0]
        return f"{statistics.median(found):.2f} / {max(found):.2f}" if found else "-"

    rows = []
    for kind in dict.fromkeys(k.kind for k in kills):
        of_kind = [k for k in kills if k.kind == kind]
        for setting in [*dict.fromkeys(k.setting for k in of_kind), "all"]:
            some = [k for k in of_kind if setting in ("all", k.setting)]
            rows.append(
                [
                    kind,
                    setting,
                    str(len(some)),
                    str(sum(k.landed for k in some)),
                    seconds([k.call_s for k in some if k.landed]),
                    seconds([k.back_s for k in some]),
                    seconds([k.repair_s for k in some]),
                    str(sum(bool(k.problems) for k in some)),
                ]
            )
    head = ["killed", "setting", "kills", "mid-transfer", "call s", "back s", "next sync s", "bad"]
    return table(head, rows)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=__doc__)
    parser.add_argument("--worker-kills", type=int, default=100)
    parser.add_argument("--trainer-kills", type=int, default=30)
    parser.add_argument("--controller-kills", type=int, default=30)
    parser.add_argument("--backends", type=lambda text: text.split(","), default=list(BACKENDS))
    parser.add_argument(
        "--load-modes", type=lambda text: text.split(","), default=["in_place", "staged"]
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    start_ray()
    start = time.monotonic()
    kills: list[Kill] = []
    counts = {
        "worker": args.worker_kills,
        "trainer": args.trainer_kills,
        "controller": args.controller_kills,
    }
    try:
        rng = random.Random(f"drills {args.seed}")
        settings = [(b, mode) for b in args.backends for mode in args.load_modes]
        run(counts, settings, rng, kills, lambda text: print(text, flush=True))
    except KeyboardInterrupt:
        print("stopped early: this is what there is so far", flush=True)
    finally:
        ray.shutdown()
    bad = [kill for kill in kills if kill.problems]
    print(f"\nmedian / worst seconds; seed {args.seed}, {time.monotonic() - start:.0f} s in all\n")
    print(summary(kills))
    print(f"\n{len(kills)} kills, {len(bad)} with violations")
    if args.json is not None:
        out = {
            "command": " ".join(["python -m benchmarks.drills", *argv]),
            "environment": reporting.environment(),
            "seed": args.seed,
            "kills": [asdict(kill) for kill in kills],
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
