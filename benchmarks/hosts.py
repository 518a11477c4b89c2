"""`gloo` between hosts: seconds, share of the line rate, bytes on the wire, for any number of workers.

    python -m benchmarks.hosts
    python -m benchmarks.hosts --hosts 3 --workers 1,2,4 --rates 1,10 --size-mib 128 --json out.json

The hosts are network namespaces with shaped links (`netns.py`; needs root and iproute2). The trainer is
alone on the first; each other host has its workers, which are processes. Beside it, in turn: one
`dist.broadcast` of torch.distributed's gloo per tensor, with a worker of each host. Wire bytes are what
each host's interface counted. There a train of segments that is cut up by the network card counts with
one header; what limits the rate counts every header.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.netns import Network, enter, problem
from benchmarks.tables import table
from benchmarks.weights import Model, Shapes, as_numpy, make_weights, num_bytes, shapes_of
from benchmarks.weights import poison as poison_tensors
from benchmarks.weights import wrong_names as wrong_tensors
from rayxfer import WeightTransferConfig
from rayxfer.testing import LocalController
from rayxfer.testing.processes import ProcessWorker

PER_TENSOR = "torch broadcast"
_GIGA = 1_000_000_000


def build(host: str, shapes: Shapes) -> torch.nn.Module:
    enter(host)
    torch.set_num_threads(1)
    return Model(shapes)


def poison(model: torch.nn.Module) -> None:
    poison_tensors(dict(model.named_parameters()))


def wrong(model: torch.nn.Module, shapes: Shapes) -> list[str]:
    return wrong_tensors(dict(model.named_parameters()), as_numpy(make_weights(shapes)))


def join(model: Any, address: str, rank: int, world_size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{address}:29500",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )


def leave(model: Any) -> None:
    dist.destroy_process_group()


def broadcast_each(model: torch.nn.Module | dict[str, torch.Tensor]) -> None:
    tensors = (
        model.values() if isinstance(model, dict) else (p.detach() for p in model.parameters())
    )
    for tensor in tensors:
        dist.broadcast(tensor, 0)
    dist.barrier()


class _Trainer:
    """The trainer's process, on the first host, with all workers as its children."""

    def __init__(self, hosts: list[str], address: str, per_host: int, shapes: Shapes) -> None:
        enter(hosts[0])
        self._address, self._shapes = address, shapes
        self._weights = make_weights(shapes)
        self._workers = [
            [ProcessWorker(build, host, shapes) for _ in range(per_host)] for host in hosts[1:]
        ]
        for group in self._workers:
            for worker in group:
                worker.run(poison)
        self._controller: LocalController | None = None
        self._chosen: list[ProcessWorker] = []

    def open(self, way: str, per_host: int, verify: str) -> None:
        count = 1 if way == PER_TENSOR else per_host
        self._chosen = [worker for group in self._workers for worker in group[:count]]
        if way == PER_TENSOR:
            size = 1 + len(self._chosen)
            joined = [w.start(join, self._address, i, size) for i, w in enumerate(self._chosen, 1)]
            join(None, self._address, 0, size)
            for one in joined:
                one.result(timeout=120)
            return
        config = WeightTransferConfig(backend=way, verify=verify)  # type: ignore[arg-type]
        self._controller = LocalController(self._chosen, config)

    def sync(self) -> tuple[float, float]:
        """Seconds, and those of them in which bytes travel."""
        start = time.perf_counter()
        if self._controller is not None:
            report = self._controller.sync_weights(self._weights)
            return time.perf_counter() - start, report.phases["update"]
        others = [worker.start(broadcast_each) for worker in self._chosen]
        broadcast_each(self._weights)
        for one in others:
            one.result(timeout=600)
        seconds = time.perf_counter() - start
        return seconds, seconds

    def poison(self) -> None:
        for worker in self._chosen:
            worker.run(poison)

    def check(self) -> None:
        for i, worker in enumerate(self._chosen):
            names = worker.run(wrong, self._shapes)
            if names:
                raise SystemExit(f"worker {i}: wrong bytes in {len(names)} tensors: {names[:3]}")

    def close(self) -> None:
        if self._controller is not None:
            self._controller.shutdown()
            self._controller = None
        elif self._chosen:
            left = [worker.start(leave) for worker in self._chosen]
            dist.destroy_process_group()
            for one in left:
                one.result(timeout=60)
        self._chosen = []

    def end(self) -> None:
        for group in self._workers:
            for worker in group:
                worker.close()


def _serve(connection: Connection, *given: Any) -> None:
    trainer = _Trainer(*given)
    connection.send(None)
    try:
        while True:
            name, arguments = connection.recv()
            try:
                connection.send((True, getattr(trainer, name)(*arguments)))
            except BaseException as error:
                connection.send((False, f"{type(error).__name__}: {error}"))
    except EOFError:
        pass
    finally:
        trainer.end()


def measure(args: argparse.Namespace, shapes: Shapes) -> list[dict[str, Any]]:
    """One row per rate, number of workers and way."""
    rows = []
    spawn = multiprocessing.get_context("spawn")
    with Network(args.hosts, args.mtu) as network:
        ours, theirs = spawn.Pipe()
        process = spawn.Process(
            target=_serve,
            args=(theirs, network.hosts, network.addresses[0], max(args.workers), shapes),
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
                    *([(PER_TENSOR, 1)] if args.peer else []),
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
    ask("open", way, per_host, args.verify)
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
    add("--no-peer", dest="peer", action="store_false", help=f"without {PER_TENSOR!r}")
    add("--json", type=pathlib.Path, help="where to write everything that was measured")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    args = parse_args(argv)
    why = problem()
    if why is not None:
        print(f"benchmarks.hosts cannot run here: {why}", file=sys.stderr)
        return 2
    shapes = shapes_of(args.size_mib << 20, args.tensors)
    start = time.monotonic()
    load = os.getloadavg()
    rows = measure(args, shapes)
    print(
        f"\n{num_bytes(shapes):,} bytes as {args.tensors} bf16 tensors from one host to "
        f"{args.hosts - 1}; processes without Ray; MTU {args.mtu}, verify {args.verify}; median of "
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
