"""How fast a sync is, next to a plain memory copy and to `ray.put(state_dict)`, in one run.

    python -m benchmarks.sync
    python -m benchmarks.sync --size-bytes 1GiB --workers 2 --backends shm --json out.json
    python -m benchmarks.sync --quick

Contenders take turns (A B C A B C …), so that what disturbs the machine disturbs them all. Read the
ratios; the absolute figures belong to the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

# Read when Ray starts. It prints a warning at more than four times the second one's processes.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "16")

import psutil
import ray

from benchmarks import reporting
from benchmarks.contenders import PEERS, Contender, Rayxfer, copies_held, make_peer, ping_all
from benchmarks.weights import as_numpy, make_weights, num_bytes, shapes_of, spawn_workers

VERIFY = {"on": "digest", "off": "off"}
FIXED_WORKERS, FIXED_TENSORS, FIXED_TENSOR_BYTES = 4, 300, 1 << 10
_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
_WARM_UP_ROUNDS = 5
_SETTLE_S = 0.05
"""Between two turns: what the last one let go of (objects, pages) is freed meanwhile."""


def parse_bytes(text: str) -> int:
    """ "512MiB", "1.5 GB", "4096" as a number of bytes."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or match[2] not in _UNITS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size: expected a number and B, kB, MB, GB, KiB, MiB or GiB"
        )
    size = int(float(match[1]) * _UNITS[match[2]])
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: it has to be at least one byte")
    return size


def _names(choices: Sequence[str] | None = None) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        for name in names:
            if choices is not None and name not in choices:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(choices)}")
        return list(dict.fromkeys(names))

    return parse


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} has to be at least 1")
    return value


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sync",
        description="Measure syncs side by side with a memory copy and ray.put(state_dict).",
    )
    add = parser.add_argument
    add("--size-bytes", type=parse_bytes, help="all weights together, e.g. 512MiB (the default)")
    add("--tensors", type=_count, default=200, help="into how many bf16 tensors (default 200)")
    add("--workers", type=_count, default=1, help="receivers (default 1)")
    add("--backends", type=_names(), default=["shm", "gloo", "object_store"], help="of rayxfer")
    add("--verify", type=_names(tuple(VERIFY)), default=list(VERIFY), help="on, off, or both")
    add("--peers", type=_names(PEERS), default=list(PEERS), help=f"out of {','.join(PEERS)}")
    add("--repeats", type=_count, help="turns of each contender (default 7)")
    add("--fixed-rounds", type=int, help="rounds of the fixed-cost part (default 60; 0: none)")
    add("--json", type=pathlib.Path, help="where to write everything that was measured")
    add("--quick", action="store_true", help="about a minute: 64 MiB, 3 repeats, 20 rounds")
    args = parser.parse_args(argv)
    defaults = (64 << 20, 3, 20) if args.quick else (512 << 20, 7, 60)
    for key, value in zip(("size_bytes", "repeats", "fixed_rounds"), defaults, strict=True):
        if getattr(args, key) is None:
            setattr(args, key, value)
    return args


def take_turns(contenders: Sequence[Contender], repeats: int, expected: ray.ObjectRef) -> list[Any]:
    """Seconds per contender and repetition. Receivers are poisoned before the last turn, and their
    bytes compared after it, both off the clock."""
    for contender in contenders:  # opens channels, touches pages
        contender.run()
        getattr(contender, "reports", []).clear()
    samples: list[list[float]] = [[] for _ in contenders]
    for turn in range(repeats):
        if turn == repeats - 1:
            for contender in contenders:
                contender.poison()
        for contender, seconds in zip(contenders, samples, strict=True):
            time.sleep(_SETTLE_S)
            seconds.append(contender.run())
        print(f"  turn {turn + 1} of {repeats}", file=sys.stderr, flush=True)
    for contender in contenders:
        _check(contender, expected)
    return samples


def _check(contender: Contender, expected: ray.ObjectRef) -> None:
    wrong = contender.wrong_names(expected)
    if wrong:
        raise SystemExit(f"{contender.label}: wrong bytes in {len(wrong)} tensors: {wrong[:3]}")


def _row(contender: Contender, samples: Sequence[float]) -> dict[str, Any]:
    row: dict[str, Any] = {"name": contender.name, "verify": contender.verify}
    row |= reporting.summary(samples)
    if isinstance(contender, Rayxfer):
        row["control_calls"] = max(report.control_calls for report in contender.reports)
        row["attempts"] = max(report.attempts for report in contender.reports)
        row["verified"] = contender.reports[-1].workers[0].verified
        row["phases_s"] = reporting.phase_medians(contender.reports)
    return row


