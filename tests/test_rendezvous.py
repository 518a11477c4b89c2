from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from rayxfer.engines.rendezvous import Rendezvous, RendezvousStore
from rayxfer.errors import TransferError, TransferTimeout

TOKEN = "00112233445566778899aabbccddeeff"
WRONG = "00112233445566778899aabbccddeefe"  # in the last bit only
HOST = "127.0.0.1"
SOON_S = 30.0
"""Far more than anything here takes, also on a busy machine."""


@pytest.fixture
def server() -> Iterator[Rendezvous]:
    one = Rendezvous(HOST, TOKEN)
    yield one
    one.close()


@pytest.fixture
def run() -> Iterator[Callable[..., Future[Any]]]:
    with ThreadPoolExecutor(16) as pool:
        yield pool.submit


@contextmanager
def store(server: Rendezvous, *, timeout_s: float = SOON_S) -> Iterator[RendezvousStore]:
    one = RendezvousStore(server.address, TOKEN, timeout_s)
    try:
        yield one
    finally:
        one.close()


@contextmanager
def raw(server: Rendezvous, sent: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(server.address, timeout=SOON_S) as connection:
        connection.sendall(sent)
        yield connection


def request(op: bytes, key: bytes, value: bytes = b"") -> bytes:
    return struct.pack("!cII", op, len(key), len(value)) + key + value


def received(connection: socket.socket) -> bytes:
    """All that comes until the other end closes; a reset is an end too."""
    found = b""
    try:
        while chunk := connection.recv(4096):
            found += chunk
    except ConnectionResetError:
        pass
    return found


def threads() -> int:
    return sum(
        "process_request_thread" in t.name or t.name == "rayxfer-rendezvous"
        for t in threading.enumerate()
    )


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def fds() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- a store --------------------------------------------------------------------------------


def test_values_are_shared_between_all_ends(server: Rendezvous) -> None:
    local = RendezvousStore(server, TOKEN, SOON_S)
    with store(server) as one, store(server) as two:
        one.set("a", "text")
        two.set("b", b"\0\xff bytes")
        local.set("c", [1, 2, 255])  # as torch hands bytes over
        for end in (one, two, local):
            assert end.get("a") == b"text"
            assert end.get("b") == b"\0\xff bytes"
            assert end.get("c") == b"\1\2\xff"
        two.set("a", b"")
        assert one.get("a") == local.get("a") == b""
        two.set("näme.重み", b"x" * 60_000)
        assert one.get("näme.重み") == b"x" * 60_000


def test_counters_add_up_from_every_end(
    server: Rendezvous, run: Callable[..., Future[Any]]
) -> None:
    with store(server) as one, store(server) as two:
        local = RendezvousStore(server, TOKEN, SOON_S)
        done = [run(end.add, "n", 1) for end in (one, two, local) for _ in range(50)]
        assert sorted(future.result(SOON_S) for future in done) == list(range(1, 151))
        assert one.add("n", -150) == 0


def test_get_waits_until_somebody_sets(server: Rendezvous, run: Callable[..., Future[Any]]) -> None:
    local = RendezvousStore(server, TOKEN, SOON_S)
    with store(server) as one, store(server) as two:
        waiting = [run(end.get, "late") for end in (one, local)]
        waiting.append(run(two.wait, ["late"], timedelta(seconds=1)))
        time.sleep(0.1)
        assert not any(future.done() for future in waiting)
        with store(server) as three:
            three.set("late", b"now")
        assert [future.result(SOON_S) for future in waiting] == [b"now", b"now", None]


def test_get_gives_up_at_its_own_deadline(server: Rendezvous) -> None:
    for target in (server.address, server):
        end = RendezvousStore(target, TOKEN, 0.3)
        start = time.monotonic()
        with pytest.raises(TransferTimeout, match="nobody set 'never' in time") as caught:
            end.get("never")
        assert caught.value.phase == "connect"
        assert 0.25 < time.monotonic() - start < SOON_S
        end.set("there", b"1")  # what is there is still answered
        assert end.get("there") == b"1"
        end.close()


def test_all_pass_a_gate_together(server: Rendezvous, run: Callable[..., Future[Any]]) -> None:
    local = RendezvousStore(server, TOKEN, SOON_S)
    with store(server) as one, store(server) as two:
        for gate in (7, 8, 3):
            waiting = [run(one.enter, "1", gate, 3, SOON_S), run(local.enter, "0", gate, 3, SOON_S)]
            time.sleep(0.05)
            assert not any(future.done() for future in waiting)
            two.enter("2", gate, 3, SOON_S)
            for future in waiting:
                future.result(SOON_S)


def test_who_is_at_another_gate_is_not_at_this_one(server: Rendezvous) -> None:
    with store(server) as one, store(server) as two:
        for gate in (5, 6):
            with pytest.raises(TransferTimeout, match=f"gate {gate}"):
                one.enter("1", gate, 2, 0.05)
        with pytest.raises(TransferTimeout, match="gate 5") as caught:
            two.enter("2", 5, 2, 0.05)  # the first has gone on to 6
        assert caught.value.phase == "update"
        with pytest.raises(TransferTimeout, match="gate 9"):
            RendezvousStore(server, TOKEN, SOON_S).enter("0", 9, 2, 0.05)
        with pytest.raises(TransferTimeout, match="gate 9"):
            one.enter("0", 9, 2, 0.05)  # one member twice is one member


@pytest.mark.parametrize("end", ["server", "store"])
def test_an_abort_frees_whoever_waits_at_a_gate(
    server: Rendezvous, run: Callable[..., Future[Any]], end: str
) -> None:
    with store(server) as one:
        waiting = run(one.enter, "1", 1, 2, SOON_S)
        eventually(lambda: server._entered == {"1": 1})
        (server if end == "server" else one).close()
        with pytest.raises(TransferError, match="gate 1"):
            waiting.result(SOON_S)


def test_torch_meets_over_it(server: Rendezvous, run: Callable[..., Future[Any]]) -> None:
    """It is a store as torch's own: a process group can be made with it."""

    def join(rank: int) -> Any:
        end = RendezvousStore(server if rank == 0 else server.address, TOKEN, SOON_S)
        assert isinstance(end, dist.Store)
        group = dist.ProcessGroupGloo(end, rank, 3, timedelta(seconds=SOON_S))
        group.barrier().wait()
        end.close()
        return group.size()

    joined = [run(join, rank) for rank in range(3)]
    assert [future.result(SOON_S) for future in joined] == [3, 3, 3]


# --- the token ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        bytes.fromhex(WRONG),
        b"\0" * 16,
        bytes.fromhex(TOKEN)[::-1],
        TOKEN.encode()[:16],
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        request(b"g", b"secret", struct.pack("!d", 1.0)),
        b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
    ],
    ids=["last bit", "zeros", "reversed", "hex", "http", "no token", "pickle"],
)
def test_a_wrong_token_gets_nothing(server: Rendezvous, sent: bytes) -> None:
    server.set("secret", b"value")
    changes = request(b"s", b"secret", b"changed") + request(b"a", b"n", b"1")
    with raw(server, sent + changes) as connection:
        assert received(connection) == b""
    assert server.get("secret", 0) == b"value"
    assert server.get("n", 0) is None


