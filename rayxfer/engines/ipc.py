"""`ipc`: CUDA IPC handles between processes that share a GPU. Not built yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from rayxfer.base import LoadWeights, WeightTransferEngine
from rayxfer.engines.cuda import require_cuda
from rayxfer.engines.gloo import GlooInitInfo, GlooUpdateInfo

__all__ = ["IPCEngine"]


class IPCEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Registered, so that the name is known; every use says why it cannot run."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    @classmethod
    def check_available(cls) -> None:
        require_cuda("ipc")

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        require_cuda("ipc")

    def receive_weights(self, update_info: GlooUpdateInfo, load_weights: LoadWeights) -> None:
        require_cuda("ipc")

    def shutdown(self) -> None:
        return None

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        require_cuda("ipc")
