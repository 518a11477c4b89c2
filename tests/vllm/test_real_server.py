"""`VLLMServer` against a real API server of vLLM's on loopback."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from rayxfer import ContractError, Controller, RayxferError, WeightTransferConfig
from rayxfer.checkpoint import CheckpointSource
from rayxfer.topology import process_gone
from rayxfer.vllm import VLLMServer
from recipes.vllm_serve_sync import answer, push, save_small_model, small_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = "between-us"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    for seed in range(3):
        save_small_model(folder / str(seed), seed)
    return folder


@pytest.fixture(scope="module")
def url(models: Path) -> Iterator[str]:
    with small_server(models / "0", token=TOKEN) as url:
        yield url


def test_push_and_push_back(
    ray_session: None, url: str, models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = answer(url, TOKEN)
    push(url, models / "1", "auto", TOKEN)
    changed = answer(url, TOKEN)
    push(url, models / "0", "gloo", TOKEN)
    assert answer(url, TOKEN) == original != changed
    assert "serves version 2" in capsys.readouterr().out
    said = requests.get(f"{url}/weight_info", timeout=20).json()
    assert said == {"weight_version": "2"}


def test_what_does_not_fit_is_refused_and_nothing_changes(
    ray_session: None, url: str, models: Path
) -> None:
    before = answer(url, TOKEN)
    controller = Controller([VLLMServer(url, token=TOKEN)], WeightTransferConfig(backend="shm"))
    offer = dict(CheckpointSource(models / "1"))
    offer["model.embed_tokens.weight"] = offer["model.embed_tokens.weight"][:50].clone()
    with pytest.raises(ContractError, match="embed_tokens"):
        controller.sync_weights(offer)
    with pytest.raises(RayxferError, match="object_store"):
        Controller([VLLMServer(url)], WeightTransferConfig(backend="object_store"))
    assert answer(url, TOKEN) == before
    server = VLLMServer(url)
    assert server.state() == "READY"
    assert server.weight_version() == controller.status().version
    controller.shutdown()


def test_a_server_that_dies(ray_session: None, models: Path) -> None:
    """Last of all, on a server of its own: the pid that answers is the one that is killed."""
    with small_server(models / "0") as url:
        server = VLLMServer(url, timeout_s=20.0)
        controller = Controller([server], WeightTransferConfig(backend="shm", connect_timeout_s=20))
        controller.sync_weights(CheckpointSource(models / "1"))
        from rayxfer.topology import Facts

        described = server.call("describe", {"backend": "shm"}).result(timeout=20)
        facts = Facts.from_wire(described["facts"])
        os.kill(facts.pid, signal.SIGKILL)
        with pytest.raises(RayxferError) as caught:
            controller.sync_weights(CheckpointSource(models / "2"))
        assert process_gone(facts)
        assert "worker 0" in str(caught.value)
        assert controller.status().workers[0].state == "LOST"
        controller.shutdown()
