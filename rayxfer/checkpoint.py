"""A checkpoint on disk as something to send. Safetensors only: no pickle is ever opened."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rayxfer.errors import ConfigError
from rayxfer.metadata import ParamMeta
from rayxfer.source import WeightSource

__all__ = ["CheckpointSource"]

# the format's own names (safetensors 0.4 and later)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointSource(WeightSource):
    """The tensors of every `*.safetensors` file of a folder (or of one file), under their own names.

    These are checkpoint names, which is what vLLM's loaders expect, also where the names inside a Hugging
    Face module are others. Read anew in every pass, one tensor at a time.

    Raises:
        ConfigError: no such file, none in the folder, a name in two files, or a dtype that torch lacks.
    """

    def __init__(self, path: str | Path) -> None:
        from safetensors import safe_open

        root = Path(path)
        files = sorted(root.glob("*.safetensors")) if root.is_dir() else [root]
        if not files or not all(file.is_file() for file in files):
            raise ConfigError(f"{str(path)!r} holds no .safetensors file")
        self._where: dict[str, Path] = {}
        self._metadata: list[ParamMeta] = []
        for file in files:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    self._add(name, file, opened.get_slice(name))

    def _add(self, name: str, file: Path, piece: Any) -> None:
        if name in self._where:
            raise ConfigError(f"{name!r} is in {self._where[name].name} and in {file.name}")
        kind = piece.get_dtype()
        if kind not in _DTYPES:
            raise ConfigError(f"{name!r} in {file.name} has dtype {kind}: torch has none like it")
        self._where[name] = file
        self._metadata.append(ParamMeta(name, _DTYPES[kind], tuple(piece.get_shape())))

    def metadata(self) -> list[ParamMeta]:
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        from safetensors import safe_open

        file, opened = None, None
        for meta in self._metadata:
            if self._where[meta.name] != file:
                file = self._where[meta.name]
                opened = safe_open(file, framework="pt")
            assert opened is not None
            yield meta.name, opened.get_tensor(meta.name)  # type: ignore[no-untyped-call]
