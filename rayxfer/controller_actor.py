"""The controller actor: `Coordinator` with a clock, wrapped for Ray.

Kept apart from the handle so that this process imports no torch: it starts in a fraction of a second and
takes little memory.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cloudpickle
import ray

from rayxfer.client import reconstructed
from rayxfer.config import WeightTransferConfig
from rayxfer.coordinator import Coordinator
from rayxfer.report import Status

__all__ = ["NAMESPACE", "ControllerActor", "controller_actor_class"]

NAMESPACE = "rayxfer"
"""Ray namespace of every controller."""

_GROUPS = {"status": 4, "membership": 2}
"""Threads: `status` and leases never wait behind a `begin`, nor a commit behind a join."""


class ControllerActor(Coordinator):
    """The plain class, plus a clock. Runs as a Ray actor."""

    def __init__(
        self,
        name: str,
        workers: bytes,
        config: WeightTransferConfig,
        entries: bytes,
        controller_id: str,
        keeper: bytes,
    ) -> None:
        with _without_torch():
            # As bytes: Ray warns about restartable actors that are given handles.
            handles = cloudpickle.loads(workers)
            super().__init__(
                name,
                handles,
                config,
                entries,
                controller_id,
                owner_alive,
                cloudpickle.loads(keeper),
            )
            if reconstructed():
                self.recover()
        threading.Thread(target=self._tick_forever, name="rayxfer-tick", daemon=True).start()

    def _tick_forever(self) -> None:
        while not self._closed:
            time.sleep(1.0)
            self.tick()

    def present(self, told: bytes) -> None:  # type: ignore[override]
        with _without_torch():
            super().present(cloudpickle.loads(told))

    @ray.method(concurrency_group="status")
    def status(self) -> Status:
        return super().status()

    @ray.method(concurrency_group="status")
    def controller_id(self) -> str:
        return super().controller_id()

    @ray.method(concurrency_group="status")
    def renew(self, claim: dict[str, Any]) -> None:
        super().renew(claim)

    @ray.method(concurrency_group="membership")
    def add_workers(
        self, workers: list[Any], backends: list[str], entries: bytes = b""
    ) -> list[int]:
        return super().add_workers(workers, backends, entries)

    @ray.method(concurrency_group="membership")
    def remove_workers(self, ranks: list[int], workers: list[Any]) -> None:
        super().remove_workers(ranks, workers)


@contextmanager
def _without_torch() -> Iterator[None]:
    """Handles that are unpickled in here do not bring their actors' classes along.

    With a handle Ray imports the actor's class, and that imports torch: 1.2 s and 190 MiB for nothing,
    while a sync may be waiting for this process. Where the import fails Ray makes a stand-in with the
    same methods, which is all that `RayClient` needs. Later imports of torch (an error's cause may
    need it) work as ever.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def owner_alive(owner: dict[str, Any]) -> bool:
    try:
        actor = ray.get_actor(owner["name"], namespace=NAMESPACE)
        found: str = ray.get(actor.controller_id.remote(), timeout=2.0)
    except ValueError:
        return False  # Ray knows no such actor
    except ray.exceptions.GetTimeoutError:
        return True  # slow is not dead
    except ray.exceptions.RayError:
        return False
    return bool(found == owner["controller_id"])


def controller_actor_class() -> Any:
    """The Ray actor class."""
    return ray.remote(concurrency_groups=_GROUPS)(ControllerActor)
