"""`benchmarks/hosts.py` where it cannot run. Where it can, it checks every byte itself."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks import hosts


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert hosts.main([]) == 2
    assert "need root" in capsys.readouterr().err


def test_without_iproute2_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    assert hosts.main([]) == 2
    assert "iproute2 is not installed" in capsys.readouterr().err
