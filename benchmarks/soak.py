"""A long random life of a fleet, checked against a simple model of what every worker must hold.

    python -m benchmarks.soak --rounds 300 --minutes 20 --seed 0

Trains, full and partial syncs, kills, stops, restarts, joins, leaves, failing loaders, dead trainers,
dead controllers, over all CPU backends. A reader asks workers for tokens all the while: the model's
token tells which weights it was made with. Runs until both the rounds and the minutes are over. Exits
with 1 if a worker ever served what it must not, held wrong bytes, a version went back, or something
grew.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from benchmarks import reporting
from benchmarks.fleet import (
    Later,
    Stamped,
    end_actors,
    fingerprint,
    fingerprint_in,
    pid_of,
    ray_errors,
    send_signal,
    spawn_trainer,
    spawn_worker,
    stamp,
    start_ray,
    state_of,
    token,
    until,
)
from benchmarks.tables import table
from rayxfer import (
    Controller,
    ModuleSource,
    ParamMeta,
    PartialUpdate,
    RayxferError,
    SyncReport,
    TransferTimeout,
    WeightSource,
    WeightTransferConfig,
)
from rayxfer.report import Status
from rayxfer.testing import Fault, faulty

BACKENDS = ("shm", "gloo", "object_store")
_TENSORS, _ELEMENTS = 16, 1 << 16
_DELAY_S = 0.005
_KILL_WITHIN_S = 0.15
_FLEET = (2, 5)
_SETTLE_S = 40.0
_EPOCH_ROUNDS = 40
_SETTLE_EVERY = 6
_ENOUGH = 25

EVENTS = {
    "full": 24,
    "partial": 12,
    "kill_in_sync": 9,
    "kill_between": 5,
    "stop": 7,
    "restart": 4,
    "join": 6,
    "leave": 6,
    "bad_loader": 9,
    "bad_source": 3,
    "trainer": 5,
    "trainer_kill": 6,
    "controller_kill_in_sync": 4,
    "controller_kill_between": 3,
}
"""What can happen in a round, and how often."""


def build() -> Stamped:
    return Stamped(_TENSORS, _ELEMENTS)


def load_by_hand(model: Stamped, weights: list[tuple[str, Any]]) -> set[str]:
    """A user's own loader. Raises once, at the tensor that `broken_loader_at` says."""
    parts = dict(model.named_parameters())
    for name, tensor in weights:
        if model.broken_loader_at == 0:
            model.broken_loader_at = -1
            raise RuntimeError("the loader was told to fail")
        model.broken_loader_at -= model.broken_loader_at > 0
        parts[name].copy_(tensor)
    return {name for name, _ in weights}


class Fickle(WeightSource):
    """Declares a model, and yields another shape at tensor `at`."""

    def __init__(self, model: Stamped, at: int) -> None:
        self._inner, self._at = ModuleSource(model), at

    def metadata(self) -> list[ParamMeta]:
        return self._inner.metadata()

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(self._inner):
            yield name, tensor[1:] if index == self._at else tensor


@dataclass
class Member:
    """One worker actor, and what was seen of it.

    Attributes:
        by_hand: it has a loader of its own.
        seen: its process, and the highest version that process has had.
    """

    actor: Any
    by_hand: bool
    seen: tuple[int, int] = (0, 0)
    timers: list[Later] = field(default_factory=list)


class Reader:
    """Asks random workers for tokens, as a rollout loop would, and keeps what they say."""

    def __init__(self, seed: str) -> None:
        self.members: list[Member] = []
        self.answers: collections.deque[Any] = collections.deque()
        self.counts: collections.Counter[str] = collections.Counter()
        self._rng, self._end = random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak-reader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(0.02):
            members = list(self.members)
            if not members:
                continue
            actor = self._rng.choice(members).actor
            request = actor.generate.remote([[1, 2]], max_new_tokens=3, timeout_s=1.5)
            try:
                self.answers.append(ray.get(request, timeout=5)[0])
            except RayxferError as error:  # held beyond its deadline, or refused after a restart
                self.counts[_name(error)] += 1
            except ray_errors:
                self.counts["gone or stopped"] += 1
            else:
                self.counts["served"] += 1

    def stop(self) -> None:
        self._end.set()
        self._thread.join(10.0)


