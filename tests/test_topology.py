from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rayxfer import ConfigError
from rayxfer.topology import (
    NCCL_SETTINGS,
    PROTOCOL_VERSION,
    Choice,
    Facts,
    check_agreement,
    check_protocol,
    choose_backend,
    device_name,
    local_facts,
    process_gone,
    rank_offsets,
    routable_address,
    same_host,
    start_time,
    transport_rank,
)

HERE = Facts(
    protocol=PROTOCOL_VERSION,
    boot_id="boot-1",
    hostname="node-1",
    address="10.0.0.1",
    pid=100,
    uid=1000,
    torch_version="2.13.0",
    nccl_settings=(("NCCL_NET", "Socket"), ("NCCL_PROTO", "Simple")),
)


def facts(**changes: Any) -> Facts:
    return dataclasses.replace(HERE, **changes)


# --- auto -----------------------------------------------------------------------------------

GPU_A, GPU_B = "cuda:GPU-aaaa", "cuda:GPU-bbbb"
OTHER = {"boot_id": "boot-2", "hostname": "node-2"}

RULES: dict[str, tuple[dict[str, Any], dict[str, Any], str | None, str, str]] = {
    "one host": (
        {},
        {"pid": 7},
        None,
        "shm",
        "same host as the sender (node-1), weights on the CPU",
    ),
    "one process": ({}, {}, None, "shm", "same host as the sender (node-1), weights on the CPU"),
    "refused": (
        {},
        {},
        "no such process",
        "gloo",
        "same host, but shared memory was refused: no such process",
    ),
    "two hosts": ({}, OTHER, None, "gloo", "sender on host node-1, worker on node-2"),
    "two hosts, refused": ({}, OTHER, "x", "gloo", "sender on host node-1, worker on node-2"),
    "clones of one image": (
        {},
        {"boot_id": "boot-2"},
        None,
        "gloo",
        "sender on host node-1, worker on node-1",
    ),
    "two containers": (
        {},
        {"hostname": "pod-2"},
        None,
        "gloo",
        "sender on host node-1, worker on pod-2",
    ),
    "two users": ({}, {"uid": 0}, None, "gloo", "sender on host node-1, worker on node-1"),
    "one GPU": (
        {"device": GPU_A},
        {"device": GPU_A},
        None,
        "ipc",
        "same GPU as the sender (cuda:GPU-aaaa)",
    ),
    "two GPUs": (
        {"device": GPU_A},
        {"device": GPU_B},
        None,
        "nccl",
        "sender on cuda:GPU-aaaa, worker on cuda:GPU-bbbb",
    ),
    "two GPUs on two hosts": (
        {"device": GPU_A},
        {"device": GPU_B, **OTHER},
        None,
        "nccl",
        "sender on cuda:GPU-aaaa, worker on cuda:GPU-bbbb",
    ),
    "GPU to CPU, one host": (
        {"device": GPU_A},
        {},
        None,
        "shm",
        "same host as the sender (node-1), weights on the CPU",
    ),
    "GPU to CPU, two hosts": (
        {"device": GPU_A},
        OTHER,
        None,
        "gloo",
        "sender on host node-1, worker on node-2",
    ),
    "CPU to GPU, one host": (
        {},
        {"device": GPU_A},
        None,
        "gloo",
        "sender on host node-1, worker on node-1",
    ),
}


@pytest.mark.parametrize(
    ("sender", "worker", "refused", "backend", "reason"), RULES.values(), ids=RULES
)
def test_auto(
    sender: dict[str, Any],
    worker: dict[str, Any],
    refused: str | None,
    backend: str,
    reason: str,
) -> None:
    found = choose_backend(facts(**sender), facts(**worker), shm_refused=refused)
    assert found == Choice(backend, reason)


def test_auto_never_depends_on_ids_that_recycle() -> None:
    """pids, addresses, ranks and versions do not decide."""
    for pid, address, ranks in itertools.product((1, 2), ("10.0.0.1", "::1"), (1, 4)):
        worker = facts(pid=pid, address=address, num_ranks=ranks, torch_version="2.6.0")
        assert choose_backend(HERE, worker).backend == "shm"


def test_one_host_is_one_kernel_one_name_and_one_user() -> None:
    assert same_host(HERE, facts(pid=1, device=GPU_A, address="127.0.0.1"))
    for change in ({"boot_id": "b"}, {"hostname": "h"}, {"uid": 1}):
        assert not same_host(HERE, facts(**change))
        assert not same_host(facts(**change), HERE)


# --- facts ----------------------------------------------------------------------------------