def test_a_store_with_the_wrong_token_is_refused_and_leaves_nothing(server: Rendezvous) -> None:
    before = fds()
    with pytest.raises(
        TransferError, match=rf"no rendezvous at {HOST}:{server.address[1]}"
    ) as caught:
        RendezvousStore(server.address, WRONG, SOON_S)
    assert caught.value.phase == "connect"
    assert caught.value.cause is not None
    del caught
    eventually(lambda: fds() <= before)


def test_half_a_token_is_none(server: Rendezvous) -> None:
    with raw(server, bytes.fromhex(TOKEN)[:8]) as connection:
        connection.shutdown(socket.SHUT_WR)
        assert received(connection) == b""


def test_nobody_there_is_an_error_that_says_where() -> None:
    gone = Rendezvous(HOST, TOKEN)
    gone.close()
    with pytest.raises(TransferError, match=f"no rendezvous at {HOST}:{gone.address[1]}"):
        RendezvousStore(gone.address, TOKEN, 2.0)


# --- bad company ----------------------------------------------------------------------------


def test_silent_connections_block_nobody(server: Rendezvous) -> None:
    quiet = [socket.create_connection(server.address) for _ in range(30)]
    half = [socket.create_connection(server.address) for _ in range(5)]
    for connection in half:
        connection.sendall(bytes.fromhex(TOKEN)[:7])
    try:
        start = time.monotonic()
        with store(server) as one:
            one.set("a", b"1")
            assert one.get("a") == b"1"
        assert time.monotonic() - start < 4  # less than a silent one is borne with
    finally:
        for connection in quiet + half:
            connection.close()


def test_a_silent_connection_is_not_borne_for_ever(
    server: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayxfer.engines.rendezvous._HANDSHAKE_TIMEOUT_S", 0.2)
    with raw(server) as connection:
        start = time.monotonic()
        assert received(connection) == b""
        assert time.monotonic() - start < SOON_S


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!cII", b"s", 1 << 31, 1 << 31),
        struct.pack("!cII", b"s", 0, (1 << 16) + 1),
        request(b"x", b"a"),
        request(b"s", b"\xff\xfe", b"1"),
        request(b"g", b"a", b"short"),
        request(b"a", b"n", b"one"),
        request(b"a", b"n", b""),
        request(b"e", b"1", b""),
        request(b"e", b"1", struct.pack("!QI", 7, 2)),
    ],
    ids=[
        "huge",
        "large",
        "op",
        "utf-8",
        "timeout",
        "number",
        "no number",
        "no gate",
        "half a gate",
    ],
)
def test_nonsense_ends_its_own_connection_only(
    server: Rendezvous, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    with store(server) as one, raw(server, bytes.fromhex(TOKEN) + sent) as connection:
        assert received(connection) == b"k"
        one.set("a", b"1")
        assert one.get("a") == b"1"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("-inf")])
