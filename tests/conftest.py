"""Fixtures and settings that every test shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

# Read when Ray starts, also by the processes that it starts, so set before any import of Ray.
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import pytest
import torch
from hypothesis import settings

# The time limit of a test is pytest-timeout's. Hypothesis's own deadline per example would
# measure how busy the machine is.
settings.register_profile("rayxfer", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("rayxfer")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def _registrations_end_with_the_module() -> Iterator[None]:
    """Registration is per process, and so are the tests: one module's engines are not another's."""
    from rayxfer.factory import WeightTransferEngineFactory as Factory

    lazy, direct = dict(Factory._lazy), dict(Factory._direct)
    yield
    Factory._lazy, Factory._direct = lazy, direct


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """One local Ray for all tests. CPUs are a number to Ray: 8 of them run on any machine."""
    import ray

    ray.init(
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="rayxfer-tests",
        object_store_memory=512 * 1024 * 1024,
    )
    try:
        yield
    finally:
        ray.shutdown()
