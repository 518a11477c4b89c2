"""rayxfer: from an RL trainer's weights to every inference worker, as Ray actors, in one call.

Importing this package loads the contract and nothing heavy: no engine module, no Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rayxfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.errors import (
    BackendUnavailable,
    ConfigError,
    ContractError,
    ControllerBusy,
    ControllerClosed,
    PartialUpdate,
    RayxferError,
    StateError,
    TransferError,
    TransferTimeout,
    UnknownBackend,
    WorkerLost,
)
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.metadata import ParamMeta
from rayxfer.report import Status, SyncReport, WorkerReport, WorkerState, WorkerStatus
from rayxfer.source import MappingSource, ModuleSource, WeightSource

if TYPE_CHECKING:
    from rayxfer.controller import Controller
    from rayxfer.loader import FuseRule
    from rayxfer.worker import WorkerMixin

__version__ = "0.1.0"

__all__ = [
    "BackendUnavailable",
    "ConfigError",
    "ContractError",
    "Controller",
    "ControllerBusy",
    "ControllerClosed",
    "FuseRule",
    "MappingSource",
    "ModuleSource",
    "ParallelConfig",
    "ParamMeta",
    "PartialUpdate",
    "RayxferError",
    "StateError",
    "Status",
    "SyncReport",
    "TransferError",
    "TransferTimeout",
    "UnknownBackend",
    "WeightSource",
    "WeightTransferConfig",
    "WeightTransferEngine",
    "WeightTransferEngineFactory",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
    "WorkerLost",
    "WorkerMixin",
    "WorkerReport",
    "WorkerState",
    "WorkerStatus",
]

_LAZY = {
    "Controller": "rayxfer.controller",
    "FuseRule": "rayxfer.loader",
    "WorkerMixin": "rayxfer.worker",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'rayxfer' has no attribute {name!r}")
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
