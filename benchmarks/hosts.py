"""`gloo` between hosts: seconds, share of the line rate, bytes on the wire, for any number of workers.

    python -m benchmarks.hosts
    python -m benchmarks.hosts --hosts 3 --workers 1,2,4 --rates 1,10 --size-mib 128 --json out.json

The hosts are network namespaces with shaped links (`netns.py`; needs root and iproute2). The trainer is
alone on the first; each other host has its workers: plain processes, or with `--ray` actors of a real
cluster with a node on each host. Beside it, without Ray: one `dist.broadcast` of torch.distributed's gloo
per tensor, with one worker of each host. Wire bytes are what each host's interface counted. There a
train of segments that is cut up by the network card counts with one header; what limits the rate counts
every header.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.hosts_fleet import PER_TENSOR, ray_cluster, serve
from benchmarks.netns import Network, problem
from benchmarks.shapes import Shapes, equal_shapes, num_bytes
from benchmarks.tables import table

_GIGA = 1_000_000_000


def measure(args: argparse.Namespace, shapes: Shapes) -> list[dict[str, Any]]:
    """One row per rate, number of workers and way."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with (
        Network(args.hosts, args.mtu) as network,
        ray_cluster(network) if args.ray else contextlib.nullcontext(),
    ):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=serve,
            args=(theirs, network.hosts, network.addresses[0], max(args.workers), shapes, args.ray),
        )
        process.start()
        theirs.close()

        def ask(name: str, *arguments: Any) -> Any:
            ours.send((name, arguments))
            good, value = ours.recv()
            if not good:
                raise SystemExit(f"{name}: {value}")
            return value

        try:
            ours.recv()
            for rate in args.rates:
                network.shape(int(rate * _GIGA))
                for way, per_host in [
                    *(("gloo", count) for count in args.workers),
                    *([(PER_TENSOR, 1)] if args.peer and not args.ray else []),
                ]:
                    row = _measure_one(ask, network, args, way, per_host)
                    row |= {"rate_gbit": rate, "line_share": _share(shapes, row["median_s"], rate)}
                    row["wire"] = [n / num_bytes(shapes) / args.repeats for n in row["wire_bytes"]]
                    rows.append(row)
                    print(
                        f"  {rate:g} Gbit/s, {way}, {per_host}: {row['median_s']:.3f} s",
                        file=sys.stderr,
                    )
        finally:
            ours.close()
            process.join(60)
            if process.is_alive():
                process.kill()
                process.join()
    return rows


def _share(shapes: Shapes, seconds: float, rate_gbit: float) -> float:
    return num_bytes(shapes) * 8 / seconds / (rate_gbit * _GIGA)


def _measure_one(
    ask: Callable[..., Any], network: Network, args: argparse.Namespace, way: str, per_host: int
) -> dict[str, Any]:
    ask("open", way, per_host, args.verify, args.load_mode)
    ask("sync")  # opens channels, touches pages
    ask("poison")
    before, sent = network.received_bytes(), network.sent_bytes()
    seconds, updates = zip(*(ask("sync") for _ in range(args.repeats)), strict=True)
    after, out = network.received_bytes(), network.sent_bytes()
    ask("check")
    ask("close")
    return {
        "way": way,
        "workers": per_host,
        "median_s": statistics.median(seconds),
        "samples_s": seconds,
        "update_s": statistics.median(updates),
        "wire_bytes": [b - a for a, b in zip(before[1:], after[1:], strict=True)],
        "trainer_sent_bytes": out[0] - sent[0],
    }


def _numbers(text: str) -> list[float]:
    return [float(one) for one in text.split(",")]


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hosts", description=__doc__)
    add = parser.add_argument
    add("--hosts", type=int, default=3, choices=(2, 3), help="the trainer's included (default 3)")
    add("--workers", type=lambda t: [int(n) for n in t.split(",")], default=[1, 2, 4])
    add("--rates", type=_numbers, default=[1.0, 10.0], help="Gbit/s of every link (default 1,10)")
    add("--size-mib", type=int, default=128, help="all weights together (default 128)")
    add("--tensors", type=int, default=200)
    add("--repeats", type=int, default=3)
    add("--mtu", type=int, default=1500)
    add("--verify", choices=("off", "digest"), default="digest")
    add("--load-mode", choices=("in_place", "staged", "mapped"), default="in_place")
    add("--no-peer", dest="peer", action="store_false", help=f"without {PER_TENSOR!r}")
    add(
        "--ray",
        action="store_true",
        help="a real Ray cluster, a node per host; else plain processes",
    )
    add("--json", type=pathlib.Path, help="where to write everything that was measured")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    why = problem()
    if why is not None:
        print(f"benchmarks.hosts cannot run here: {why}", file=sys.stderr)
        return 2
    shapes = equal_shapes(args.size_mib << 20, args.tensors)
    start = time.monotonic()
    load = os.getloadavg()
    where = "actors of a Ray cluster with a node per host" if args.ray else "processes without Ray"
    rows = measure(args, shapes)
    print(
        f"\n{num_bytes(shapes):,} bytes as {args.tensors} bf16 tensors from one host to "
        f"{args.hosts - 1}; {where}; MTU {args.mtu}, verify {args.verify}, {args.load_mode}; median of "
        f"{args.repeats}; load {load[0]:.1f} to {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores\n"
    )
    head = [
        "Gbit/s",
        "way",
        "workers per host",
        "s",
        "update s",
        "of line rate",
        "model on the wire, per host",
        "sent",
    ]
    print(
        table(
            head,
            [
                [
                    f"{r['rate_gbit']:g}",
                    r["way"],
                    str(r["workers"]),
                    f"{r['median_s']:.3f}",
                    f"{r['update_s']:.3f}",
                    f"{r['line_share']:.2f}",
                    " ".join(f"{share:.3f}" for share in r["wire"]),
                    f"{r['trainer_sent_bytes'] / num_bytes(shapes) / args.repeats:.3f}",
                ]
                for r in rows
            ],
        )
    )
    print(f"\n{time.monotonic() - start:.0f} s")
    if args.json is not None:
        settings = {key: value for key, value in vars(args).items() if key != "json"}
        args.json.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