def test_a_peer_that_will_not_wait_is_answered_at_once(server: Rendezvous, seconds: float) -> None:
    asked = request(b"g", b"never", struct.pack("!d", seconds))
    with raw(server, bytes.fromhex(TOKEN) + asked) as connection:
        connection.shutdown(socket.SHUT_WR)
        start = time.monotonic()
        assert received(connection) == b"k" + struct.pack("!cI", b"t", 0)
        assert time.monotonic() - start < SOON_S / 2


def test_a_peer_that_leaves_in_the_middle_is_forgotten(server: Rendezvous) -> None:
    before = threads()
    for sent in (b"", request(b"s", b"key", b"value")[:-3], request(b"g", b"never", b"")[:5]):
        with raw(server, bytes.fromhex(TOKEN) + sent) as connection:
            assert connection.recv(1) == b"k"
    eventually(lambda: threads() <= before)
    assert server.get("key", 0) is None


# --- the end --------------------------------------------------------------------------------


def test_close_releases_every_waiter(server: Rendezvous, run: Callable[..., Future[Any]]) -> None:
    local = RendezvousStore(server, TOKEN, SOON_S)
    ends = [RendezvousStore(server.address, TOKEN, SOON_S) for _ in range(3)]
    waiting = [run(end.get, "never") for end in (*ends, local)]
    time.sleep(0.1)
    assert not any(future.done() for future in waiting)
    start = time.monotonic()
    server.close()
    for future in waiting:
        assert isinstance(future.exception(SOON_S), TransferError)
    assert time.monotonic() - start < 1
    for end in ends:
        end.close()


def test_close_ends_idle_connections_too(run: Callable[..., Future[Any]]) -> None:
    """A worker that was stopped never closes its end: nothing may be left of it here."""
    before = (threads(), fds())
    server = Rendezvous(HOST, TOKEN)
    with socket.create_connection(server.address, timeout=SOON_S) as stopped:
        stopped.sendall(bytes.fromhex(TOKEN))
        assert stopped.recv(1) == b"k"
        server.close()
        assert received(stopped) == b""
        eventually(lambda: threads() <= before[0])
    eventually(lambda: fds() <= before[1])


def test_a_store_whose_server_has_gone_says_so() -> None:
    server = Rendezvous(HOST, TOKEN)
    with store(server) as one:
        one.set("a", b"1")
        server.close()
        for call in (lambda: one.get("a"), lambda: one.set("b", b""), lambda: one.add("n", 1)):
            with pytest.raises(TransferError) as caught:
                call()
            assert caught.value.phase == "connect"


def test_a_store_that_is_closed_releases_its_own_blocked_call(
    server: Rendezvous, run: Callable[..., Future[Any]]
) -> None:
    one = RendezvousStore(server.address, TOKEN, SOON_S)
    waiting = run(one.get, "never")
    time.sleep(0.1)
    start = time.monotonic()
    one.close()
    error = waiting.exception(SOON_S)
    assert time.monotonic() - start < 1
    assert isinstance(error, TransferError)
    assert "'never'" in str(error)
    one.close()


def test_a_server_that_hangs_is_a_timeout() -> None:
    """It took the token and never answers: stopped, not dead."""
    with socket.create_server((HOST, 0)) as listener:

        def answer() -> socket.socket:
            connection, _ = listener.accept()
            connection.recv(16)
            connection.sendall(b"k")
            return connection

        with ThreadPoolExecutor(1) as pool:
            accepted = pool.submit(answer)
            one = RendezvousStore(listener.getsockname(), TOKEN, 0.1)
            with accepted.result(SOON_S), pytest.raises(TransferTimeout, match="'a'"):
                one.get("a")
            one.close()


def test_closing_twice_is_harmless_and_frees_the_port() -> None:
    before = (threads(), fds())
    server = Rendezvous(HOST, TOKEN)
    server.close()
    server.close()
    with socket.create_server(server.address):
        pass
    assert server.get("a", SOON_S) is None  # no wait for what cannot come
    eventually(lambda: (threads(), fds()) <= before)


def test_close_right_after_the_start() -> None:
    for _ in range(20):
        start = time.monotonic()
        Rendezvous(HOST, TOKEN).close()
        assert time.monotonic() - start < SOON_S


def test_ports_are_the_kernel_s_choice_and_differ() -> None:
    servers = [Rendezvous(HOST, TOKEN) for _ in range(5)]
    try:
        ports = {server.address[1] for server in servers}
        assert len(ports) == 5
        assert min(ports) > 0
        assert {server.address[0] for server in servers} == {HOST}
    finally:
        for server in servers:
            server.close()


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_an_ipv6_literal_is_an_address() -> None:
    try:
        server = Rendezvous("::1", TOKEN)
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    try:
        with store(server) as one:
            one.set("a", b"1")
            assert one.get("a") == b"1"
    finally:
        server.close()
