"""What `VLLMActor` hands on to vLLM's processes."""

from __future__ import annotations

import os

import pytest

from actors.vllm import _prepare_environment
from rayxfer.vllm.plugin import ENGINES_VARIABLE


def test_engines_of_the_environment_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (ENGINES_VARIABLE, "PYTHONPATH", "VLLM_LOGGING_LEVEL", "RAYXFER_VLLM_REBUILT"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv(ENGINES_VARIABLE, "mine=a.b:C")
    _prepare_environment({})
    assert os.environ[ENGINES_VARIABLE] == "mine=a.b:C"
    _prepare_environment({"other": "d:E"})
    assert os.environ[ENGINES_VARIABLE] == "other=d:E,mine=a.b:C"
