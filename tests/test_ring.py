"""The ring between real processes: what arrives, who is waited for, and what is left behind."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import multiprocessing
import os
import resource
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from rayxfer import WeightTransferConfig
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.errors import BackendUnavailable, ConfigError, TransferError
from rayxfer.testing import LocalController

NONCE = "0123456789abcdef" * 2
SLOT = 4096
SOON_S = 30.0
"""Far more than anything here takes, also on a busy machine."""

WAKE_S = 1.0


# --- other processes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes() -> Iterator[Any]:
    """Forks of a server that has imported torch already, so that one starts in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rayxfer.engines.ring"])
    yield context
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


class Child:
    """A process at the other end of a pipe."""

    def __init__(self, context: Any, target: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def hear(self) -> Any:
        assert self.pipe.poll(SOON_S), "no answer"
        return self.pipe.recv()

    def kill(self) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SOON_S)
        assert self.process.exitcode == -signal.SIGKILL

    def end(self) -> None:
        self.pipe.close()
        self.process.join(SOON_S)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join(SOON_S)


@pytest.fixture
def child(processes: Any) -> Iterator[Callable[..., Child]]:
    made: list[Child] = []

    def make(target: Callable[..., None], *args: Any) -> Child:
        made.append(Child(processes, target, *args))
        return made[-1]

    yield make
    for one in made:
        one.end()


def read_all(pipe: Connection, description: dict[str, Any], reader: int, pause_s: float) -> None:
    """Read frames until one begins with zero; answer with the hash of all that was read."""
    ring = RingReader(reader=reader, **description)
    pipe.send("open")
    found = hashlib.sha256()
    count = 0
    while True:
        slot = ring.slot()
        if int(slot[0]) == 0:
            ring.release()
            break
        time.sleep(pause_s)
        found.update(slot.numpy().tobytes())
        count += 1
        ring.release()
    pipe.send((count, found.hexdigest()))


def read_some(pipe: Connection, description: dict[str, Any], reader: int, count: int) -> None:
    """Read `count` frames, then hold still for ever."""
    ring = RingReader(reader=reader, **description)
    for _ in range(count):
        ring.slot()
        ring.release()
    pipe.send(count)
    pipe.recv()


def wait_for_a_frame(pipe: Connection, description: dict[str, Any]) -> None:
    """Wait where nothing comes, until told to abort; answer how long that took."""
    ring = RingReader(reader=0, **description)
    times: list[float] = []

    def abort() -> None:
        pipe.recv()
        times.append(time.monotonic())
        ring.abort()

    thread = threading.Thread(target=abort)
    thread.start()
    pipe.send("waiting")
    try:
        ring.slot()
    except TransferError as error:
        pipe.send((str(error), time.monotonic() - times[0]))
    thread.join()


def write_and_hold(pipe: Connection, frames: int) -> None:
    """A sender that publishes and is then killed."""
    ring = RingWriter(slot_bytes=SLOT, slots=2, readers=1, nonce=NONCE)
    for number in range(frames):
        ring.slot().fill_(number + 1)
        ring.publish()
    pipe.send(ring.describe())
    pipe.recv()