class Soak:
    """The fleet, the schedule, and the model: which stamps every committed version has."""

    def __init__(self, seed: int, say: Callable[[str], None] = print) -> None:
        self.rng = random.Random(f"soak {seed}")
        self.say = say
        self.problems: list[str] = []
        self.recent: collections.deque[str] = collections.deque(maxlen=4)
        self.events: collections.Counter[str] = collections.Counter()
        self.errors: collections.Counter[str] = collections.Counter()
        self.samples: list[dict[str, float]] = []
        self.round = 0
        self.version = 0
        self.truth: dict[int, tuple[int, ...]] = {0: (0,) * _TENSORS}
        self._digests: dict[tuple[int, ...], str] = {}
        self._stamp = 0
        self._failure: Exception | None = None
        self._model, self._scratch = build(), build()
        delays = [Fault("sender", "delay", i, None, _DELAY_S, False) for i in range(_TENSORS)]
        self._backends = [*BACKENDS, "auto", *(faulty(backend, *delays) for backend in BACKENDS)]
        self._shm_before = shm_entries()
        self._reader = Reader(f"reader {seed}")
        self.members = [self._spawn(by_hand=i % 2 == 1) for i in range(3)]
        self._trainer = spawn_trainer(build)
        self._controller: Controller | None = None
        self._new_controller()

    def close(self) -> None:
        self._reader.stop()
        self._wake_all()
        if self._controller is not None:
            self._controller.shutdown()
        end_actors([*(m.actor for m in self.members), self._trainer])
        left = until(lambda: not controllers(), 10.0)
        if left is None:
            self._problem(f"controllers were left behind: {controllers()}")

    @property
    def controller(self) -> Controller:
        assert self._controller is not None
        return self._controller

    def _problem(self, text: str) -> None:
        text = f"round {self.round} ({' > '.join(self.recent)}): {text}"
        if text not in self.problems:
            self.problems.append(text)
            self.say(f"VIOLATION in {text}")

    # ---- the fleet ------------------------------------------------------------------------------

    def _spawn(self, *, by_hand: bool) -> Member:
        return Member(spawn_worker(build, load_by_hand if by_hand else None), by_hand)

    def _new_controller(self) -> None:
        """The next part of the fleet's life, with other settings."""
        if self._controller is not None:
            self._controller.shutdown()
        config = WeightTransferConfig(
            backend=[self.rng.choice(self._backends) for _ in self.members],
            load_mode=self.rng.choice(["in_place", "staged"]),
            verify=self.rng.choice(["digest", "digest", "off"]),
            pause_mode=self.rng.choice(["keep", "keep", "wait", "abort"]),
            bucket_size_bytes=self.rng.choice([None, 1, 100_000, 1 << 20]),
            connect_timeout_s=20.0,
            stall_timeout_s=3.0,
            sync_timeout_s=60.0,
        )
        self._controller = Controller([m.actor for m in self.members], config)
        self._reader.members = list(self.members)
        names = [name.partition("+")[0] for name in config.backend]
        self.say(
            f"round {self.round}: a new controller, {config.load_mode}, verify {config.verify}, pause "
            f"{config.pause_mode}, bucket {config.bucket_size_bytes}, {', '.join(names)}"
        )
        found = self.controller.status().version
        if found != self.version:
            self._problem(f"a new controller says version {found}, the workers hold {self.version}")

    def _wake_all(self) -> None:
        for member in self.members:
            for timer in member.timers:
                timer.wait()
            member.timers.clear()

    def _pick(self, *, by_hand: bool = False) -> Member | None:
        """A member that answers."""
        able = [m for m in self.members if m.by_hand or not by_hand]
        self.rng.shuffle(able)
        return next((m for m in able if state_of(m.actor)[0] != "GONE"), None)

    # ---- the model ------------------------------------------------------------------------------

    def _new_stamps(self) -> tuple[int, ...]:
        self._stamp += 1
        return (self._stamp,) * _TENSORS

    def _digest(self, version: int) -> str:
        stamps = self.truth[version]
        if stamps not in self._digests:
            stamp(self._scratch, stamps)
            self._digests = {**dict(list(self._digests.items())[-50:])}
            self._digests[stamps] = fingerprint(self._scratch)
        return self._digests[stamps]

    def _status(self) -> Status:
        """Patient: on a busy machine the restart of a killed controller can take longer than one
        call waits."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            try:
                return self.controller.status()
            except TransferTimeout:
                self.events["(slow status)"] += 1
                if time.monotonic() > deadline:
                    raise

    def _record(self, stamps: tuple[int, ...], report: SyncReport | None) -> bool:
        """After a sync: which version is committed now, and so what its bytes are."""
        found = self._status().version
        if found < self.version:
            self._problem(f"version {self.version} went back to {found}")
        if report is not None and report.version != found:
            self._problem(f"the report says version {report.version}, the controller {found}")
        if found > self.version + 1:
            self._problem(f"version {self.version} was followed by {found}")
        if found <= self.version:
            return False
        self.truth[found], self.version = stamps, found
        return True

    def _sync(
        self, stamps: tuple[int, ...], offer: Any = None, *, partial: bool = False
    ) -> SyncReport | None:
        """One call; errors are counted and judged by the caller."""
        stamp(self._model, stamps)
        what = self._model if offer is None else offer
        start, report = time.monotonic(), None
        try:
            report = self.controller.sync_weights(what, partial=partial)
        except PartialUpdate as error:
            report = error.report
        except RayxferError as error:
            event = self.recent[-1] if self.recent else "start"
            self.errors[f"{_name(error)} ({event})"] += 1
            self._failure = error
        except Exception as error:
            self.errors[_name(error)] += 1
            self._problem(f"sync_weights raised {type(error).__name__}: {error}")
            self._failure = error
        seconds = time.monotonic() - start
        if seconds > 45:
            self._problem(f"a sync took {seconds:.1f} s")
        self._record(stamps, report)
        return report

    def _must(self, report: SyncReport | None, what: str) -> None:
        if report is None:
            self._problem(f"{what} failed: {type(self._failure).__name__}: {self._failure}")

    # ---- what happens ---------------------------------------------------------------------------

    def full(self) -> None:
        healthy = self._pick() is not None
        report = self._sync(self._new_stamps())
        if healthy:
            self._must(report, "a full sync without any fault")

    def partial(self) -> None:
        self._stamp += 1
        chosen = self.rng.sample(range(_TENSORS), self.rng.randint(1, 4))
        stamps = list(self.truth[self.version])
        for index in chosen:
            stamps[index] = self._stamp
        names = dict(self._model.named_parameters())
        self._sync(tuple(stamps), {f"parts.{i}": names[f"parts.{i}"] for i in chosen}, partial=True)

    def kill_in_sync(self) -> None:
        member = self._pick()
        if member is not None:
            later = Later(pid_of(member.actor), self.rng.uniform(0, _KILL_WITHIN_S))
            self._sync(self._new_stamps())
            later.wait()

    def kill_between(self) -> None:
        member = self._pick()
        if member is not None:
            send_signal(pid_of(member.actor))

    def stop(self) -> None:
        """SIGSTOP during a sync, SIGCONT some time after, often after it was given up."""
        member = self._pick()
        if member is not None:
            pid, at = pid_of(member.actor), self.rng.uniform(0, _KILL_WITHIN_S)
            Later(pid, at, signal.SIGSTOP)
            wake = Later(pid, at + self.rng.choice([0.5, 2.0, 7.0, 10.0]), signal.SIGCONT)
            member.timers.append(wake)
            self._sync(self._new_stamps())

    def restart(self) -> None:
        member = self._pick()
        if member is not None:
            ray.kill(member.actor, no_restart=False)

    def join(self) -> None:
        if len(self.members) >= _FLEET[1]:
            return self.full()
        member = self._spawn(by_hand=self.rng.random() < 0.5)
        try:
            self.controller.add_workers([member.actor], backend=self.rng.choice(self._backends))
        except RayxferError as error:
            self._problem(f"add_workers failed: {type(error).__name__}: {error}")
            end_actors([member.actor])
        else:
            self.members.append(member)
        return None

    def leave(self) -> None:
        if len(self.members) <= _FLEET[0]:
            return self.full()
        member = self.rng.choice(self.members)
        self._reader.members = [m for m in self.members if m is not member]
        errors: list[Exception] = []

        def remove() -> None:
            try:
                self.controller.remove_workers([member.actor])
            except RayxferError as error:
                errors.append(error)

        if self.rng.random() < 0.5:
            timer = threading.Timer(self.rng.uniform(0, _KILL_WITHIN_S), remove)
            timer.start()
            self._sync(self._new_stamps())
            timer.join()
        else:
            remove()
        for error in errors:
            self._problem(f"remove_workers failed: {type(error).__name__}: {error}")
        self.members.remove(member)
        for timer_ in member.timers:
            timer_.wait()
        end_actors([member.actor])
        return None

    def bad_loader(self) -> None:
        """A loader that raises at one tensor: its worker is TORN, the others go on. (A loader of the
        user's own runs at commit in staged mode, so it is TORN then, too.)"""
        member = self._pick(by_hand=True)
        if member is None:
            return self.full()
        at = self.rng.randrange(_TENSORS)

        def arm(model: Any) -> None:
            model.broken_loader_at = at

        with contextlib.suppress(*ray_errors):
            ray.get(member.actor.apply.remote(arm), timeout=20)
        report = self._sync(self._new_stamps())
        with contextlib.suppress(*ray_errors):  # where the sync did not get as far as that
            ray.get(
                member.actor.apply.remote(lambda m: setattr(m, "broken_loader_at", -1)), timeout=20
            )
        if report is not None and state_of(member.actor)[0] == "TORN":
            self.events["(torn)"] += 1
            with contextlib.suppress(*ray_errors, RayxferError):
                request = member.actor.generate.remote([[1]], max_new_tokens=1, timeout_s=0.3)
                answer = ray.get(request, timeout=5)
                if state_of(member.actor)[0] == "TORN":
                    self._problem(f"a TORN worker served {answer}")
        return None

    def bad_source(self) -> None:
        """The trainer's weights turn out other than declared, half-way."""
        before = self.version
        report = self._sync(self._new_stamps(), Fickle(self._model, self.rng.randrange(_TENSORS)))
        if report is not None or self.version != before:
            self._problem("a source that broke its own metadata was committed")

    def _train_trainer(self) -> tuple[int, ...]:
        stamps = self._new_stamps()
        ray.get(self._trainer.apply.remote(lambda model: stamp(model, stamps)), timeout=60)
        return stamps

    def trainer(self) -> None:
        stamps = self._train_trainer()
        healthy = self._pick() is not None
        report = self._sync(stamps, self._trainer)
        if healthy:
            self._must(report, "a trainer actor's sync")

    def trainer_kill(self) -> None:
        stamps = self._train_trainer()
        later = Later(pid_of(self._trainer), self.rng.uniform(0, 4 * _KILL_WITHIN_S))
        self._sync(stamps, self._trainer)
        later.wait()
        end_actors([self._trainer])
        self._trainer = spawn_trainer(build)
        free = until(lambda: not self._status().busy, 10.0)
        if free is None:
            self._problem("10 s after its trainer died, the controller is busy")
        self._record(stamps, None)

    def controller_kill_in_sync(self) -> None:
        later = Later(pid_of(self.controller._actor), self.rng.uniform(0, _KILL_WITHIN_S))
        self._sync(self._new_stamps())
        later.wait()

    def controller_kill_between(self) -> None:
        send_signal(pid_of(self.controller._actor))

    # ---- checks ---------------------------------------------------------------------------------

    def check(self) -> None:
        """What must be true after every round, whatever happened in it."""
        try:
            found = self._status().version
        except RayxferError as error:
            return self._problem(f"status() did not answer: {type(error).__name__}: {error}")
        if found != self.version:
            self._problem(f"the controller says version {found}, committed was {self.version}")
        for rank, member in enumerate(self.members):
            self._check_member(rank, member)
        while self._reader.answers:
            self._check_answer(self._reader.answers.popleft())
        return None

    def _check_member(self, index: int, member: Member) -> None:
        if any(timer.at is None for timer in member.timers):
            return  # it may be stopped
        before = state_of(member.actor)
        if before[0] != "READY":
            return
        digest = fingerprint_in(member.actor)
        with contextlib.suppress(*ray_errors):
            pid = pid_of(member.actor, 5.0)
            if state_of(member.actor) != before or digest == "GONE":
                return  # it caught up, or died, just now
            who, version = f"worker number {index}", before[1]
            if version not in self.truth:
                self._problem(f"{who} is READY at version {version}, which was never committed")
            elif digest != self._digest(version):
                self._problem(f"{who} is READY at version {version} with wrong bytes")
            if member.seen[0] == pid and version < member.seen[1]:
                self._problem(f"{who} went back from version {member.seen[1]} to {version}")
            member.seen = (pid, version)

    def _check_answer(self, answer: Any) -> None:
        first, last = answer.weight_version, answer.finished_version
        if last < first or last not in self.truth:
            self._problem(f"a request went from version {first} to {last}")
            return
        span = [v for v in range(first, last + 1) if v in self.truth]
        fits = [token(self.truth[version]) for version in span]
        if any(one not in fits for one in answer.token_ids):
            self._problem(
                f"a worker at version {first}..{last} served {answer.token_ids}, right is {fits}"
            )

    def settle(self) -> None:
        """Let everything come back, sync once, and expect a whole fleet."""
        self._wake_all()
        if until(self._all_answer, _SETTLE_S, 0.2) is None:
            gone = [i for i, m in enumerate(self.members) if state_of(m.actor)[0] == "GONE"]
            self._problem(f"workers number {gone} did not come back within {_SETTLE_S:g} s")
        self.full()
        if until(self._all_ready, _SETTLE_S, 0.2) is None:
            states = [state_of(m.actor) for m in self.members]
            self._problem(f"not whole after {_SETTLE_S:g} s: {states}; {self._status()}")
        self.check()
        self.sample()

    def _all_answer(self) -> bool:
        return all(state_of(m.actor)[0] != "GONE" for m in self.members)

    def _all_ready(self) -> bool:
        want = ("READY", self.version)
        rows = self._status().workers
        return (
            len(rows) == len(self.members)
            and all((row.state, row.version) == want for row in rows)
            and all(state_of(m.actor) == want for m in self.members)
        )

    # ---- what is in use -------------------------------------------------------------------------

    def sample(self) -> None:
        groups = {
            "driver": [os.getpid()],
            "controller": [pid_of(self.controller._actor)],
            "worker": [pid_of(m.actor) for m in self.members],
        }
        sample: dict[str, float] = {"round": self.round}
        for role, pids in groups.items():
            found = [usage(pid) for pid in pids]
            for key in found[0]:
                sample[f"{role} {key}"] = statistics.mean(one[key] for one in found)
        sample["controllers (named actors)"] = len(controllers())
        sample["/dev/shm entries"] = len(shm_entries() - self._shm_before)
        self.samples.append(sample)

    # ---- the whole ------------------------------------------------------------------------------

    def run(self, rounds: int, minutes: float) -> None:
        start = time.monotonic()
        names, weights = list(EVENTS), list(EVENTS.values())
        self.full()
        self.settle()
        while self.round < rounds or time.monotonic() - start < 60 * minutes:
            if len(self.problems) > _ENOUGH:
                self.say(f"more than {_ENOUGH} violations: the rest would tell nothing new")
                return
            self.round += 1
            if self.round % _EPOCH_ROUNDS == 0:
                self.settle()
                self._new_controller()
            event = self.rng.choices(names, weights)[0]
            self.events[event] += 1
            self.recent.append(event)
            try:
                getattr(self, event)()
            except Exception as error:
                self._problem(f"{event}: {type(error).__name__}: {error}")
            self._reader.members = list(self.members)
            self.check()
            if self.round % _SETTLE_EVERY == 0:
                self.settle()
            if self.round % 25 == 0:
                spent = time.monotonic() - start
                self.say(
                    f"round {self.round}, {spent:.0f} s, version {self.version}, "
                    f"{len(self.members)} workers, {len(self.problems)} violations"
                )
        self.settle()

    def summary(self) -> str:
        """What happened, and what grew."""
        lines = [
            f"{self.round} rounds, version {self.version}",
            "events: " + ", ".join(f"{k} {v}" for k, v in sorted(self.events.items())),
            "errors raised by sync_weights: "
            + (", ".join(f"{k} {v}" for k, v in sorted(self.errors.items())) or "none"),
            "reader: " + ", ".join(f"{k} {v}" for k, v in sorted(self._reader.counts.items())),
            "",
            growth_table(self.samples),
        ]
        return "\n".join(lines)


def _name(error: Exception) -> str:
    """The type of an error, without Ray's wrapping."""
    return type(error).__name__.removeprefix("RayTaskError(").removesuffix(")")


def usage(pid: int) -> dict[str, float]:
    process = psutil.Process(pid)
    with process.oneshot():
        listening = [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return {
            "memory (MiB)": process.memory_info().rss / (1 << 20),
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "listening ports": len(listening),
        }


def controllers() -> list[str]:
    """Named actors in rayxfer's namespace."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [actor["name"] for actor in found if actor["namespace"] == "rayxfer"]


def shm_entries() -> set[str]:
    """Names in /dev/shm, Ray's own object store left out."""
    return {name for name in os.listdir("/dev/shm") if "plasma" not in name}


LIMITS = {"memory (MiB)": 48.0, "descriptors": 8.0, "threads": 8.0, "listening ports": 2.0}
"""How much more may be in use in the last quarter of the samples than in the second."""


def growth(samples: Sequence[dict[str, float]]) -> list[tuple[str, float, float, float, bool]]:
    """Per quantity: the median of the second quarter and of the last, slope per 100 rounds (least
    squares, from the second quarter on), and whether that is too much."""
    quarter = len(samples) // 4
    out = []
    later = samples[quarter:]
    rounds = [one["round"] for one in later]
    for key in samples[0] if samples else ():
        if key == "round":
            continue
        values = [one[key] for one in later]
        first = statistics.median(one[key] for one in samples[quarter : 2 * quarter + 1])
        last = statistics.median(one[key] for one in samples[-quarter - 1 :])
        slope = 0.0
        if len(set(rounds)) > 1:
            slope = statistics.linear_regression(rounds, values).slope
        limit = next((v for k, v in LIMITS.items() if key.endswith(k)), 0.5)
        out.append((key, first, last, 100 * slope, last - first > limit))
    return out


def growth_table(samples: Sequence[dict[str, float]]) -> str:
    rows = [
        [key, f"{first:.1f}", f"{last:.1f}", f"{slope:+.2f}", "GREW" if bad else "ok"]
        for key, first, last, slope, bad in growth(samples)
    ]
    head = ["in use", "2nd quarter", "last quarter", "slope per 100 rounds", ""]
    return table(head, rows)


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    print(f"seed {args.seed}", flush=True)
    start_ray()
    start = time.monotonic()
    soak = Soak(args.seed, lambda text: print(text, flush=True))
    try:
        try:
            soak.run(args.rounds, args.minutes)
        except KeyboardInterrupt:
            print("stopped early: this is what there is so far", flush=True)
        finally:
            soak.close()
    finally:
        ray.shutdown()
    print(f"\nseed {args.seed}, {time.monotonic() - start:.0f} s, {soak.summary()}")
    grew = [row[0] for row in growth(soak.samples) if row[-1]]
    print(f"\n{len(soak.problems)} violations; grew: {', '.join(grew) or 'nothing'}")
    if args.json is not None:
        out = {
            "command": " ".join(["python -m benchmarks.soak", *argv]),
            "environment": reporting.environment(),
            "seed": args.seed,
            "events": soak.events,
            "errors": soak.errors,
            "problems": soak.problems,
            "samples": soak.samples,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(out, indent=1) + "\n")
    return 1 if soak.problems or grew else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
