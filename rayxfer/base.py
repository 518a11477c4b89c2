"""The weight-transfer contract.

The shape is vLLM's (`vllm.distributed.weight_transfer.base`, as documented for vLLM 0.16): an engine
written for it needs only its import lines changed. Four abstract methods make a working engine; all
else in this file is optional and has a default that works.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch

from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.errors import ConfigError
from rayxfer.metadata import ParamMeta
from rayxfer.topology import Facts

__all__ = [
    "LoadWeights",
    "SessionPlan",
    "WeightTransferEngine",
    "WeightTransferInitInfo",
    "WeightTransferInitRequest",
    "WeightTransferUpdateInfo",
    "WeightTransferUpdateRequest",
]

LoadWeights = Callable[[list[tuple[str, torch.Tensor]]], Any]
"""What `receive_weights` is given: takes a few weights at a time, never the whole model."""


@dataclass
class WeightTransferInitInfo(ABC):  # noqa: B024 - vLLM's contract: a base to extend, no methods
    """What an engine needs to open its channel on a worker. Extend it with the engine's fields."""


@dataclass
class WeightTransferUpdateInfo(ABC):  # noqa: B024 - as above
    """What an engine needs for one round. Extend it with fields without defaults.

    Attributes:
        is_checkpoint_format: True: names and layout are those of a checkpoint, and the worker runs
            its own processing (renaming, fusing, repacking) before the weights are used. False: the
            tensors already are the worker's parameters and are copied by name as they are.
    """

    is_checkpoint_format: bool = field(default=True, kw_only=True)


@dataclass
class WeightTransferInitRequest:
    """A request to open a channel: backend-agnostic, a plain dict."""

    init_info: dict[str, Any] = field(default_factory=dict)


@dataclass
class WeightTransferUpdateRequest:
    """A request to receive one round: backend-agnostic, a plain dict."""

    update_info: dict[str, Any] = field(default_factory=dict)


TInitInfo = TypeVar("TInitInfo", bound=WeightTransferInitInfo)
TUpdateInfo = TypeVar("TUpdateInfo", bound=WeightTransferUpdateInfo)
_TInfo = TypeVar("_TInfo")


@dataclass(frozen=True)
class SessionPlan:
    """What the sender knows when it opens one channel: one engine over some workers.

    Attributes:
        session_id: unique per connect; on every message.
        token: 16 random bytes, hex; proves that a peer belongs to this session.
        config: the user's settings.
        bucket_size_bytes: the wire unit of this session; the sender's plan governs.
        sender: facts about the sending process.
        workers: facts about each receiver, in the order of their transport ranks.
        deadline_s: seconds left for the connect.
        metadata: of what the first round will send.
        kept: the engine's own, for what outlives a channel: the same dict at every connect of one
            sender.
    """

    session_id: str
    token: str
    config: WeightTransferConfig
    bucket_size_bytes: int
    sender: Facts
    workers: tuple[Facts, ...]
    deadline_s: float
    metadata: tuple[ParamMeta, ...] = ()
    kept: dict[str, Any] = field(default_factory=dict)