def no_room(pipe: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    before = len(os.listdir("/proc/self/fd"))
    try:
        RingWriter(slot_bytes=1 << 20, slots=2, readers=1, nonce=NONCE)
    except TransferError as error:
        pipe.send((error.phase, str(error), len(os.listdir("/proc/self/fd")) - before))


def open_and_say(pipe: Connection, description: dict[str, Any]) -> None:
    try:
        RingReader(reader=0, **description)
    except Exception as error:
        pipe.send((type(error).__name__, str(error)))
    else:
        pipe.send(None)


# --- helpers --------------------------------------------------------------------------------


@contextlib.contextmanager
def writer(readers: int = 1, slots: int = 2, slot_bytes: int = SLOT) -> Iterator[RingWriter]:
    ring = RingWriter(slot_bytes=slot_bytes, slots=slots, readers=readers, nonce=NONCE)
    try:
        yield ring
    finally:
        ring.close()


def frame(number: int, num_bytes: int = SLOT) -> torch.Tensor:
    """Bytes that no other frame has; the first is never zero."""
    found = torch.arange(num_bytes).mul_(number + 3).add_(number * 7).to(torch.uint8)
    found[0] = number % 255 + 1
    return found


def _wait(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SOON_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def mappings() -> int:
    """Memory files of rings that this process maps."""
    with open("/proc/self/maps") as file:
        return sum("rayxfer-ring" in line for line in file)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    gc.collect()  # what the modules before this one left to it
    before = (shared_memory(), mappings())
    yield
    if (shared_memory(), mappings()) != before:
        gc.collect()  # an exception that a test caught may hold the frame of a ring
    assert (shared_memory(), mappings()) == before


# --- what arrives ---------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_readers_in_other_processes_get_every_frame(
    child: Callable[..., Child], slots: int
) -> None:
    """A fast one and a slow one: nothing is overwritten before both are done."""
    count = 60
    with writer(readers=2, slots=slots) as ring:
        description = ring.describe()
        children = [child(read_all, description, 0, 0.0), child(read_all, description, 1, 0.002)]
        assert [one.hear() for one in children] == ["open", "open"]
        expected = hashlib.sha256()
        for number in range(count):
            data = frame(number)
            expected.update(data.numpy().tobytes())
            ring.slot().copy_(data)
            ring.publish()
        ring.slot()[0] = 0
        ring.publish()
        ring.drain()
        assert [one.hear() for one in children] == [(count, expected.hexdigest())] * 2
        assert ring.lagging is None


def test_a_reader_that_opens_late_gets_what_waits(child: Callable[..., Child]) -> None:
    with writer() as ring:
        ring.slot().copy_(frame(1))
        ring.publish()
        ring.slot()[0] = 0
        ring.publish()
        one = child(read_all, ring.describe(), 0, 0.0)
        ring.drain()
        assert one.hear() == "open"
        assert one.hear() == (1, hashlib.sha256(frame(1).numpy().tobytes()).hexdigest())


def test_the_writer_keeps_beside_the_reader_that_is_furthest() -> None:
    with writer(readers=2) as ring:
        readers = [RingReader(reader=i, **ring.describe()) for i in range(2)]
        ring.slot()
        ring.publish()
        came: list[int] = []

        def follow() -> None:
            for need in (0, 10, 20, 1000):
                ring.beside(need)
                came.append(need)

        thread = threading.Thread(target=follow)
        thread.start()
        for reader, num_bytes, expected in (
            (0, 9, [0]),
            (1, 10, [0, 10]),
            (0, 10, [0, 10]),
            (0, 1, [0, 10, 20]),
        ):
            readers[reader].copied(num_bytes)
            _wait(lambda expected=expected: came == expected)  # type: ignore[misc]
            time.sleep(0.02)
            assert came == expected
        assert ring.copied() == 20
        assert ring.lagging is not None
        readers[1].slot()
        readers[1].release()  # of the only frame: nothing more is to be expected
        thread.join(SOON_S)
        assert came == [0, 10, 20, 1000]
        assert ring.lagging is None


@pytest.mark.parametrize("how", ["abort", "leave"])
def test_nobody_stays_beside_a_reader_that_comes_no_further(how: str) -> None:
    with writer() as ring:
        reader = RingReader(reader=0, **ring.describe())
        ring.slot()
        ring.publish()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ring.beside, 1)
            time.sleep(0.05)
            assert not waiting.done()
            if how == "leave":
                reader.leave()
                waiting.result(WAKE_S)
            else:
                ring.abort()
                with pytest.raises(TransferError, match="aborted"):
                    waiting.result(WAKE_S)


