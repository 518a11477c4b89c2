"""The way of the bytes through the workers of one channel: one crossing per host. Pure.

The workers stand in a line that starts at the sender, those of one host next to each other, so every
link carries the bytes once however many workers and hosts there are. On each host the first worker
leads: it keeps what arrives in a memory file, which the others of that host read; they are no part
of the line.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rayxfer.topology import Facts, same_host

__all__ = ["Route", "hosts_of", "plan_routes"]


@dataclass(frozen=True)
class Route:
    """One worker's place. Workers are numbered by transport rank, from 1; the sender is 0.

    Attributes:
        next: the worker that gets the bytes from this one over the wire; 0: none. Of a follower: from
            its leader.
        leader: the worker whose memory file it reads; 0: it is in the line itself.
        followers: the workers that read this one's memory file.
    """

    next: int = 0
    leader: int = 0
    followers: tuple[int, ...] = ()


def hosts_of(sender: Facts, workers: Sequence[Facts]) -> list[list[int]]:
    """Transport ranks by host, that of the sender first: from there nothing has to come back.

    Processes in different PID namespaces count as on different hosts: they cannot open each other's
    files.
    """
    hosts: list[list[int]] = []
    for rank, worker in enumerate(workers, 1):
        for host in hosts:
            if _near(workers[host[0] - 1], worker):
                host.append(rank)
                break
        else:
            hosts.append([rank])
    return sorted(hosts, key=lambda host: not same_host(sender, workers[host[0] - 1]))


def _near(a: Facts, b: Facts) -> bool:
    return same_host(a, b) and a.pid_namespace == b.pid_namespace


def plan_routes(sender: Facts, workers: Sequence[Facts]) -> tuple[int, list[Route]]:
    """The first of the line, and a route per worker, in the order of their transport ranks.

    The ranks of a worker that has several are processes that its facts do not describe: they neither
    lead nor follow.
    """
    line: list[int] = []
    followers: dict[int, tuple[int, ...]] = {}
    for host in hosts_of(sender, workers):
        alike = [rank for rank in host if workers[rank - 1].num_ranks == 1]
        if alike:
            followers[alike[0]] = tuple(alike[1:])
            host = [alike[0], *(rank for rank in host if rank not in alike)]
        line += host
    after = dict(itertools.pairwise([*line, 0]))
    leaders = {one: leader for leader, group in followers.items() for one in group}
    routes = []
    for rank in range(1, len(workers) + 1):
        leader = leaders.get(rank, 0)
        routes.append(Route(after[leader or rank], leader, followers.get(rank, ())))
    return line[0] if line else 0, routes