def test_facts_travel_as_plain_data() -> None:
    wire = HERE.to_wire()
    assert Facts.from_wire(wire) == HERE
    assert Facts.from_wire(json.loads(json.dumps(wire))) == HERE
    assert HERE.nccl_settings
    assert Facts.from_wire({**wire, "from_a_later_version": 3}) == HERE
    optional = ("device", "num_ranks", "torch_version", "nccl_settings")
    assert Facts.from_wire(
        {k: v for k, v in wire.items() if k not in optional}
    ) == dataclasses.replace(HERE, torch_version="", nccl_settings=())


@pytest.mark.parametrize("field", ["protocol", "boot_id", "hostname", "address", "pid", "uid"])
def test_facts_that_lack_a_field_are_refused_by_name(field: str) -> None:
    wire = HERE.to_wire()
    del wire[field]
    with pytest.raises(ConfigError, match=f"the worker's facts lack '{field}'"):
        Facts.from_wire(wire)


def test_local_facts() -> None:
    found = local_facts()
    assert (found.protocol, found.pid, found.uid) == (PROTOCOL_VERSION, os.getpid(), os.getuid())
    assert found.hostname == socket.gethostname()
    assert (found.device, found.num_ranks) == ("cpu", 1)
    assert torch.__version__.startswith(found.torch_version)
    assert "+" not in found.torch_version
    assert local_facts(torch.device("cpu"), num_ranks=4).num_ranks == 4
    assert local_facts() == found


def test_local_facts_hold_the_settings_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NCCL_SETTINGS:
        monkeypatch.delenv(name, raising=False)
    assert local_facts().nccl_settings == ()
    monkeypatch.setenv("NCCL_NET", "IB")
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "0")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")  # each process's own business
    assert local_facts().nccl_settings == (("NCCL_CUMEM_ENABLE", "0"), ("NCCL_NET", "IB"))


