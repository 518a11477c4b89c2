"""Where the members of one channel find each other: a tiny key-value server, guarded by a token.

torch's own TCPStore would do, but it answers anyone who can reach its port. Here a peer sends the
session's 16-byte token first, and nothing else is read before it matched. The listener binds port 0
and keeps it, so ports cannot be stolen between choosing and listening.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import socketserver
import struct
import threading
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rayxfer.errors import TransferError, TransferTimeout

__all__ = ["Rendezvous", "RendezvousStore"]

_MAX_FRAME_BYTES = 1 << 16
_HANDSHAKE_TIMEOUT_S = 5.0
_HEADER = struct.Struct("!cII")
_ENTER = struct.Struct("!QId")


class Rendezvous:
    """The server side, in the trainer's process. `address` is (host, port)."""

    def __init__(self, host: str, token: str) -> None:
        self._values: dict[str, bytes] = {}
        self._entered: dict[str, int] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._connections: set[socket.socket] = set()
        secret = bytes.fromhex(token)
        outer = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                connection: socket.socket = self.request
                try:
                    connection.settimeout(_HANDSHAKE_TIMEOUT_S)
                    if not hmac.compare_digest(_read(connection, len(secret)), secret):
                        return
                    with outer._changed:
                        outer._connections.add(connection)
                    connection.sendall(b"k")
                    connection.settimeout(None)
                    while not outer._closed:
                        outer._serve(connection)
                except (OSError, EOFError, struct.error, ValueError):
                    return  # a peer that left or talks nonsense ends its own connection only
                finally:
                    with outer._changed:
                        outer._connections.discard(connection)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 1024  # all workers come at once; a full queue costs them seconds
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, 0), Handler)
        self.address: tuple[str, int] = (host, int(self._server.server_address[1]))
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="rayxfer-rendezvous", daemon=True
        )
        self._thread.start()

    def _serve(self, connection: socket.socket) -> None:
        op, key_len, value_len = _HEADER.unpack(_read(connection, _HEADER.size))
        if key_len + value_len > _MAX_FRAME_BYTES:
            raise ValueError("frame too large")
        key = _read(connection, key_len).decode()
        value = _read(connection, value_len)
        if op == b"s":
            self.set(key, value)
            _reply(connection, b"o", b"")
        elif op == b"g":
            found = self.get(key, struct.unpack("!d", value)[0])
            _reply(connection, b"o" if found is not None else b"t", found or b"")
        elif op == b"a":
            _reply(connection, b"o", str(self.add(key, int(value))).encode())
        elif op == b"e":
            passed = self.enter(key, *_ENTER.unpack(value))
            _reply(connection, b"o" if passed else b"t", b"")
        else:
            raise ValueError(f"unknown op {op!r}")

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def add(self, key: str, amount: int) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def get(self, key: str, timeout_s: float) -> bytes | None:
        """The value once it is there; None after `timeout_s` or when closed."""
        deadline = time.monotonic() + min(timeout_s, 3600.0)
        with self._changed:
            while key not in self._values:
                left = deadline - time.monotonic()
                if not left > 0 or self._closed:  # nor for NaN, which a peer may ask for
                    return None
                self._changed.wait(left)
            return self._values[key]

    def enter(self, member: str, gate: int, members: int, timeout_s: float) -> bool:
        """Wait at a gate until so many members have; False after `timeout_s` or when closed. A member is
        at one gate at a time: the last that it came to."""
        deadline = time.monotonic() + min(timeout_s, 3600.0)
        with self._changed:
            self._entered[member] = gate
            if self._at(gate) >= members:  # the last one wakes the others, once
                self._changed.notify_all()
            while self._at(gate) < members:
                left = deadline - time.monotonic()
                if not left > 0 or self._closed:
                    return False
                self._changed.wait(left)
            return not self._closed

    def _at(self, gate: int) -> int:
        return list(self._entered.values()).count(gate)

    def close(self) -> None:
        """Stop listening and release every waiter. Safe to call twice."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for connection in self._connections:
                with contextlib.suppress(OSError):  # the peer was first
                    connection.shutdown(socket.SHUT_RD)  # replies still go out
        self._server.shutdown()
        self._server.server_close()


class RendezvousStore(dist.Store):  # type: ignore[misc,name-defined]
    """A `torch.distributed` store over a `Rendezvous`: local in the trainer, remote in a worker."""

    def __init__(self, target: Rendezvous | tuple[str, int], token: str, timeout_s: float) -> None:
        super().__init__()
        self._deadline = time.monotonic() + timeout_s
        self._local = target if isinstance(target, Rendezvous) else None
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._aborted = False
        if not isinstance(target, Rendezvous):
            try:
                self._socket = socket.create_connection(target, timeout=timeout_s)
                self._socket.sendall(bytes.fromhex(token))
                if _read(self._socket, 1) != b"k":
                    raise EOFError
            except (OSError, EOFError) as error:
                if self._socket is not None:
                    self._socket.close()
                host, port = target
                raise TransferError(
                    f"no rendezvous at {host}:{port}: {type(error).__name__}: {error}",
                    phase="connect",
                    cause=error,
                ) from error

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _call(self, op: bytes, key: str, value: bytes) -> bytes:
        assert self._socket is not None
        name = key.encode()
        try:
            with self._lock:
                self._socket.settimeout(self._left_s() + 1.0)
                self._socket.sendall(_HEADER.pack(op, len(name), len(value)) + name + value)
                status, length = struct.unpack("!cI", _read(self._socket, 5))
                body = _read(self._socket, length)
        except (OSError, EOFError) as error:
            kind = TransferTimeout if isinstance(error, TimeoutError) else TransferError
            raise kind(
                f"lost the rendezvous while asking for {key!r}: {error}",
                phase="connect",
                cause=error,
            ) from error
        if status != b"o":
            raise TransferTimeout(f"nobody set {key!r} in time", phase="connect")
        return body

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        if self._local is not None:
            self._local.set(key, data)
        else:
            self._call(b"s", key, data)

    def get(self, key: str) -> bytes:
        if self._local is not None:
            found = self._local.get(key, self._left_s())
            if found is None:
                raise TransferTimeout(f"nobody set {key!r} in time", phase="connect")
            return found
        return self._call(b"g", key, struct.pack("!d", self._left_s()))

    def add(self, key: str, value: int) -> int:
        if self._local is not None:
            return self._local.add(key, value)
        return int(self._call(b"a", key, str(value).encode()))

    def enter(self, member: str, gate: int, members: int, timeout_s: float) -> None:
        """As `Rendezvous.enter`, with a clock of its own. Raises TransferTimeout, or TransferError when
        this or the rendezvous is closed."""
        if self._local is not None:
            if not self._local.enter(member, gate, members, timeout_s):
                raise TransferTimeout(f"not all came to gate {gate} in time", phase="update")
            return
        self._deadline = time.monotonic() + timeout_s
        try:
            self._call(b"e", member, _ENTER.pack(gate, members, timeout_s))
        except TransferError as error:
            raise type(error)(
                f"not all came to gate {gate}: {error.message}", phase="update", cause=error
            ) from error

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def close(self) -> None:
        """Release a blocked call and the connection. Safe to call twice."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # already closed by the peer
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()


def _read(connection: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = connection.recv(count - len(chunks))
        if not chunk:
            raise EOFError("the peer closed the connection")
        chunks += chunk
    return bytes(chunks)


def _reply(connection: socket.socket, status: bytes, body: bytes) -> None:
    connection.sendall(struct.pack("!cI", status, len(body)) + body)
