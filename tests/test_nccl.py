"""`nccl` over its double: order, lifetimes, aborts. Nothing here says anything about NCCL."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rayxfer
from rayxfer import (
    BackendUnavailable,
    ConfigError,
    TransferError,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.base import SessionPlan
from rayxfer.engines.broadcast import Member
from rayxfer.engines.nccl import NcclGroup
from rayxfer.engines.rendezvous import Rendezvous, RendezvousStore
from rayxfer.testing import (
    LocalController,
    assert_same_bytes,
    check_engine,
    double_nccl,
    doubles,
)
from rayxfer.testing.double_nccl import DoubleNccl, DoubleNCCLEngine
from rayxfer.topology import Facts, local_facts
from tests.helpers import poison


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[DoubleNccl]:
    """A fresh double; at the end every communicator that was joined must have been released."""
    monkeypatch.setattr(doubles, "_devices", {})
    made = DoubleNccl()
    monkeypatch.setattr(double_nccl, "double_nccl", made)
    WeightTransferEngineFactory.register_engine("nccl-double", DoubleNCCLEngine)
    try:
        yield made
        until = time.monotonic() + 10
        while made.aborted < made.joined and time.monotonic() < until:
            time.sleep(0.02)
        assert made.aborted == made.joined
    finally:
        del WeightTransferEngineFactory._direct["nccl-double"]


def net(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(24, 24) for _ in range(6)))


def test_the_double_conforms(library: DoubleNccl) -> None:
    assert not check_engine("nccl-double", workers=2).failed


def test_slow_broadcasts_do_not_mix_buckets(library: DoubleNccl) -> None:
    """The double reads the sender's buffer late: one that is used again too early shows."""
    library.delay_s = 0.02
    model, receivers = net(1), [net(8), net(9)]
    settings = WeightTransferConfig(backend="nccl-double", bucket_size_bytes=3000)
    with LocalController(receivers, settings) as controller:
        for _ in range(2):
            for receiver in receivers:
                poison(receiver)
            controller.sync_weights(model)
            for receiver in receivers:
                assert_same_bytes(model.state_dict(), receiver.state_dict())
        assert library.joined == 3


def test_each_broadcast_follows_what_the_current_stream_has_queued(library: DoubleNccl) -> None:
    """Packing before sending, reading before receiving anew; loading after arrival."""
    receiver = net(9)
    settings = WeightTransferConfig(backend="nccl-double", bucket_size_bytes=3000)
    with LocalController([receiver], settings) as controller:
        for _ in range(3):
            controller.sync_weights(net(1))
        log = list(library.device.log)
    # two lanes over all rounds; per broadcast one mark to wait for, one wait of the current stream
    assert log.count("lane") == 2
    assert log.count("broadcast") == log.count("follow") == log.count("mark") > 6
    assert log.count("lead") == log.count("broadcast")
    for count in range(len(log)):
        seen = log[: count + 1]
        assert seen.count("broadcast") <= seen.count("follow")
        assert seen.count("lead") <= seen.count("mark")


def members(library: DoubleNccl, count: int, present: int) -> list[Any]:
    """Groups of `present` out of `count` members, joined in threads; errors where they failed."""
    rendezvous = Rendezvous("127.0.0.1", "00" * 16)
    found: list[Any] = [None] * present

    def join(rank: int) -> None:
        target = rendezvous if rank == 0 else rendezvous.address
        store = RendezvousStore(target, "00" * 16, 5.0)
        member = Member(store, rank, count, "127.0.0.1", "", 5.0, flags[rank])
        try:
            found[rank] = NcclGroup(member, doubles.double_device(""), library)
        except Exception as error:
            found[rank] = error

    flags = [threading.Event() for _ in range(present)]
    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(present)]
    for thread in threads:
        thread.start()
    if present < count:
        time.sleep(0.2)
        for flag in flags:
            flag.set()
    for thread in threads:
        thread.join(10)
    rendezvous.close()
    return found


def test_an_abort_frees_who_waits_for_a_peer_that_does_not_come(library: DoubleNccl) -> None:
    start = time.monotonic()
    errors = members(library, count=3, present=2)
    assert all(isinstance(error, TransferError) for error in errors)
    assert time.monotonic() - start < 3


def test_an_abort_frees_who_is_stuck_in_a_broadcast(library: DoubleNccl) -> None:
    """The peer joined and then said nothing more, as one that was stopped."""
    sender, silent = members(library, count=2, present=2)
    buffer = torch.arange(64, dtype=torch.uint8)
    work = sender.start(buffer)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            sender.wait(work)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    assert thread.is_alive()
    start = time.monotonic()
    sender.abort()
    thread.join(2)
    assert not thread.is_alive()
    assert time.monotonic() - start < 1
    assert isinstance(errors[0], TransferError)
    with pytest.raises(TransferError, match="aborted"):
        sender.start(buffer)
    for group in (sender, silent):
        group.close()
        group.close()


