"""The processes of `benchmarks.hosts`: a trainer on the first host, workers on the others."""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import ray
import torch
import torch.distributed as dist

from benchmarks.netns import Network, enter
from benchmarks.shapes import Shapes
from benchmarks.weights import Model, as_numpy, make_weights
from benchmarks.weights import poison as poison_tensors
from benchmarks.weights import wrong_names as wrong_tensors
from rayxfer import Controller, WeightTransferConfig, WorkerMixin
from rayxfer.testing import LocalController
from rayxfer.testing.processes import ProcessWorker

__all__ = ["PER_TENSOR", "ray_cluster", "serve"]

PER_TENSOR = "torch broadcast"
_PORT = 6379
_START_S = 120.0


def build(host: str, shapes: Shapes) -> torch.nn.Module:
    enter(host)
    torch.set_num_threads(1)
    return Model(make_weights(shapes))


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


class _Actor(WorkerMixin):
    """A worker as a Ray actor."""

    def __init__(self, shapes: Shapes) -> None:
        torch.set_num_threads(1)
        self._model = Model(make_weights(shapes))
        self.rayxfer_bind(self._model)

    def run(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        return function(self._model, *arguments)


class _RayWorker:
    """As `ProcessWorker`."""

    def __init__(self, host: str, shapes: Shapes) -> None:
        self.handle = ray.remote(num_cpus=0, resources={host: 1})(_Actor).remote(shapes)

    def run(self, function: Any, *arguments: Any) -> Any:
        return ray.get(self.handle.run.remote(function, arguments), timeout=120)

    def close(self) -> None:
        ray.kill(self.handle)


class _Trainer:
    """The trainer's process, on the first host; it makes the workers."""

    def __init__(
        self, hosts: list[str], address: str, per_host: int, shapes: Shapes, with_ray: bool
    ) -> None:
        enter(hosts[0])
        self._address, self._shapes, self._with_ray = address, shapes, with_ray
        self._weights = make_weights(shapes)
        if with_ray:
            ray.init(f"{address}:{_PORT}", _node_ip_address=address, log_to_driver=False)
        self._workers: list[list[Any]] = [
            [
                _RayWorker(host, shapes) if with_ray else ProcessWorker(build, host, shapes)
                for _ in range(per_host)
            ]
            for host in hosts[1:]
        ]
        for group in self._workers:
            for worker in group:
                worker.run(poison)
        self._controller: Controller | LocalController | None = None
        self._chosen: list[Any] = []

    def open(self, way: str, per_host: int, verify: str, load_mode: str) -> None:
        count = 1 if way == PER_TENSOR else per_host
        self._chosen = [worker for group in self._workers for worker in group[:count]]
        if way == PER_TENSOR:
            size = 1 + len(self._chosen)
            joined = [w.start(join, self._address, i, size) for i, w in enumerate(self._chosen, 1)]
            join(None, self._address, 0, size)
            for one in joined:
                one.result(timeout=120)
            return
        config = WeightTransferConfig(backend=way, verify=verify, load_mode=load_mode)  # type: ignore[arg-type]
        self._controller = (
            Controller([worker.handle for worker in self._chosen], config)
            if self._with_ray
            else LocalController(self._chosen, config)
        )

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
        if self._with_ray:
            ray.shutdown()


def serve(connection: Connection, *given: Any) -> None:
    """Be the trainer, and do what is asked for, until the other end is closed."""
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


@contextlib.contextmanager
def ray_cluster(network: Network) -> Iterator[None]:
    """A Ray node on every host, with the host's name as a resource. Token auth, as Ray's own default."""
    nodes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="rx") as folder, contextlib.ExitStack() as stack:
        token = pathlib.Path(folder, "token")
        token.write_text(secrets.token_hex(32))
        before = dict(os.environ)
        stack.callback(os.environ.update, before)
        os.environ.update(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(token),
            RAY_USAGE_STATS_ENABLED="0",
            PYTHONPATH=os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")]),
        )
        stack.callback(_end, nodes)
        head = f"{network.addresses[0]}:{_PORT}"
        for i, (host, address) in enumerate(zip(network.hosts, network.addresses, strict=True)):
            role = (
                ["--head", f"--port={_PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
                if i == 0
                else [f"--address={head}"]
            )
            command = [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *role, "--block"),
                *("--disable-usage-stats", f"--node-ip-address={address}", "--num-cpus=2"),
                *("--object-store-memory=100000000", f'--resources={{"{host}": 100}}'),
            ]
            with open(pathlib.Path(folder, f"{host}.log"), "wb") as log:
                nodes.append(
                    subprocess.Popen(
                        command,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                        preexec_fn=lambda host=host: enter(host),  # type: ignore[misc]
                    )
                )
            _until_started(nodes[-1], pathlib.Path(log.name))
        yield


def _until_started(node: subprocess.Popen[bytes], log: pathlib.Path) -> None:
    deadline = time.monotonic() + _START_S
    while "Ray runtime started" not in log.read_text(errors="replace"):
        if node.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"ray start failed:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.2)


def _end(nodes: list[subprocess.Popen[bytes]]) -> None:
    """End Ray's processes: those of our own process groups, and no others."""
    for node in reversed(nodes):
        node.terminate()
    for node in nodes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            node.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(node.pid, signal.SIGKILL)
        node.wait()
