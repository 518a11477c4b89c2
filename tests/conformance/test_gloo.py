"""gloo alone: two races that a drill found, made to happen every time, and what it leaves."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rayxfer import (
    ModuleSource,
    ParamMeta,
    TransferError,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.binding import Binding
from rayxfer.engines.broadcast import BroadcastInitInfo
from rayxfer.engines.gloo import GlooEngine, GlooGroup
from rayxfer.engines.rendezvous import Rendezvous, RendezvousStore
from rayxfer.session import WorkerSession
from rayxfer.testing import LocalController
from tests.fleet import Source
from tests.helpers import assert_same_bytes, poison

OWNER = {"name": "c", "controller_id": "id", "epoch": 1, "version": 0, "roster": [], "rank": 0}


class _Work:
    """A broadcast as torch shows it: completes while the first slice is ending."""

    def __init__(self, *, fails: bool) -> None:
        self.waits, self.fails = 0, fails

    def is_completed(self) -> bool:
        return self.waits > 0

    def wait(self, timeout: Any) -> None:
        self.waits += 1
        if self.waits == 1 or self.fails:
            raise RuntimeError("Timed out" if self.waits == 1 else "Connection closed by peer")


def _group() -> GlooGroup:
    group = GlooGroup.__new__(GlooGroup)
    group._aborted = threading.Event()
    return group


def test_a_broadcast_that_completes_as_its_slice_ends_has_not_lost_a_peer() -> None:
    work = _Work(fails=False)
    _group().wait(work)
    assert work.waits == 2


def test_a_broadcast_that_failed_has_lost_a_peer() -> None:
    work = _Work(fails=True)
    with pytest.raises(TransferError, match="lost a peer: Connection closed"):
        _group().wait(work)
    assert work.waits == 2


def test_after_an_abort_nothing_arrives_any_more() -> None:
    """Though the peer goes on sending: what was to land in a model must not land in its next version."""
    server = Rendezvous("127.0.0.1", "00" * 16)
    ends: dict[int, GlooGroup] = {}

    def join(rank: int) -> None:
        store = RendezvousStore(server if rank == 0 else server.address, "00" * 16, 30.0)
        ends[rank] = GlooGroup(store, rank, 2, "127.0.0.1", 30.0)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    places = [torch.zeros(32 << 20, dtype=torch.uint8) for _ in range(3)]
    works = [ends[1].start(place) for place in places]
    sent = torch.ones(32 << 20, dtype=torch.uint8)
    for _ in places:
        ends[0].start(sent)
    ends[1].wait(works[0])
    ends[1].abort()
    ends[1].settle()
    before = [int(place.sum()) for place in places]
    time.sleep(0.2)
    after = [int(place.sum()) for place in places]
    works.clear()
    for end in ends.values():
        end.abort()
        end.close()
    server.close()
    assert after == before
    assert before[0] == 32 << 20


class _Stuck(GlooEngine):
    """The first connect sits in the transport, deaf to abort, until `release`."""

    entered, release = threading.Event(), threading.Event()
    made: list[_Stuck] = []  # noqa: RUF012 - of the class on purpose
    opened: list[_Stuck] = []  # noqa: RUF012

    def init_transfer_engine(self, init_info: BroadcastInitInfo) -> None:
        self.made.append(self)
        if len(self.made) == 1:
            self.entered.set()
            assert self.release.wait(60)
        self.opened.append(self)

    def shutdown(self) -> None:
        if self in self.opened:
            self.opened.remove(self)
        super().shutdown()


def test_a_worker_stuck_in_a_connect_takes_the_next_one() -> None:
    """As gloo is when the peer that it is connecting to has died: for its own ten seconds."""
    session = WorkerSession(Binding(torch.nn.Linear(2, 2)))
    session.handle("attach", {"owner": OWNER})
    factory = WeightTransferEngineFactory
    factory.register_engine("stuck", _Stuck)

    def connect(session_id: str, wait_s: float) -> dict[str, Any]:
        message = {
            "controller_id": "id",
            "session_id": session_id,
            "entry": dataclasses.asdict(factory.entry("stuck")),
            "config": dataclasses.asdict(WeightTransferConfig(backend="stuck")),
            "init_info": {
                "master_address": "127.0.0.1",
                "master_port": 1,
                "rank_offset": 1,
                "world_size": 2,
                "token": "0" * 32,
                "bucket_size_bytes": 1024,
                "loopback": True,
                "timeout_s": 30.0,
                "device": "",
            },
            "parallel_config": {"rank": 0, "world_size": 1},
            "wait_s": wait_s,
        }
        return session.handle("connect", message)

    before = threading.enumerate()
    try:
        assert not connect("first", 0.1)["done"]
        assert _Stuck.entered.wait(30)
        answer = connect("second", 30.0)
        assert answer["done"], answer
        assert "error" not in answer, answer
        _, second = _Stuck.made
        assert session._engine is second
        assert _Stuck.opened == [second]
        (abandoned,) = [t for t in threading.enumerate() if t not in before]
    finally:
        _Stuck.release.set()
    abandoned.join(30)
    assert not abandoned.is_alive()
    assert session._engine is second, "the abandoned thread took the new engine with it"
    assert _Stuck.opened == [second], "what it opened at last is not closed, or the new one is"


def _staging_bytes() -> int:
    ends = [
        line.split()[0].split("-")
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "rayxfer-staging" in line
    ]
    return sum(int(end, 16) - int(start, 16) for start, end in ends)


def test_a_channel_has_two_buffers_at_each_end_and_gives_them_back() -> None:
    """Also where every bucket is larger than the one before it. In malloc's hands they stayed with the
    process, up to 200 MiB of them."""
    widths = range(1024, 16 * 1024, 1024)
    models = [torch.nn.ParameterList(torch.ones(n) for n in widths) for _ in range(3)]
    before = _staging_bytes()
    config = WeightTransferConfig(backend="gloo", bucket_size_bytes=1 << 16)
    with LocalController(models[1:], config) as controller:
        for _ in range(2):
            controller.sync_weights(models[0])
            assert before < _staging_bytes() <= before + 3 * 2 * config.bucket_size_bytes
    deadline = time.monotonic() + 30
    while _staging_bytes() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert _staging_bytes() == before


@pytest.mark.parametrize("casts", [False, True], ids=["one buffer for all", "casts"])
def test_long_tensors_that_do_not_stay(casts: bool) -> None:
    """From half a unit on, tensors go from where they lie; these lie there only until the next one."""
    widths = [1536 << 10, 100, 1280 << 10, 3 << 20, 1100 << 10, 1700 << 10, 5, 2 << 20]
    given = [torch.full((n,), float(i + 1), dtype=torch.float32) for i, n in enumerate(widths)]
    dtype = torch.uint8 if not casts else torch.bfloat16
    want = [tensor.to(dtype) for tensor in given]
    model = torch.nn.ParameterDict({f"w{i}": t for i, t in enumerate(given)})
    worker = torch.nn.Module()
    for i, tensor in enumerate(want):
        worker.register_buffer(f"w{i}", torch.full_like(tensor, 77))
    buffer = torch.empty(max(widths), dtype=torch.uint8)

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        for i, tensor in enumerate(want):
            here = buffer[: tensor.numel()]
            here.copy_(tensor)
            yield f"w{i}", here
            here.fill_(0xA5)

    metas = [ParamMeta(f"w{i}", t.dtype, tuple(t.shape)) for i, t in enumerate(want)]
    source = ModuleSource(model, dtype=dtype) if casts else Source(metas, pairs)
    with LocalController([worker], WeightTransferConfig(backend="gloo")) as controller:
        for _ in range(2):
            poison(worker)
            report = controller.sync_weights(source)
            assert report.workers[0].verified == "loaded"
            expected = {f"w{i}": tensor for i, tensor in enumerate(want)}
            assert_same_bytes(dict(worker.named_buffers()), expected)
