"""Peers over torch's gloo: a broadcast per tensor, and Ray Direct Transport."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist

from benchmarks.contenders import Contender, Spec, Stage
from benchmarks.peers import PeerSender, PeerWorker, peer_sender, peer_workers

WINDOW = 8
"""Broadcasts in flight. With 1 it is slower by a few per cent; more gain nothing."""

_TIMEOUT = timedelta(seconds=60)


def _ranks(stage: Stage, spec: Spec) -> list[Any]:
    """The sender and the workers of `spec`, in no process group or in that of just these. A group of
    contenders has one number of workers; what an earlier one left is ended here."""
    ranks = [peer_sender(stage, spec.way), *peer_workers(stage, spec.workers)]
    if stage.peers.get("in a process group") not in (None, ranks):
        everyone = [ranks[0], *stage.peers["workers"]]
        ray.get([actor.call.remote(_leave) for actor in everyone], timeout=_TIMEOUT.total_seconds())
    stage.peers["in a process group"] = ranks
    return ranks


def _leave(_actor: Any) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(actor: Any, address: str, rank: int, size: int) -> None:
    """Become `rank` of `size` in the process group of the peers' actors."""
    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=size, timeout=_TIMEOUT
        )
    actor.kept["gloo"] = dist.new_group(backend="gloo", timeout=_TIMEOUT)


def _broadcast(actor: PeerSender | PeerWorker) -> None:
    """Rank 0 sends each tensor, the others receive straight into their parameters."""
    if isinstance(actor, PeerSender):
        tensors = list(actor.weights.values())
    else:
        tensors = [parameter.detach() for parameter in actor.model.parameters()]
    works: list[Any] = []
    for tensor in tensors:
        if len(works) >= WINDOW:
            works.pop(0).wait()
        works.append(dist.broadcast(tensor, src=0, group=actor.kept["gloo"], async_op=True))
    for work in works:
        work.wait()


class GlooBroadcast(Contender):
    """`torch.distributed.broadcast` of every parameter, straight into the workers' parameters: what
    many RL frameworks do after each step, with NCCL where there are GPUs.

    Documentation: docs.pytorch.org, torch 2.13, "Distributed communication package":
    `init_process_group("gloo")`, `broadcast(tensor, src, async_op=True)`. Best setting: no
    receiving buffer, and WINDOW broadcasts in flight.
    """

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        self.sender, *self.workers = ranks = _ranks(stage, spec)
        address: str = ray.get(self.sender.call.remote(_free_address))
        joins = [a.call.remote(_join, address, i, len(ranks)) for i, a in enumerate(ranks)]
        ray.get(joins, timeout=2 * _TIMEOUT.total_seconds())

    def run(self) -> float:
        start = time.perf_counter()
        ray.get([actor.call.remote(_broadcast) for actor in (self.sender, *self.workers)])
        return time.perf_counter() - start


def _free_address(_actor: Any) -> str:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class RayDirectGloo(Contender):
    """Ray Direct Transport: an actor method returns tensors, another takes them as its argument, and
    the bytes go over gloo, not through the object store.

    Documentation: docs.ray.io, Ray 2.60, "Ray Direct Transport" (alpha):
    `@ray.method(tensor_transport="gloo")` on the sender, `enable_tensor_transport=True` on
    receivers, `create_collective_group([...], backend="gloo")`. Best setting: all tensors in
    one list, warm. Gloo is a two-sided transport, for which Ray refuses `ray.get` and with it
    `set_target_for_ref`, so workers copy from what they are handed into their parameters.
    """

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        from ray.experimental.collective import create_collective_group

        self.sender, *self.workers = ranks = _ranks(stage, spec)
        self._group = create_collective_group(ranks, backend="gloo")

    def run(self) -> float:
        start = time.perf_counter()
        ref = self.sender.tensors.remote()
        ray.get([worker.take_tensors.remote(ref) for worker in self.workers])
        return time.perf_counter() - start

    def close(self) -> None:
        from ray.experimental.collective import destroy_collective_group

        destroy_collective_group(self._group)
