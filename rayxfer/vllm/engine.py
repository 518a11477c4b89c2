"""vLLM's own weight-transfer API over any rayxfer engine.

For those who drive vLLM by its own calls (`init_weight_transfer_engine`, `start_weight_update`,
`update_weights`, `finish_weight_update`), and the place where the session of a `Controller` lives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rayxfer.base import WeightTransferEngine
from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.errors import ConfigError, StateError
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.loader import ModuleLoader
from rayxfer.metadata import ParamMeta, metadata_from_wire
from rayxfer.topology import transport_rank
from rayxfer.vllm.compat import Style, installed
from rayxfer.vllm.reload import Reload
from rayxfer.vllm.session import VLLMSession

__all__ = ["RayxferEngine", "RayxferInitInfo"]

_Base: Any
_Base, _STYLE = installed()


@dataclass
class RayxferInitInfo:
    """vLLM's `init_info` for backend "rayxfer".

    Attributes:
        backend: name of a rayxfer engine that is registered in this process.
        init_info: that engine's own.
        rank_offset: transport rank of this vLLM's first worker among the receivers, from 0.
        world_size: receivers in all; 0: this vLLM's own workers.
    """

    backend: str
    init_info: dict[str, Any] = field(default_factory=dict)
    rank_offset: int = 0
    world_size: int = 0


class RayxferEngine(_Base):  # type: ignore[misc]
    """Any rayxfer engine, a user's four-method one too, in vLLM.

    `init_info` is a `RayxferInitInfo`; `update_info` is the inner engine's own. With
    `is_checkpoint_format` (the default) weights go through vLLM's layer-wise reload, else they are
    copied by name. After a failed update the reload is put back and the next `start_weight_update`
    begins afresh; layers that were complete hold new weights, so the next update has to be a full one.
    """

    init_info_cls = RayxferInitInfo
    update_info_cls = dict
    supports_draft_weight_update = False

    def __init__(self, config: Any, other: Any, device: Any = None, model: Any = None) -> None:
        if _STYLE is Style.OWNS_MODEL:
            super().__init__(config, other, device, model)
            self._reload = Reload(model, other.model_config, other, device)
        else:
            super().__init__(config, other)
        self._engine: WeightTransferEngine[Any, Any] | None = None
        self._session: VLLMSession | None = None

    def rayxfer_session(self, worker: Any) -> VLLMSession:
        """The session that a `Controller` talks to. Made on first use."""
        if self._session is None:
            self._session = VLLMSession(worker)
        return self._session

    def parse_update_info(self, update_dict: dict[str, Any]) -> Any:
        """The inner engine's update info. Raises ConfigError naming the engine and the field."""
        return self._opened().parse_update_info(dict(update_dict))

    def init_transfer_engine(self, init_info: RayxferInitInfo) -> None:
        """Make the inner engine and open its channel."""
        self.shutdown()
        if not isinstance(init_info.backend, str) or not isinstance(init_info.init_info, dict):
            raise ConfigError("init_info: expected {'backend': name, 'init_info': {…}}")
        ours = self.parallel_config
        place = ParallelConfig(
            rank=transport_rank(
                int(init_info.rank_offset), ours.data_parallel_index, ours.world_size, ours.rank
            ),
            world_size=int(init_info.world_size) or ours.world_size,
            data_parallel_index=ours.data_parallel_index,
        )
        engine = WeightTransferEngineFactory.create_engine(
            WeightTransferConfig(backend=init_info.backend), place
        )
        engine.check_available()
        engine.init_transfer_engine(engine.parse_init_info(init_info.init_info))
        self._engine = engine

    def start_weight_update(self) -> None:
        """Forget what a failed update left. The reload itself starts with the first update."""
        self._reload.reset()

    def receive_weights(self, update_info: Any, load_weights: Any = None) -> None:
        """One update: everything that the inner engine receives goes into the model."""
        engine = self._opened()
        if load_weights is not None:  # vLLM 0.16: its worker runs the reload
            engine.receive_weights(update_info, load_weights)
            return
        try:
            if getattr(update_info, "is_checkpoint_format", True):
                if not self._reload.active:
                    self._reload.start()
                engine.receive_weights(update_info, self._reload.load)
            else:
                engine.receive_weights(update_info, _copy_by_name(self._reload.model, update_info))
        except BaseException:
            self._reload.reset()
            raise

    def finish_weight_update(self) -> None:
        """Process the layers that are left."""
        if self._reload.active:
            self._reload.finish()

    def shutdown(self) -> None:
        """Close the channel. Safe to call twice."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def _opened(self) -> WeightTransferEngine[Any, Any]:
        if self._engine is None:
            raise StateError("init_weight_transfer_engine has not been called on this vLLM worker")
        return self._engine

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.16's trainer half; rayxfer's trainers use the inner engine's own."""
        backend = dict(trainer_args)["backend"]
        cls = WeightTransferEngineFactory.get_engine_class(backend)
        cls.trainer_send_weights(iterator, trainer_args)


def _copy_by_name(model: Any, update_info: Any) -> Any:
    wire = {k: getattr(update_info, k) for k in ("names", "dtype_names", "shapes")}
    metadata: tuple[ParamMeta, ...] = metadata_from_wire(wire)
    loader = ModuleLoader(model, verify=False)
    problems = loader.preflight(metadata, partial=True).problems
    if problems:
        raise ConfigError("; ".join(problems[:3]))
    index = {meta.name: i for i, meta in enumerate(metadata)}

    def load(weights: list[tuple[str, Any]]) -> None:
        loader.load([(index[name], tensor) for name, tensor in weights])

    return load