class WeightTransferEngine(ABC, Generic[TInitInfo, TUpdateInfo]):
    """Moves bytes from one sender to some workers. Subclass it, register it, run `check_engine` on it.

    An instance lives on each worker and only receives; sending is static, in the trainer's process.

    Args:
        config: the user's settings.
        parallel_config: this receiver's place (`rank`, `world_size`, `data_parallel_index`).
    """

    init_info_cls: type[TInitInfo]
    update_info_cls: type[TUpdateInfo]

    kept: dict[str, Any] | None
    """The engine's own, for what outlives a channel at a worker: the same dict at every connect of one
    controller. None at a worker that uses nothing where it lies."""

    # ---- optional class attributes: what the engine promises the rest of rayxfer ----------------

    copies_before_next: ClassVar[bool] = False
    """True: `trainer_send_weights` no longer needs a tensor once it has asked for the next one.
    False (the safe default): tensors of sources that reuse their memory are cloned first."""

    default_bucket_size_bytes: ClassVar[int] = 16 << 20
    """The wire unit when the user sets none."""

    uses_push: ClassVar[bool] = False
    """True: payloads travel with the update calls (`trainer_args["push"]`, `on_push`)."""

    gated: ClassVar[bool] = False
    """True: where `trainer_args["gate"]` is given, nothing is sent before every worker of the channel has
    called `enter` with that number. Then workers look at an offer and receive it in one call. A class that
    has a `trainer_send_weights` or an `enter` of its own says it anew: it does not inherit it."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        own = vars(cls)
        if "gated" not in own and ("trainer_send_weights" in own or "enter" in own):
            cls.gated = False

    def __init__(
        self,
        config: WeightTransferConfig | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        self.config = config if config is not None else WeightTransferConfig()
        self.parallel_config = parallel_config if parallel_config is not None else ParallelConfig()
        self.kept = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> TInitInfo:
        """The typed init info of a plain dict.

        Raises:
            ConfigError: (a ValueError) naming this engine and the bad field.
        """
        return _parse(self, self.init_info_cls, init_dict, "init_info")

    def parse_update_info(self, update_dict: dict[str, Any]) -> TUpdateInfo:
        """The typed update info of a plain dict.

        Raises:
            ConfigError: (a ValueError) naming this engine and the bad field.
        """
        return _parse(self, self.update_info_cls, update_dict, "update_info")

    # ---- the contract: four methods ------------------------------------------------------------

    @abstractmethod
    def init_transfer_engine(self, init_info: TInitInfo) -> None:
        """Inference side: open the communication channel. Called once per connect."""

    @abstractmethod
    def receive_weights(self, update_info: TUpdateInfo, load_weights: LoadWeights) -> None:
        """Inference side: receive one round and hand it over piece by piece.

        `load_weights` takes `list[(name, tensor)]`; tensors belong to the loader from then on,
        unless it says `copies_only` (then views are welcome). It raises when the round is aborted;
        let that pass. Runs in a thread of its own, once per round.
        """

    @abstractmethod
    def shutdown(self) -> None:
        """Inference side: release everything. Safe to call twice, and after a failed init."""

    @staticmethod
    @abstractmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Trainer side: send what the iterator yields to every worker of the channel.

        Returns when all bytes are out and no yielded tensor is needed any more. The iterator raises
        when the round is aborted; let that pass. Runs in a thread of its own, once per round.
        """

    # ---- optional hooks, all with defaults that work -------------------------------------------

    @classmethod
    def check_available(cls) -> None:
        """Raise `BackendUnavailable` with the reason if this engine cannot run in this process."""

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[Any, list[dict[str, Any]]]:
        """Open the trainer's end. Returns (channel, one init_info per worker); must not block on
        the workers. Default: no channel, `config.init_info` for each."""
        return None, [dict(plan.config.init_info) for _ in plan.workers]

    @classmethod
    def trainer_connect(cls, channel: Any, timeout_s: float) -> None:
        """Complete the trainer's end while the workers run `init_transfer_engine`. May block."""

    @classmethod
    def trainer_close(cls, channel: Any) -> None:
        """Release the trainer's end. Safe to call twice."""

    @classmethod
    def trainer_abort(cls, channel: Any) -> None:
        """Make a blocked `trainer_send_weights` or `trainer_connect` return or raise soon."""

    @classmethod
    def round_update_info(cls, channel: Any, metadata: Sequence[ParamMeta]) -> dict[str, Any]:
        """Extra fields of this round's `update_info`."""
        return {}

    @classmethod
    def reached(cls, channel: Any, names: Sequence[str]) -> list[str]:
        """What a report should say of the way to each worker of a connected channel ("": nothing), in
        the order of transport ranks; `names`: how to call them."""
        return ["" for _ in names]

    @classmethod
    def provers(cls, channel: Any) -> list[int]:
        """Under `load_mode="mapped"`: for each worker, in the order of transport ranks, the one (from 0)
        that proves what it loaded for all who use the same copy. An empty list: the first for all."""
        return []

    @classmethod
    def upstream(cls, channel: Any) -> list[int]:
        """For each worker, in the order of transport ranks, the one (from 0) that it gets its bytes
        from, or -1: the sender. An empty list: all from the sender."""
        return []

    def abort(self) -> None:
        """Make a blocked `receive_weights` or `init_transfer_engine` return or raise soon. Called
        from another thread; the engine is shut down afterwards. Default: nothing (the next
        `load_weights` raises)."""

    def enter(self, gate: int) -> None:
        """This worker takes what is offered (engines that are `gated`). Returns once all do, so that
        something is on its way; raises as `receive_weights` does."""
        raise NotImplementedError(f"{type(self).__name__} has no gate")

    def on_push(self, sequence: int, payload: Any) -> threading.Event:
        """Take payload number `sequence` of a `uses_push` engine, without blocking; called from
        another thread, in any order. Returns an event that is set once it was consumed."""
        raise NotImplementedError(f"{type(self).__name__} takes no payloads")


def _parse(engine: object, cls: type[_TInfo], data: Any, what: str) -> _TInfo:
    owner = type(engine).__name__
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise ConfigError(
            f"Invalid {what} for {owner}: expected a dict with string keys, got {type(data).__name__}"
        )
    if dataclasses.is_dataclass(cls):
        known = _parameters(cls)  # fields, and InitVars, which are none
        unknown = [key for key in data if key not in known]
        missing = [n for n, p in known.items() if n not in data and p.default is p.empty]
        if unknown or missing:
            parts = [f"unknown field {key!r}" for key in unknown]
            parts += [f"missing field {name!r}" for name in missing]
            raise ConfigError(
                f"Invalid {what} for {owner}: {', '.join(parts)}; "
                f"{cls.__name__} has {', '.join(known) or 'no fields'}"
            )
        flag = data.get("is_checkpoint_format", True)
        if not isinstance(flag, bool):
            raise ConfigError(
                f"Invalid {what} for {owner}: field 'is_checkpoint_format' is {flag!r}, not a bool"
            )
    try:
        return cls(**data)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Invalid {what} for {owner}: {error}", cause=error) from error


@functools.lru_cache(maxsize=64)
def _parameters(cls: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(cls).parameters
