"""How fast a sync is and what memory it takes, next to a plain memory copy and to what a user would
pick instead, in one run.

    python -m benchmarks.sync
    python -m benchmarks.sync --size-bytes 1GiB --workers 2 --backends shm --json out.json
    python -m benchmarks.sync --all --json out.json --plots plots
    python -m benchmarks.sync --from-json out.json --markdown

Contenders take turns, in an order that changes, so that what disturbs the machine disturbs them all.
Read the ratios; the absolute figures belong to the machine.
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

import ray

from benchmarks import cluster, plots, reporting, results, sections, targets
from benchmarks.contenders import MODES
from benchmarks.footprint import memory
from benchmarks.peers import PEERS
from benchmarks.sections import Plan
from benchmarks.shapes import MODELS
from benchmarks.turns import TooLarge

SECTIONS: dict[str, Callable[[Plan], dict[str, Any]]] = {
    "headline": sections.headline,
    "fixed": sections.fixed,
    "fleet": sections.fleet,
    "stall": sections.stall,
    "workers": sections.workers,
    "many": sections.many,
    "tensors": sections.tensors,
    "memory": memory,
    # no target is made of these, so if time runs out it is here
    "sizes": sections.sizes,
    "models": sections.models,
}

_MIB = 1 << 20
_DEFAULT_SECTIONS = ("headline", "fixed")
_UNITS = {"": 1, "b": 1, **{f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}}
_UNITS |= {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}


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
        description="Measure syncs side by side with a memory copy and with other ways.",
    )
    add = parser.add_argument
    plan = Plan()
    ways = ",".join(plan.ways)
    add("--size-bytes", type=parse_bytes, help="all weights together (default 512MiB; --all: 1GiB)")
    add("--tensors", type=_count, help="this many bf16 tensors of equal size (--shapes equal)")
    add("--shapes", choices=["equal", *MODELS], help="whose tensors, scaled (default qwen3: 310)")
    add("--workers", type=_count, default=1, help="receivers (default 1)")
    add(
        "--backends",
        type=_names(),
        default=list(plan.ways),
        help=f"of rayxfer, or {', '.join(MODES)} (default {ways})",
    )
    add(
        "--verify",
        type=_names(("on", "off")),
        help="on, off, or both, for all of them (default: both for shm and shm_placed)",
    )
    add("--peers", type=_names(tuple(PEERS)), default=list(PEERS), help=f"out of {','.join(PEERS)}")
    add("--repeats", type=_count, help="turns of each contender (default 7)")
    add("--fixed-rounds", type=int, help="rounds of the fixed-cost part (default 60; 0: none)")
    add("--sweep-bytes", type=parse_bytes, help="size where something else varies (256MiB)")
    add("--sections", type=_names(tuple(SECTIONS)), help=f"out of {','.join(SECTIONS)}")
    add("--all", action="store_true", help="every section (default: headline,fixed)")
    add("--quick", action="store_true", help="small: 64 MiB, 3 repeats, 20 rounds")
    add("--minutes", type=float, help="begin no section after this long; what is left is skipped")
    add("--json", type=pathlib.Path, help="where to write everything that was measured")
    add("--plots", type=pathlib.Path, help="a folder for pictures (needs matplotlib)")
    add("--from-json", type=pathlib.Path, help="measure nothing: show what --json once wrote")
    add("--markdown", action="store_true", help="with --from-json: README-ready tables")
    args = parser.parse_args(argv)
    if args.tensors and args.shapes not in (None, "equal"):
        parser.error(f"--tensors cuts equal tensors, --shapes {args.shapes} has its own: give one")
    return args


def plan_of(args: argparse.Namespace) -> Plan:
    """What the arguments ask for."""
    size = args.size_bytes or (64 if args.quick else 1024 if args.all else 512) * _MIB
    sweep = args.sweep_bytes or min(256 * _MIB, size)
    largest = 64 * _MIB if args.quick else 4096 * _MIB
    return Plan(
        size_bytes=size,
        shapes=args.shapes or ("equal" if args.tensors else "qwen3"),
        tensors=args.tensors or 200,
        workers=args.workers,
        ways=tuple(args.backends),
        verify=tuple(args.verify) if args.verify else None,
        peers=tuple(args.peers),
        repeats=args.repeats or (3 if args.quick else 7),
        fixed_rounds=(20 if args.quick else 60) if args.fixed_rounds is None else args.fixed_rounds,
        sweep_bytes=sweep,
        sizes=tuple(size for size in Plan().sizes if size <= largest),
        own_ray=True,
    )


def run(
    plan: Plan,
    names: Sequence[str],
    minutes: float | None = None,
    save: Callable[[dict[str, Any]], None] = lambda out: None,
) -> dict[str, Any]:
    """Measure the sections `names`, in a Ray of its own.

    minutes: no section begins later. save: called with what there is after each section, so that a
    run that is ended loses no more than the section it was in.
    """
    out: dict[str, Any] = {
        "settings": {**vars(plan), "sections": list(names)},
        "environment": reporting.environment(),
        "load_before": os.getloadavg(),
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        "section_s": {},
    }
    if out["load_before"][0] > 0.5 * out["environment"]["cores"]:
        print("others are using this machine: repeat it when the load is lower", file=sys.stderr)
    cluster.start(max(1 << 30, 2 * plan.size_bytes + 128 * _MIB))
    start = time.monotonic()
    try:
        for name in names:
            begun = time.monotonic()
            if minutes is not None and begun - start > 60 * minutes:
                out[name] = {"rows": [], "skipped": {name: f"{minutes:g} minutes were over"}}
                continue
            try:
                out[name] = SECTIONS[name](plan)
            except TooLarge as error:
                if len(names) == 1:
                    raise SystemExit(str(error)) from error
                print(f"  skipped {name}: {error}", file=sys.stderr)
                out[name] = {"rows": [], "skipped": {name: str(error)}}
            out["section_s"][name] = time.monotonic() - begun
            _finish(out, start)
            save(out)
    finally:
        ray.shutdown()
    _finish(out, start)
    save(out)
    return out


def _finish(out: dict[str, Any], start: float) -> None:
    out["load_after"], out["wall_s"] = os.getloadavg(), time.monotonic() - start
    out["targets"] = targets.as_rows(targets.verdicts(out))


def show(out: dict[str, Any], folder: pathlib.Path | None) -> None:
    """Print the tables; draw the pictures, if asked for."""
    print(results.markdown(out))
    if folder is None:
        return
    try:
        for path in plots.draw(out, folder):
            print(f"wrote {path}", file=sys.stderr)
    except ImportError as error:
        print(f"no plots: {error} (pip install matplotlib)", file=sys.stderr)


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if args.from_json is not None:
        out = json.loads(args.from_json.read_text())
        out["targets"] = targets.as_rows(targets.verdicts(out))
        if args.markdown or args.plots is None:
            show(out, args.plots)
        else:
            plots.draw(out, args.plots)
        return
    default = tuple(SECTIONS) if args.all else _DEFAULT_SECTIONS

    def save(out: dict[str, Any]) -> None:
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(out, indent=1) + "\n")

    out = run(plan_of(args), args.sections or default, args.minutes, save)
    show(out, args.plots)


if __name__ == "__main__":
    main(sys.argv[1:])
