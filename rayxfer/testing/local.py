"""The whole protocol in one process: real sessions, real engines, threads instead of actors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from rayxfer import background
from rayxfer.background import SyncHandle
from rayxfer.binding import Binding
from rayxfer.client import InProcessClient, WorkerClient
from rayxfer.config import WeightTransferConfig
from rayxfer.coordinator import Coordinator
from rayxfer.factory import EngineEntry, WeightTransferEngineFactory
from rayxfer.report import Status, SyncReport
from rayxfer.sender import Sender
from rayxfer.session import WorkerSession
from rayxfer.source import as_source

__all__ = ["LocalController"]

_count = itertools.count()


class LocalController:
    """Like `Controller`, with models of this process (or of others, see `ProcessWorker`) as its workers.

    What differs from the real thing is only how messages travel, so it shows what an engine, a source
    or a loader does; not what a network, a crash or another process does.

    Args:
        workers: one model, one `Binding`, or one client (a `ProcessWorker`) per worker.
        config: settings.

    Raises:
        as `Controller`.
    """

    def __init__(
        self,
        workers: Sequence[torch.nn.Module | Binding | WorkerClient],
        config: WeightTransferConfig | None = None,
    ) -> None:
        config = config if config is not None else WeightTransferConfig()
        entries: dict[str, EngineEntry] = {
            name: WeightTransferEngineFactory.entry(name)
            for name in config.backends
            if name != "auto"
        }
        self.sessions: list[WorkerSession] = []
        clients: list[WorkerClient] = []
        for one in workers:
            if isinstance(one, WorkerClient):
                clients.append(one)
                continue
            self.sessions.append(WorkerSession(one if isinstance(one, Binding) else Binding(one)))
            clients.append(InProcessClient(self.sessions[-1]))
        self._config = config
        self._coordinator = Coordinator(f"local-{next(_count)}", clients, config)
        self._coordinator.open()
        self._sender = Sender(self._coordinator, entries)

    def sync_weights(
        self, model: Any, *, version: int | None = None, partial: bool = False
    ) -> SyncReport:
        """As `Controller.sync_weights`, for a module, a mapping or a source."""
        source = as_source(model)
        self._sender.turns.take(
            background=False, timeout_s=self._config.sync_timeout_s, who="this controller"
        )
        try:
            return self._sender.sync(source, version=version, partial=partial)
        finally:
            self._sender.turns.give_back()

    def sync_weights_async(
        self, model: Any, *, version: int | None = None, partial: bool = False
    ) -> SyncHandle:
        """As `Controller.sync_weights_async`, for a module, a mapping or a source."""
        return background.start(
            self._sender,
            as_source(model),
            version=version,
            partial=partial,
            timeout_s=self._config.sync_timeout_s,
            who="this controller",
        )

    def status(self) -> Status:
        """As `Controller.status`."""
        return self._coordinator.status()

    def shutdown(self) -> None:
        """Close every channel and let the workers go. Safe to call twice."""
        stall = self._config.stall_timeout_s
        background.end(self._sender, stall, 2 * stall)
        self._sender.close()
        self._coordinator.close()

    def __enter__(self) -> LocalController:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