def test_threads_of_a_reader_count_together() -> None:
    with writer() as ring:
        reader = RingReader(reader=0, **ring.describe())
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: [reader.copied(3) for _ in range(2000)], range(4)))
        assert ring.copied() == 4 * 2000 * 3


def test_counters_pass_32_bits() -> None:
    with writer() as ring:
        reader = RingReader(reader=0, **ring.describe())
        start = (1 << 32) - 3
        ring._head = reader._tail = start
        ring._memory.write(128, start)
        ring._memory.write(192, start)
        for number in range(8):
            ring.slot().copy_(frame(number))
            ring.publish()
            assert torch.equal(reader.slot(), frame(number))
            reader.release()
        ring.drain()


def test_slots_are_views_of_the_shared_memory() -> None:
    with writer(slot_bytes=SLOT + 64) as ring:
        reader = RingReader(reader=0, **ring.describe())
        slot = ring.slot()
        assert (slot.dtype, slot.shape) == (torch.uint8, (SLOT + 64,))
        assert slot.data_ptr() % 64 == 0
        ring.publish()
        found = reader.slot()
        slot[7] = 77
        assert int(found[7]) == 77
        assert reader.slot_bytes == SLOT + 64


def test_a_writer_waits_for_its_slowest_reader() -> None:
    with writer(readers=2) as ring, ThreadPoolExecutor(1) as pool:
        readers = [RingReader(reader=i, **ring.describe()) for i in range(2)]
        for number in range(2):
            ring.slot().fill_(number)
            ring.publish()
        readers[0].slot()
        readers[0].release()
        third = pool.submit(ring.slot)
        time.sleep(0.1)
        assert not third.done()
        assert ring.lagging == 1
        assert int(readers[1].slot()[0]) == 0
        readers[1].release()
        third.result(SOON_S)
        assert ring.lagging is None


# --- deaths and aborts ----------------------------------------------------------------------


def test_a_killed_reader_holds_the_writer_up_until_abort(child: Callable[..., Child]) -> None:
    with writer(readers=2) as ring, ThreadPoolExecutor(1) as pool:
        dead = child(read_some, ring.describe(), 1, 1)
        live = RingReader(reader=0, **ring.describe())
        for number in range(2):
            ring.slot().copy_(frame(number))
            ring.publish()
        assert dead.hear() == 1
        dead.kill()
        for number in range(2):  # what was published stays there for the others
            assert torch.equal(live.slot(), frame(number))
            live.release()
        ring.slot().copy_(frame(2))  # in the room that the first frame left
        ring.publish()
        blocked = pool.submit(ring.slot)
        time.sleep(0.2)
        assert not blocked.done()
        assert ring.lagging == 1
        start = time.monotonic()
        ring.abort()
        error = blocked.exception(SOON_S)
        assert time.monotonic() - start < WAKE_S
        assert isinstance(error, TransferError)
        assert error.phase == "update"
        assert "aborted" in str(error)


def test_abort_wakes_a_reader_in_another_process(child: Callable[..., Child]) -> None:
    with writer() as ring:
        one = child(wait_for_a_frame, ring.describe())
        assert one.hear() == "waiting"
        time.sleep(0.2)
        one.pipe.send("abort")
        text, seconds = one.hear()
        assert "aborted" in text
        assert seconds < WAKE_S


@pytest.mark.parametrize("method", ["slot", "drain"])
def test_abort_and_close_wake_a_blocked_writer(method: str) -> None:
    for end in ("abort", "close"):
        with writer() as ring, ThreadPoolExecutor(1) as pool:
            for _ in range(2):
                ring.slot()
                ring.publish()
            blocked = pool.submit(getattr(ring, method))
            time.sleep(0.1)
            assert not blocked.done()
            start = time.monotonic()
            getattr(ring, end)()
            assert isinstance(blocked.exception(SOON_S), TransferError)
            assert time.monotonic() - start < WAKE_S


