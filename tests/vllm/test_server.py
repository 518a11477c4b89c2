"""`VLLMServer` against servers that misbehave. A small HTTP server stands in; the real one is elsewhere."""

from __future__ import annotations

import json
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rayxfer import ConfigError, TransferError, TransferTimeout, WorkerLost
from rayxfer.vllm import VLLMServer

Answer = Callable[[str, str], tuple[int, str]]


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], tuple[str, list[dict[str, str]]]]]:
    running: list[ThreadingHTTPServer] = []

    def start(answer: Answer) -> tuple[str, list[dict[str, str]]]:
        seen: list[dict[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            def do(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                seen.append({"path": self.path, **dict(self.headers.items())})
                status, body = answer(self.command, self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_POST = do

            def log_message(self, *_: Any) -> None: ...

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}", seen

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x", "http://x/v1", "http://"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="expected http"):
        VLLMServer(url)


def test_pickled_it_is_the_same_server() -> None:
    server = VLLMServer("http://10.0.0.1:8000/", token="t", timeout_s=3.0)
    again = pickle.loads(pickle.dumps(server))
    assert (again.url, again.key, again._token, again._timeout_s) == (
        "http://10.0.0.1:8000",
        server.key,
        "t",
        3.0,
    )


def described(server: VLLMServer) -> Any:
    return server.call("describe", {"backend": "shm"}).result(timeout=30)


def test_nobody_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(WorkerLost, match="cannot be reached"):
        described(VLLMServer(f"http://127.0.0.1:{port}"))


def test_no_answer(serve: Callable[[Answer], Any]) -> None:
    url, _ = serve(lambda *_: (time.sleep(1.0), (200, "{}"))[1])
    with pytest.raises(TransferTimeout, match=r"within 0\.2 s"):
        described(VLLMServer(url, timeout_s=0.2))


@pytest.mark.parametrize(
    ("status", "body", "error", "says"),
    [
        (404, "", ConfigError, "VLLM_SERVER_DEV_MODE"),
        (401, '{"error": "Unauthorized"}', ConfigError, "Unauthorized"),
        (500, '{"error": "CUDA ran away"}', TransferError, "CUDA ran away"),
        (500, "x" * 10_000, TransferError, "…"),
        (302, "", TransferError, "302"),
        (200, "<html>", TransferError, "JSON"),
    ],
)
def test_what_the_server_says_is_what_you_see(
    serve: Callable[[Answer], Any], status: int, body: str, error: type[Exception], says: str
) -> None:
    url, _ = serve(lambda *_: (status, body))
    with pytest.raises(error, match=says) as caught:
        described(VLLMServer(url))
    assert len(str(caught.value)) < 1000


def test_replicas_behind_one_address_are_refused(serve: Callable[[Answer], Any]) -> None:
    def answer(_: str, path: str) -> tuple[int, str]:
        return 200, json.dumps({"world_size": 4 if "true" in path else 2})

    url, _ = serve(answer)
    with pytest.raises(ConfigError, match="2 data-parallel replicas"):
        described(VLLMServer(url))


def test_the_token_goes_with_every_request(serve: Callable[[Answer], Any]) -> None:
    url, seen = serve(lambda *_: (200, "{}"))
    server = VLLMServer(url, token="secret")
    server.pause("wait")
    server.resume()
    assert [one["path"] for one in seen] == ["/pause?mode=wait&clear_cache=false", "/resume"]
    assert all(one["Authorization"] == "Bearer secret" for one in seen)
    assert "secret" not in repr(server)