def bulk(args: argparse.Namespace) -> list[dict[str, Any]]:
    """All contenders over the same weights."""
    shapes = shapes_of(args.size_bytes, args.tensors)
    need = num_bytes(shapes) * copies_held(len(args.backends), args.peers, args.workers)
    free = psutil.virtual_memory().available
    if need > 0.8 * free:
        raise SystemExit(
            f"this needs about {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free: choose a "
            "smaller --size-bytes, or fewer --workers or --backends"
        )
    weights = make_weights(shapes)
    contenders: list[Contender] = [
        make_peer(peer, args.workers, shapes, weights) for peer in args.peers
    ]
    contenders += [
        Rayxfer(backend, VERIFY[verify], args.workers, shapes, weights)
        for backend in args.backends
        for verify in args.verify
    ]
    try:
        samples = take_turns(contenders, args.repeats, ray.put(as_numpy(weights)))
        rows = [_row(c, s) for c, s in zip(contenders, samples, strict=True)]
    finally:
        for contender in contenders:
            contender.close()
    medians = {row["name"]: row["median_s"] for row in rows if not row["verify"]}
    for row in rows:
        row["gigabytes_per_second"] = num_bytes(shapes) / 1e9 / row["median_s"]
        row["speed_ratio"] = {peer: median / row["median_s"] for peer, median in medians.items()}
    return rows


def fixed(args: argparse.Namespace) -> dict[str, Any]:
    """What a sync costs where there is almost nothing to send. A bare fan-out to the same workers
    takes turns with each contender."""
    shapes = shapes_of(FIXED_TENSORS * FIXED_TENSOR_BYTES, FIXED_TENSORS)
    weights = make_weights(shapes)
    expected = ray.put(as_numpy(weights))
    workers = spawn_workers(FIXED_WORKERS, shapes)
    rows = []
    for backend in args.backends:
        for verify in args.verify:
            contender = Rayxfer(backend, VERIFY[verify], workers, shapes, weights)
            pings: list[float] = []
            samples: list[float] = []
            try:
                for turn in range(-_WARM_UP_ROUNDS, args.fixed_rounds):
                    if turn == 0:
                        pings, samples = [], []
                        contender.reports.clear()
                        contender.poison()
                    pings.append(ping_all(workers))
                    samples.append(contender.run())
                _check(contender, expected)
            finally:
                contender.close()
            row = _row(contender, samples)
            row["ping"] = reporting.summary(pings)
            row["x_ping"] = row["median_s"] / row["ping"]["median_s"]
            rows.append(row)
    for worker in workers:
        ray.kill(worker)
    return {
        "workers": FIXED_WORKERS,
        "tensors": FIXED_TENSORS,
        "tensor_bytes": FIXED_TENSOR_BYTES,
        "results": rows,
    }


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    settings = {key: value for key, value in vars(args).items() if key not in ("json", "quick")}
    out: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.sync", *argv]),
        "environment": reporting.environment(),
        "settings": settings,
        "load_before": os.getloadavg(),
    }
    where = out["environment"]
    print(
        f"{where['cores']} cores ({where['cpu']}), {where['memory_bytes'] / 2**30:.0f} GiB; python "
        f"{where['python']}, torch {where['torch']}, ray {where['ray']}, rayxfer {where['rayxfer']} "
        f"({where['commit']}); load {out['load_before'][0]:.2f}"
    )
    if out["load_before"][0] > 0.5 * where["cores"]:
        print("others are using this machine: repeat it when the load is lower", file=sys.stderr)
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=max(1 << 30, 3 * args.size_bytes),
    )
    start = time.monotonic()
    try:
        out["bulk"] = bulk(args)
        print(
            f"\n{num_bytes(shapes_of(args.size_bytes, args.tensors)):,} bytes as {args.tensors} bf16 "
            f"tensors to {args.workers} worker{'s' if args.workers > 1 else ''}, "
            f"median of {args.repeats} interleaved turns; x: times as fast as\n"
        )
        print(reporting.bulk_table(out["bulk"]), end="\n\n")
        if args.backends:
            print(reporting.phase_table(out["bulk"]))
        if args.fixed_rounds > 0 and args.backends:
            out["fixed"] = fixed(args)
            print(
                f"\n{FIXED_TENSORS} tensors x {FIXED_TENSOR_BYTES} bytes to {FIXED_WORKERS} workers, "
                f"median of {args.fixed_rounds} interleaved rounds; x ping: times as long as\n"
            )
            print(reporting.fixed_table(out["fixed"]), end="\n\n")
            print(reporting.phase_table(out["fixed"]["results"]))
    finally:
        ray.shutdown()
    out["load_after"], out["wall_s"] = os.getloadavg(), time.monotonic() - start
    print(f"\n{out['wall_s']:.0f} s; load at the end {out['load_after'][0]:.2f}")
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
