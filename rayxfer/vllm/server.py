"""A separate `vllm serve` as a worker, over HTTP.

The server has to run with `VLLM_SERVER_DEV_MODE=1` (vLLM's own switch for these routes) and
`--weight-transfer-config '{"backend": "rayxfer"}'`, with rayxfer installed beside it. Only control messages
travel over HTTP, as JSON text; weights travel by the chosen backend, straight into the server's workers.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from rayxfer.client import WorkerClient, spawn
from rayxfer.errors import (
    BackendUnavailable,
    ConfigError,
    TransferError,
    TransferTimeout,
    WorkerLost,
)
from rayxfer.vllm.relay import Relay
from rayxfer.vllm.wire import decode, encode

__all__ = ["VLLMServer"]

_BODY_SHOWN = 400


class VLLMServer(WorkerClient):
    """One `vllm serve` process: `Controller([VLLMServer("http://host:8000")])`.

    One replica per URL: with data parallelism inside the server vLLM answers for one replica only, so give
    every replica a server of its own. Can be pickled; every copy talks to the same server.

    Args:
        url: where it listens, for example "http://10.0.0.3:8000".
        token: sent as `Authorization: Bearer …` (vLLM's `--api-key`, or a proxy's).
        timeout_s: for one HTTP request that is to answer at once. A pause in mode "wait" may take as long
            as the running requests: `pause_timeout_s`.

    Raises:
        ConfigError: `url` is none, or has a path.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout_s: float = 30.0,
        pause_timeout_s: float = 600.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ConfigError(f"url={url!r}: expected http://host:port")
        self.url = url.rstrip("/")
        self.key = self.url
        self._token, self._timeout_s, self._pause_timeout_s = token, timeout_s, pause_timeout_s
        self._start()

    def _start(self) -> None:
        self._local = threading.local()
        self._checked = False
        self._relay = Relay(self._rpc, self)

    def __reduce__(self) -> tuple[Any, ...]:
        rest = {"timeout_s": self._timeout_s, "pause_timeout_s": self._pause_timeout_s}
        return _rebuild, (self.url, {"token": self._token, **rest})

    def __repr__(self) -> str:
        return f"VLLMServer({self.url!r})"

    # ---- as a worker ---------------------------------------------------------------------------

    def call(self, op: str, message: dict[str, Any]) -> Future[dict[str, Any]]:
        return spawn(lambda: self._handle(op, message), f"rayxfer-http-{op}")

    def _handle(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        if not self._checked:
            self._check_server()
        return self._relay.handle(op, message)

    def state(self) -> str:
        """This worker's `WorkerState`, asked now."""
        self._relay.refresh()
        return str(self._relay.state)

    def weight_version(self) -> int:
        """The version that it holds, asked now (0: what it was started with)."""
        self._relay.refresh()
        return self._relay.version

    def _check_server(self) -> None:
        """Raises ConfigError for a server that cannot be a worker, saying what it lacks."""
        whole = self._request("GET", "/get_world_size", {"include_dp": "true"})["world_size"]
        one = self._request("GET", "/get_world_size", {"include_dp": "false"})["world_size"]
        if whole != one:
            raise ConfigError(
                f"{self.url} serves {whole // one} data-parallel replicas behind one URL, and vLLM answers "
                "for one of them only: start one server per replica"
            )
        self._checked = True

    # ---- vLLM's controls (rayxfer.vllm.relay.Controls) ------------------------------------------

    def pause(self, mode: str) -> None:
        query = {"mode": mode, "clear_cache": "false"}
        self._request("POST", "/pause", query, timeout_s=self._pause_timeout_s)

    def resume(self) -> None:
        self._request("POST", "/resume")

    def reset_cache(self) -> bool:
        query = {"reset_running_requests": "true"}
        done = bool(self._request("POST", "/reset_prefix_cache", query)["success"])
        self._request("POST", "/reset_mm_cache")
        self._request("POST", "/reset_encoder_cache")
        return done

    def set_version(self, version: int) -> None:
        self._request("POST", "/update_weight_version", body={"new_version": str(version)})

    # ---- HTTP ----------------------------------------------------------------------------------

    def _rpc(self, op: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        body = {"method": "rayxfer_call", "args": [op, encode(message)]}
        timeout = self._timeout_s + float(message.get("wait_s", 0.0))
        answer = self._request("POST", "/collective_rpc", body=body, timeout_s=timeout)
        return [decode(text) for text in answer.get("results", ())]

    def _request(
        self,
        method: str,
        path: str,
        query: dict[str, str] | None = None,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
    ) -> dict[str, Any]:
        """One request; its JSON.

        Raises:
            WorkerLost: nobody listens there, or the connection broke. TransferTimeout: no answer.
            ConfigError: a route is missing, or access is refused. TransferError: any other failure, with
            the body that came with it.
        """
        try:
            import requests
        except ImportError as error:
            raise BackendUnavailable("VLLMServer needs `requests`", cause=error) from error
        session = getattr(self._local, "session", None)
        if session is None:
            session = self._local.session = requests.Session()
            session.trust_env = False  # a proxy of the environment is not between us
            if self._token is not None:
                session.headers["Authorization"] = f"Bearer {self._token}"
        timeout = self._timeout_s if timeout_s is None else timeout_s
        where = f"{self.url}{path}"
        try:
            response = session.request(
                method, where, params=query, json=body, timeout=timeout, allow_redirects=False
            )
        except requests.Timeout as error:
            raise TransferTimeout(f"{where} did not answer within {timeout:g} s") from error
        except requests.RequestException as error:
            raise WorkerLost(f"{where} cannot be reached: {error}") from error
        text = response.text
        if response.status_code == 404:
            raise ConfigError(
                f"{where}: 404. If this is a vLLM server (0.32, or one with the same routes), it needs "
                "VLLM_SERVER_DEV_MODE=1 in its environment"
            )
        if response.status_code in (401, 403):
            raise ConfigError(f"{where}: {response.status_code}, access refused: {_short(text)}")
        if not 200 <= response.status_code < 300:
            raise TransferError(f"{where}: {response.status_code}: {_short(text)}")
        if not text:
            return {}
        try:
            answer = response.json()
        except ValueError as error:
            raise TransferError(f"{where} did not answer with JSON: {_short(text)}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}


def _rebuild(url: str, rest: dict[str, Any]) -> VLLMServer:
    return VLLMServer(url, **rest)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _BODY_SHOWN else text[:_BODY_SHOWN] + " …"
