"""Real vLLM on a CPU. Skipped where vLLM is not installed; `make test` installs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

HAS_VLLM = importlib.util.find_spec("vllm") is not None

if not HAS_VLLM:
    collect_ignore_glob = ["test_real_*.py"]


@pytest.fixture(scope="session")
def fresh(ray_session: None) -> Iterator[Callable[[str], Any]]:
    """`fresh(path)`: the answers of a vLLM started from a checkpoint."""
    import ray

    from tests.vllm.tiny import Fresh

    actor = Fresh.remote()
    yield lambda path, **kwargs: ray.get(actor.answers.remote(path, **kwargs), timeout=110)
    ray.kill(actor)


@pytest.fixture(scope="module")
def spawn(
    ray_session: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Any]]:
    """`spawn(kind, seed, **engine_args)`: a VLLMActor serving that model."""
    import ray

    from actors import VLLMActor
    from tests.vllm.tiny import ENGINE_ARGS, build, save

    made: list[Any] = []
    folder: Path = tmp_path_factory.mktemp("models")

    def one(kind: str, seed: int, *, options: dict[str, Any] | None = None, **args: Any) -> Any:
        path = folder / f"{kind}-{seed}"
        if not path.exists():
            save(build(kind, seed), path)
        actor = VLLMActor.options(num_cpus=0, **(options or {})).remote(
            model=str(path), **{**ENGINE_ARGS, **args}
        )
        made.append(actor)
        ray.get(actor.ping.remote(), timeout=110)
        return actor

    yield one
    for actor in made:
        ray.kill(actor)