def test_a_buffer_is_held_while_its_broadcast_runs(library: DoubleNccl) -> None:
    """Also by a group that was aborted: the allocator must not give the memory to others."""
    sender, silent = members(library, count=2, present=2)
    sender.start(torch.arange(64, dtype=torch.uint8))
    assert len(sender._held) == 1
    sender.abort()
    sender.close()
    silent.close()
    until = time.monotonic() + 5
    while sender._held and time.monotonic() < until:
        time.sleep(0.01)
    assert not sender._held


# --- fleets ---------------------------------------------------------------------------------


def plan(sender: str, *workers: str, num_ranks: int = 1) -> SessionPlan:
    def on(gpu: str, ranks: int = 1) -> Facts:
        return dataclasses.replace(local_facts(), device=gpu, num_ranks=ranks)

    receivers = tuple(on(gpu, num_ranks) for gpu in workers for _ in range(num_ranks))
    return SessionPlan("s", "00" * 16, WeightTransferConfig(), 1 << 20, on(sender), receivers, 5.0)


def test_one_gpu_twice_is_named() -> None:
    with pytest.raises(ConfigError, match="receiver 1 and the sender are on one GPU"):
        DoubleNCCLEngine.trainer_open(plan("cuda:a", "cuda:b", "cuda:a"))
    with pytest.raises(ConfigError, match="receiver 0 and the sender are on one GPU"):
        DoubleNCCLEngine.trainer_open(plan("cpu", "cuda:double-0"))  # it would pack there
    with pytest.raises(ConfigError, match="receiver 1 and receiver 0 are on one GPU"):
        DoubleNCCLEngine.trainer_open(plan("cuda:a", "cuda:b", "cuda:GPU-B"))


def test_each_receiver_is_told_its_gpu_and_its_rank() -> None:
    channel, infos = DoubleNCCLEngine.trainer_open(plan("cuda:a", "cuda:b", "cuda:c"))
    DoubleNCCLEngine.trainer_close(channel)
    assert [info["device"] for info in infos] == ["b", "c"]
    assert {info["rank_offset"] for info in infos} == {1}
    assert {info["world_size"] for info in infos} == {3}
    # of a worker with several ranks, each takes the GPU that its process has
    channel, infos = DoubleNCCLEngine.trainer_open(plan("cuda:a", "cuda:b", "cuda:c", num_ranks=2))
    DoubleNCCLEngine.trainer_close(channel)
    assert [info["device"] for info in infos] == [""] * 4
    assert infos[0]["world_size"] == 5


# --- without a GPU --------------------------------------------------------------------------

USES = """
    import json, sys, time
    from rayxfer import BackendUnavailable, WeightTransferConfig, WeightTransferEngineFactory
    from rayxfer.base import SessionPlan
    from rayxfer.testing import LocalController
    from rayxfer.topology import local_facts
    import torch

    cls = WeightTransferEngineFactory.get_engine_class("{name}")
    engine = cls(WeightTransferConfig(backend="{name}"), None)
    facts = local_facts()
    plan = SessionPlan("s", "00" * 16, WeightTransferConfig(), 1 << 20, facts, (facts,), 5.0)
    uses = [
        cls.check_available,
        lambda: engine.init_transfer_engine(None),
        lambda: engine.receive_weights(None, None),
        lambda: cls.trainer_open(plan),
        lambda: LocalController(
            [torch.nn.Linear(2, 2)], WeightTransferConfig(backend="{name}")
        ).sync_weights(torch.nn.Linear(2, 2)),
    ]
    for use in uses:
        start = time.monotonic()
        try:
            use()
        except BackendUnavailable as error:
            assert "CUDA" in str(error) and "{name}" in str(error), error
        else:
            raise SystemExit("no error")
        assert time.monotonic() - start < 1, (use, time.monotonic() - start)
    engine.shutdown()
    engine.shutdown()
    bad = [m for m in sys.modules if m in ("rayxfer.engines.cuda", "rayxfer.engines.nccl_library")]
    print(json.dumps(bad))
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_without_a_gpu_every_use_says_so_at_once(name: str) -> None:
    from textwrap import dedent

    done = subprocess.run(
        [sys.executable, "-c", dedent(USES).replace("{name}", name)],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    with pytest.raises(BackendUnavailable, match="CUDA"):
        WeightTransferEngineFactory.get_engine_class(name).check_available()


def test_code_for_cuda_is_imported_inside_functions_only() -> None:
    """By whoever runs on a GPU, when it does."""
    root = Path(rayxfer.__file__).parent
    guarded = {"rayxfer.engines.cuda", "rayxfer.engines.nccl_library", "pynvml"}
    for path in root.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module)]
            assert not guarded & set(names), f"{path.name} imports {names} when it is loaded"
