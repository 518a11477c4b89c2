"""Where actors go: options for `Actor.options(**…)` over one Ray placement group."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup

from rayxfer.errors import ConfigError, TransferTimeout

__all__ = ["Placement", "this_node"]


class Placement:
    """A trainer and some inference workers, each in a bundle of its own.

    Args:
        num_workers: inference workers.
        worker, trainer: resources of each, for example `{"CPU": 1}` or `{"CPU": 4, "GPU": 1}`.
        strategy: Ray's: "PACK" (as close as possible), "SPREAD", "STRICT_PACK", "STRICT_SPREAD".
        timeout_s: how long to wait for the cluster to have room.

    Raises:
        TransferTimeout: no room in time; nothing is reserved then.

    Example:
        with Placement(4, worker={"GPU": 1}, trainer={"GPU": 1}) as place:
            trainer = TrainerActor.options(**place.trainer()).remote(build_model)
            workers = [InferenceActor.options(**place.worker(i)).remote(build_model) for i in range(4)]
    """

    def __init__(
        self,
        num_workers: int,
        *,
        worker: dict[str, float] | None = None,
        trainer: dict[str, float] | None = None,
        strategy: str = "PACK",
        timeout_s: float = 60.0,
    ) -> None:
        if num_workers < 1:
            raise ConfigError(f"num_workers={num_workers}: expected at least one")
        self._worker, self._trainer = worker or {"CPU": 1}, trainer or {"CPU": 1}
        self._num_workers = num_workers
        bundles = [self._trainer] + [self._worker] * num_workers
        self._group: Any = placement_group([dict(b) for b in bundles], strategy=strategy)
        if not self._group.wait(timeout_s):
            self.remove()
            raise TransferTimeout(
                f"the cluster has no room for {bundles} ({strategy}) within {timeout_s:g} s"
            )

    def _options(self, bundle: int, resources: dict[str, float]) -> dict[str, Any]:
        rest = {k: v for k, v in resources.items() if k not in ("CPU", "GPU")}
        return {
            "num_cpus": resources.get("CPU", 0),
            "num_gpus": resources.get("GPU", 0),
            **({"resources": rest} if rest else {}),
            "scheduling_strategy": InGroup(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        }

    def trainer(self) -> dict[str, Any]:
        """Options for the trainer."""
        return self._options(0, self._trainer)

    def worker(self, index: int) -> dict[str, Any]:
        """Options for inference worker `index`."""
        if not 0 <= index < self._num_workers:
            raise ConfigError(f"worker {index} of {self._num_workers}")
        return self._options(1 + index, self._worker)

    def remove(self) -> None:
        """Give the reservation back (actors in it are ended by Ray). Safe to call twice."""
        group, self._group = self._group, None
        if group is not None and ray.is_initialized():
            remove_placement_group(group)

    def __enter__(self) -> Placement:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


def this_node(*, soft: bool = False) -> dict[str, Any]:
    """Options that put an actor on the caller's node (where `shm` and `ipc` can reach it)."""
    node = ray.get_runtime_context().get_node_id()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=soft)}