def test_after_abort_nothing_is_handed_out() -> None:
    with writer() as ring:
        reader = RingReader(reader=0, **ring.describe())
        ring.abort()
        with pytest.raises(TransferError, match="aborted"):
            ring.slot()
        reader.abort()
        with pytest.raises(TransferError, match="aborted"):
            reader.slot()


def test_a_killed_writer_leaves_its_frames_and_no_file(child: Callable[..., Child]) -> None:
    before, mapped = shared_memory(), mappings()
    one = child(write_and_hold, 2)
    description = one.hear()
    reader = RingReader(reader=0, **description)
    one.kill()
    for number in (1, 2):
        assert torch.equal(reader.slot(), torch.full((SLOT,), number, dtype=torch.uint8))
        reader.release()
    assert shared_memory() == before
    # nobody else can open it any more
    with pytest.raises(BackendUnavailable, match="cannot open the sender's memory file"):
        RingReader(reader=0, **description)
    del reader
    assert mappings() == mapped


# --- what is refused ------------------------------------------------------------------------


def test_what_is_not_the_sender_s_ring_is_refused() -> None:
    with writer() as ring, tempfile.TemporaryFile() as plain, writer() as other:
        good = ring.describe()
        plain.truncate(good["file_bytes"])
        plain_stat = os.fstat(plain.fileno())
        unsealed = os.memfd_create("test-unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(unsealed, int(good["file_bytes"]))
        elsewhere = other.describe()
        cases: list[tuple[dict[str, Any], str]] = [
            ({"nonce": "ff" * 16}, "belongs to another session"),
            ({"nonce": NONCE[:-2]}, "belongs to another session"),
            ({"nonce": ""}, "belongs to another session"),
            ({"inode": int(good["inode"]) + 1}, "is not the sender's memory file"),
            ({"file_bytes": int(good["file_bytes"]) + 4096}, "is not the sender's memory file"),
            ({"file_bytes": int(good["file_bytes"]) - 4096}, "is not the sender's memory file"),
            ({"file_bytes": 0}, "is not the sender's memory file"),
            ({"fd": elsewhere["fd"]}, "is not the sender's memory file"),
            (
                {"fd": plain.fileno(), "inode": plain_stat.st_ino},
                "is not the sender's memory file",
            ),
            (
                {"fd": unsealed, "inode": os.fstat(unsealed).st_ino},
                "is not the sender's memory file",
            ),
            ({"fd": 99999}, "cannot open the sender's memory file"),
            ({"pid": 2**22 + 1}, "cannot open the sender's memory file"),
        ]
        before = len(os.listdir("/proc/self/fd"))
        try:
            for change, message in cases:
                with pytest.raises(BackendUnavailable, match=message):
                    RingReader(reader=0, **{**good, **change})
            assert len(os.listdir("/proc/self/fd")) == before
        finally:
            os.close(unsealed)
        # two sessions at once: each nonce opens its own
        assert RingReader(reader=0, **elsewhere).slot_bytes == SLOT


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": "1"}, "'1' in a file's description is no natural number"),
        ({"pid": -1}, "-1 in a file's"),
        ({"fd": True}, "True in a file's"),
        ({"fd": "../../etc/passwd"}, "'../../etc/passwd' in a file's"),
        ({"inode": 1.0}, "1.0 in a file's"),
        ({"file_bytes": None}, "None in a file's"),
        ({"reader": -1}, "reader -1 is no natural number"),
        ({"reader": 1}, "reader 1 of 1"),
        ({"nonce": "zz" * 16}, "nonce is no hex string"),
        ({"nonce": 7}, "nonce is no hex string"),
        ({"nonce": None}, "nonce is no hex string"),
    ],
    ids=str,
)
def test_a_description_that_is_none_is_refused(change: dict[str, Any], message: str) -> None:
    with writer() as ring, pytest.raises(ConfigError, match=message):
        RingReader(**{"reader": 0, **ring.describe(), **change})


