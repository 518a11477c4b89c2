"""The local Ray that a run starts for itself."""

from __future__ import annotations

from typing import Any

import ray

_settings: dict[str, Any] = {}


def start(store_bytes: int) -> None:
    """A Ray on this machine. CPUs are a number to Ray, and no actor here asks for any."""
    _settings.update(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=store_bytes,
    )
    ray.init(**_settings)


def restart() -> None:
    """The same again, with an object store whose pages nobody has touched."""
    ray.shutdown()
    ray.init(**_settings)
