"""A checkpoint on disk as a source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rayxfer import ConfigError
from rayxfer.checkpoint import CheckpointSource
from rayxfer.testing.local import LocalController
from tests.helpers import assert_same_bytes, poison


def test_every_tensor_of_every_file(tmp_path: Path) -> None:
    first = {"a": torch.randn(3, 4), "b": torch.arange(5), "flag": torch.tensor(True)}
    second = {"c": torch.randn(2, 2).to(torch.bfloat16), "empty": torch.empty(0, 3)}
    save_file(first, tmp_path / "model-1.safetensors")
    save_file(second, tmp_path / "model-2.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    source = CheckpointSource(tmp_path)
    for _ in range(2):  # a fresh pass each time, in the order of the metadata
        got = list(source)
        assert [name for name, _ in got] == [meta.name for meta in source.metadata()]
        for meta, (_, tensor) in zip(source.metadata(), got, strict=True):
            assert (meta.dtype, meta.shape) == (tensor.dtype, tuple(tensor.shape))
        assert_same_bytes(dict(got), {name: (first | second)[name] for name, _ in got})


def test_a_sync_from_disk(tmp_path: Path) -> None:
    trained, serving = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    save_file({k: v.detach() for k, v in trained.named_parameters()}, tmp_path / "m.safetensors")
    poison(serving)
    with LocalController([serving]) as controller:
        controller.sync_weights(CheckpointSource(tmp_path / "m.safetensors"))
    assert_same_bytes(serving.state_dict(), trained.state_dict())


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        CheckpointSource(tmp_path)
    with pytest.raises(ConfigError, match=r"no \.safetensors"):
        CheckpointSource(tmp_path / "nowhere.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "1.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "2.safetensors")
    with pytest.raises(ConfigError, match=r"'a' is in 1\.safetensors and in 2\.safetensors"):
        CheckpointSource(tmp_path)
