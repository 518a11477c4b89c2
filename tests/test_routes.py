"""Who gets the bytes from whom: each host once."""

from __future__ import annotations

import dataclasses

import pytest

from rayxfer.engines.routes import Route, hosts_of, plan_routes
from rayxfer.topology import Facts

SENDER = Facts(1, "boot", "node-0", "10.0.0.1", 1, 0, pid_namespace="pid:[0]")


def on(host: str, **more: object) -> Facts:
    there = dataclasses.replace(SENDER, boot_id=f"boot-{host}", hostname=host)
    return dataclasses.replace(there, **more)  # type: ignore[arg-type]


def crossings(workers: list[Facts]) -> dict[str, int]:
    """How often the bytes come to each host from another one."""
    first, routes = plan_routes(SENDER, workers)
    hostname = {0: SENDER.hostname} | {i: w.hostname for i, w in enumerate(workers, 1)}
    steps = [
        (0, first),
        *((i, route.next) for i, route in enumerate(routes, 1) if not route.leader),
    ]
    counts = dict.fromkeys(hostname.values(), 0)
    for here, there in steps:
        if there and hostname[here] != hostname[there]:
            counts[hostname[there]] += 1
    reached = {there for _, there in steps} | {i for i, r in enumerate(routes, 1) if r.leader}
    assert reached - {0} == set(range(1, len(workers) + 1)), "somebody gets nothing"
    return counts


def test_nobody_is_nowhere() -> None:
    assert plan_routes(SENDER, []) == (0, [])


def test_one_worker_needs_no_ring() -> None:
    assert plan_routes(SENDER, [on("a")]) == (1, [Route()])


def test_the_first_of_a_host_leads_and_leaders_stand_in_line() -> None:
    first, routes = plan_routes(SENDER, [on("a"), on("b"), on("a"), on("b"), on("a")])
    assert first == 1
    assert routes == [
        Route(next=2, followers=(3, 5)),
        Route(next=0, followers=(4,)),
        Route(next=2, leader=1),
        Route(next=0, leader=2),
        Route(next=2, leader=1),
    ]


def test_the_senders_own_host_comes_first() -> None:
    near = dataclasses.replace(SENDER, pid=7)
    assert hosts_of(SENDER, [on("a"), near, on("b"), near]) == [[2, 4], [1], [3]]
    assert crossings([on("a"), near, on("b"), near]) == {"node-0": 0, "a": 1, "b": 1}


@pytest.mark.parametrize(
    "other",
    [{"pid_namespace": "pid:[1]"}, {"uid": 5}, {"hostname": "container"}, {"boot_id": "x"}],
    ids=lambda d: next(iter(d)),
)
def test_who_cannot_open_the_others_files_is_no_follower(other: dict[str, object]) -> None:
    _, routes = plan_routes(SENDER, [on("a"), on("a", **other)])
    assert routes == [Route(next=2), Route()]


def test_workers_of_several_ranks_stand_in_line_beside_the_leader_of_their_host() -> None:
    """Their facts tell of one process, not of those that receive."""
    several = on("a", num_ranks=2)
    workers = [several, several, on("b"), on("a"), on("a"), on("b")]
    first, routes = plan_routes(SENDER, workers)
    assert first == 4
    assert routes[3] == Route(next=1, followers=(5,))
    assert routes[0] == Route(next=2)
    assert routes[1] == Route(next=3)
    assert routes[2] == Route(followers=(6,))
    assert crossings(workers) == {"node-0": 0, "a": 1, "b": 1}


@pytest.mark.parametrize("per_host", [1, 2, 5])
@pytest.mark.parametrize("hosts", [1, 2, 7])
def test_each_host_is_crossed_once(hosts: int, per_host: int) -> None:
    workers = [on(f"h{i % hosts}") for i in range(hosts * per_host)]
    assert crossings(workers) == {"node-0": 0} | {f"h{i}": 1 for i in range(hosts)}