def test_another_process_may_open_it_and_not_with_the_wrong_nonce(
    child: Callable[..., Child],
) -> None:
    with writer() as ring:
        good = ring.describe()
        assert child(open_and_say, good).hear() is None
        kind, text = child(open_and_say, {**good, "nonce": "ff" * 16}).hear()
        assert (kind, text) == (
            "BackendUnavailable",
            "shm: the memory file belongs to another session",
        )


def test_a_description_is_plain_data() -> None:
    with writer(readers=3, slots=2) as ring:
        found = ring.describe()
        assert {key: type(value) for key, value in found.items()} == {
            "pid": int,
            "fd": int,
            "inode": int,
            "file_bytes": int,
            "nonce": str,
        }
        assert found["pid"] == os.getpid()
        assert int(found["file_bytes"]) == 4096 + 2 * SLOT


def test_nobody_can_shrink_or_grow_the_file() -> None:
    """A page that goes away under a reader would be a bus error."""
    with writer() as ring:
        size = int(ring.describe()["file_bytes"])
        for other in (0, size - 4096, size + 4096):
            with pytest.raises(PermissionError):
                os.ftruncate(ring._fd, other)
        with pytest.raises(PermissionError):
            fcntl.fcntl(ring._fd, 1033, 0x0008)  # nor add a seal against writing


# --- memory ---------------------------------------------------------------------------------


def test_too_little_room_is_an_error_that_says_how_much(child: Callable[..., Child]) -> None:
    phase, text, left = child(no_room).hear()
    assert phase == "connect"
    assert f"no room for a memory file of {4096 + (2 << 20)} bytes" in text
    assert left == 0


def test_an_absurd_size_is_an_error_too() -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(TransferError, match="no room for a memory file"):
        RingWriter(slot_bytes=1 << 62, slots=2, readers=1, nonce=NONCE)
    assert len(os.listdir("/proc/self/fd")) == before


def test_closing_gives_everything_back() -> None:
    before = (mappings(), len(os.listdir("/proc/self/fd")))
    for _ in range(10):
        ring = RingWriter(slot_bytes=SLOT, slots=2, readers=2, nonce=NONCE)
        readers = [RingReader(reader=i, **ring.describe()) for i in range(2)]
        assert mappings() == before[0] + 3
        ring.close()
        ring.close()
        del ring, readers
        assert (mappings(), len(os.listdir("/proc/self/fd"))) == before


def test_a_view_outlives_the_ring() -> None:
    before = mappings()
    ring = RingWriter(slot_bytes=SLOT, slots=2, readers=1, nonce=NONCE)
    reader = RingReader(reader=0, **ring.describe())
    ring.slot().copy_(frame(5))
    ring.publish()
    view = reader.slot()[100:200]
    ring.close()
    del ring, reader
    assert mappings() == before + 1
    assert torch.equal(view, frame(5)[100:200])
    del view
    assert mappings() == before


def test_all_memory_is_there_from_the_start() -> None:
    """First touch would cost a page fault per page, in a round."""
    with writer(slot_bytes=8 << 20) as ring:
        reader = RingReader(reader=0, **ring.describe())
        start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(2):
            ring.slot().fill_(1)
            ring.publish()
            assert int(reader.slot().max()) == 1
            reader.release()
        touched = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - start
    assert touched < (16 << 20) // 4096 // 4  # of 4096 pages, twice


def test_a_ring_is_no_larger_than_the_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = RingWriter.__init__

    def spy(self: RingWriter, **arguments: Any) -> None:
        original(self, **arguments)
        made.append(int(self.describe()["file_bytes"]))

    monkeypatch.setattr(RingWriter, "__init__", spy)
    config = WeightTransferConfig(backend="shm", bucket_size_bytes=8 << 20)
    with LocalController([torch.nn.Linear(3, 3)], config) as controller:
        controller.sync_weights(torch.nn.Linear(3, 3))
    (file_bytes,) = made
    assert file_bytes < 1 << 20