def test_a_host_is_known_by_its_kernel() -> None:
    """Equal in every process and container of one machine."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        assert local_facts().boot_id == file.read().strip()


@pytest.mark.gpu
def test_a_gpu_is_named_by_its_uuid() -> None:
    name = device_name(torch.device("cuda", 0))
    assert name == f"cuda:{torch.cuda.get_device_properties(0).uuid}"


def test_other_devices_are_named_by_their_type() -> None:
    assert device_name(torch.device("cpu")) == "cpu"
    assert device_name(torch.device("meta")) == "meta"


# --- is it gone? ----------------------------------------------------------------------------


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "600"]) as one:
        yield one
        one.kill()


def facts_of(pid: int) -> Facts:
    return dataclasses.replace(local_facts(), pid=pid, started=start_time(pid))


def test_a_living_process_is_not_gone(process: subprocess.Popen[bytes]) -> None:
    assert not process_gone(local_facts())
    assert not process_gone(facts_of(process.pid))
    os.kill(process.pid, signal.SIGSTOP)
    assert not process_gone(facts_of(process.pid))


def test_a_killed_process_is_gone_at_once(process: subprocess.Popen[bytes]) -> None:
    found = facts_of(process.pid)
    assert found.started
    os.kill(process.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while not process_gone(found):  # also before its parent has fetched its exit status
        assert time.monotonic() < end
    assert process.wait() == -signal.SIGKILL
    assert process_gone(found)


def test_a_pid_that_is_used_again_is_another_process(process: subprocess.Popen[bytes]) -> None:
    found = facts_of(process.pid)
    assert process_gone(dataclasses.replace(found, started=str(int(found.started) - 1)))


@pytest.mark.parametrize(
    "change",
    [
        {"boot_id": "another-machine"},
        {"pid_namespace": "pid:[1]"},
        {"pid_namespace": ""},
        {"started": ""},
        {"uid": 12345},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_cannot_be_seen_from_here_is_not_called_gone(change: dict[str, Any]) -> None:
    found = dataclasses.replace(local_facts(), pid=2**22 + 1)
    assert process_gone(found)
    assert not process_gone(dataclasses.replace(found, **change))


def test_trouble_of_our_own_is_not_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    found = local_facts()

    def no_descriptors(*args: object, **kwargs: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("builtins.open", no_descriptors)
    gone = process_gone(found)
    monkeypatch.undo()
    assert not gone


# --- address --------------------------------------------------------------------------------


def test_the_hostname_is_never_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"looked up {args}")

    for name in ("gethostbyname", "gethostbyname_ex", "getaddrinfo", "getfqdn"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    address = routable_address()
    assert socket.inet_aton(address)
    assert address != "127.0.1.1"


def test_ray_s_address_is_taken_where_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeRay:
        running = True

        @classmethod
        def is_initialized(cls) -> bool:
            return cls.running

        class util:
            @staticmethod
            def get_node_ip_address() -> str:
                return "10.9.8.7"

    monkeypatch.setitem(sys.modules, "ray", FakeRay)  # type: ignore[arg-type]
    assert routable_address() == "10.9.8.7"
    FakeRay.running = False
    assert routable_address() != "10.9.8.7"


def test_without_a_route_it_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_route(self: socket.socket, address: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr(socket.socket, "connect", no_route)
    assert routable_address() == "127.0.0.1"


# --- protocol and ranks ---------------------------------------------------------------------


def test_protocols_must_agree() -> None:
    check_protocol(HERE, facts(pid=1), 0)
    with pytest.raises(ConfigError, match="worker 3 speaks rayxfer protocol 9, this sender 1"):
        check_protocol(HERE, facts(protocol=9), 3)


def test_settings_of_nccl_must_agree_where_it_is_used() -> None:
    ours = facts(device=GPU_A)
    same = facts(device=GPU_B)
    other = facts(device=GPU_B, nccl_settings=(("NCCL_NET", "IB"), ("NCCL_PROTO", "Simple")))
    unset = facts(device=GPU_B, nccl_settings=(("NCCL_NET", "Socket"),))
    more = facts(device=GPU_B, nccl_settings=(*HERE.nccl_settings, ("NCCL_CUMEM_ENABLE", "1")))
    for backend in ("nccl", "auto", "gloo"):
        check_agreement(ours, same, 0, backend)
    for worker, message in (
        (other, "NCCL_NET is 'IB' on worker 2 and 'Socket' on the sender"),
        (unset, "NCCL_PROTO is 'unset' on worker 2 and 'Simple' on the sender"),
        (more, "NCCL_CUMEM_ENABLE is '1' on worker 2 and 'unset' on the sender"),
    ):
        for backend in ("nccl", "auto"):
            with pytest.raises(ConfigError, match=message):
                check_agreement(ours, worker, 2, backend)
        for backend in ("gloo", "shm", "ipc"):
            check_agreement(ours, worker, 2, backend)
        check_agreement(ours, dataclasses.replace(worker, device="cpu"), 2, "auto")
    with pytest.raises(ConfigError, match="worker 3 speaks rayxfer protocol 9"):
        check_agreement(HERE, facts(protocol=9), 3, "gloo")


def test_rank_offsets_of_every_small_deployment() -> None:
    """(engines, TP, PP, DP) in {1, 2, 3}: ranks are exactly 0 … N-1, each once."""
    for engines, tp, pp, dp in itertools.product((1, 2, 3), repeat=4):
        counts = [tp * pp * dp] * engines
        offsets = rank_offsets(counts)
        ranks = [
            offset + i for offset, count in zip(offsets, counts, strict=True) for i in range(count)
        ]
        assert ranks == list(range(engines * tp * pp * dp))


def test_rank_offsets_of_every_small_mixture() -> None:
    for length in range(6):
        for counts in itertools.product((1, 2, 3, 4), repeat=length):
            offsets = rank_offsets(list(counts))
            ranks = [o + i for o, count in zip(offsets, counts, strict=True) for i in range(count)]
            assert ranks == list(range(sum(counts)))


@pytest.mark.parametrize("counts", [[0], [1, -1], [2, 0, 2]])
def test_a_worker_without_ranks_is_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="a worker has at least one transport rank"):
        rank_offsets(counts)


def test_every_worker_of_every_vllm_deployment_has_a_rank_of_its_own() -> None:
    """engines × DP × PP × TP, each in {1, 2, 3}: together exactly 0 … N-1, replicas and stages in order."""
    for engines, dp, pp, tp in itertools.product((1, 2, 3), repeat=4):
        world_size = pp * tp
        offsets = rank_offsets([dp * world_size] * engines)
        ranks = [
            transport_rank(offset, replica, world_size, stage * tp + shard)
            for offset in offsets
            for replica in range(dp)
            for stage in range(pp)
            for shard in range(tp)
        ]
        assert ranks == list(range(engines * dp * pp * tp))


def test_deployments_of_different_sizes_do_not_overlap() -> None:
    shapes = list(itertools.product((1, 2), repeat=3))  # (dp, pp, tp)
    for trio in itertools.product(shapes, repeat=3):
        offsets = rank_offsets([dp * pp * tp for dp, pp, tp in trio])
        ranks = [
            transport_rank(offset, replica, pp * tp, rank)
            for offset, (dp, pp, tp) in zip(offsets, trio, strict=True)
            for replica in range(dp)
            for rank in range(pp * tp)
        ]
        assert ranks == list(range(len(ranks)))


@pytest.mark.parametrize("place", [(-1, 0, 1, 0), (0, -1, 1, 0), (0, 0, 2, 2), (0, 0, 2, -1)])
def test_a_place_that_a_deployment_does_not_have(place: tuple[int, int, int, int]) -> None:
    with pytest.raises(ConfigError, match="no such place"):
        transport_rank(*place)
