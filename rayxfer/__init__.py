"""rayxfer: from an RL trainer's weights to every inference worker, as Ray actors, in one call.

Everything here loads on first access, so that importing this package costs next to nothing: no engine
module, no Ray, and not even torch (the controller actor does without it, and starts in a moment).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayxfer.background import SyncHandle
    from rayxfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferInitRequest,
        WeightTransferUpdateInfo,
        WeightTransferUpdateRequest,
    )
    from rayxfer.config import ParallelConfig, WeightTransferConfig
    from rayxfer.controller import Controller
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
    from rayxfer.loader import FuseRule
    from rayxfer.metadata import ParamMeta
    from rayxfer.placement import share_memory
    from rayxfer.report import Status, SyncReport, WorkerReport, WorkerState, WorkerStatus
    from rayxfer.source import MappingSource, ModuleSource, WeightSource
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
    "SyncHandle",
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
    "share_memory",
]

_HOMES = {
    "background": ("SyncHandle",),
    "base": (
        "WeightTransferEngine",
        "WeightTransferInitInfo",
        "WeightTransferInitRequest",
        "WeightTransferUpdateInfo",
        "WeightTransferUpdateRequest",
    ),
    "config": ("ParallelConfig", "WeightTransferConfig"),
    "controller": ("Controller",),
    "errors": (
        "BackendUnavailable",
        "ConfigError",
        "ContractError",
        "ControllerBusy",
        "ControllerClosed",
        "PartialUpdate",
        "RayxferError",
        "StateError",
        "TransferError",
        "TransferTimeout",
        "UnknownBackend",
        "WorkerLost",
    ),
    "factory": ("WeightTransferEngineFactory",),
    "loader": ("FuseRule",),
    "metadata": ("ParamMeta",),
    "placement": ("share_memory",),
    "report": ("Status", "SyncReport", "WorkerReport", "WorkerState", "WorkerStatus"),
    "source": ("MappingSource", "ModuleSource", "WeightSource"),
    "worker": ("WorkerMixin",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
_SUBMODULES = frozenset({*_HOMES, "digest", "packing", "session", "sender", "testing", "topology"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"rayxfer.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'rayxfer' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rayxfer.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
