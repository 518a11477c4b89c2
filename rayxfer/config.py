"""What a user can set, checked when it is made."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from rayxfer.errors import ConfigError

__all__ = ["ParallelConfig", "WeightTransferConfig"]

Verify = Literal["digest", "off"]
LoadMode = Literal["in_place", "staged", "mapped"]
PauseMode = Literal["keep", "wait", "abort"]
CachePolicy = Literal["reset", "keep"]
Retain = Literal["none", "host"]
OnWorkerFailure = Literal["raise", "continue"]


@dataclass(frozen=True)
class ParallelConfig:
    """Where an engine stands among the receivers of its channel (the fields of vLLM's that matter).

    Attributes:
        rank: this receiver's place, 0 … world_size - 1.
        world_size: receivers in the channel; the sender is not counted.
        data_parallel_index: which replica of a vLLM deployment this is; 0 for plain workers.
    """

    rank: int = 0
    world_size: int = 1
    data_parallel_index: int = 0


@dataclass(frozen=True, kw_only=True)
class WeightTransferConfig:
    """How weights travel. Frozen; every field is checked on construction.

    Attributes:
        backend: a registered engine's name, "auto" (chosen per worker from the topology), or a
            sequence with one name per worker.
        init_info: extra fields for each worker's `init_transfer_engine`. For a four-method engine
            these are all the fields.
        update_info: extra fields for every `receive_weights`.
        trainer_args: extra entries of the dict that `trainer_send_weights` is given; they win.
        bucket_size_bytes: size of the wire unit; a larger tensor travels alone. None: the
            engine's own default.
        connect_timeout_s: for opening channels, counted from when all members answer `ping`.
        stall_timeout_s: longest time without a byte moved. Time inside a loader does not count.
        sync_timeout_s: for one whole `sync_weights`, retries included, connect excluded.
        verify: "digest" compares a 64-bit digest of every tensor end to end; "off" does not.
        load_mode: "in_place" writes into the live weights; "staged" keeps the old weights whole
            until commit (needs room for two); "mapped" lets workers with the default loader use one copy
            per host (`shm` on the sender's own, `gloo` on any; two versions per host, however many
            workers); over other backends it is "staged".
        pause_mode: what happens to running requests during an update, as in vLLM: "keep" freezes
            and continues them, "wait" lets them end first, "abort" ends them at once.
        cache_policy: "reset" runs each worker's cache hook after commit, "keep" does not.
        retain: "host" keeps one more copy of the weights on the controller's host, for workers that
            join when no other can give them the committed version; "none" does not.
        on_worker_failure: "raise" raises `PartialUpdate` after the survivors have committed;
            "continue" only reports.

    Raises:
        ConfigError: a value that breaks its rule; the message says which.
    """

    backend: str | Sequence[str] = "auto"
    init_info: Mapping[str, Any] = field(default_factory=dict)
    update_info: Mapping[str, Any] = field(default_factory=dict)
    trainer_args: Mapping[str, Any] = field(default_factory=dict)
    bucket_size_bytes: int | None = None
    connect_timeout_s: float = 60.0
    stall_timeout_s: float = 30.0
    sync_timeout_s: float = 600.0
    verify: Verify = "digest"
    load_mode: LoadMode = "in_place"
    pause_mode: PauseMode = "keep"
    cache_policy: CachePolicy = "reset"
    on_worker_failure: OnWorkerFailure = "raise"
    retain: Retain = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "backend", _check_backend(self.backend))
        for key in ("init_info", "update_info", "trainer_args"):
            value = getattr(self, key)
            if not isinstance(value, Mapping) or not all(isinstance(k, str) for k in value):
                raise ConfigError(f"{key}={value!r}: expected a mapping with string keys")
            if key != "trainer_args":  # those never leave the trainer's process
                _check_plain(value, key)
            object.__setattr__(self, key, dict(value))
        size = self.bucket_size_bytes
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"bucket_size_bytes={size!r}: expected an int >= 1, or None")
        for key in ("connect_timeout_s", "stall_timeout_s", "sync_timeout_s"):
            value = getattr(self, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not number or not 0 < value <= sys.float_info.max:
                raise ConfigError(f"{key}={value!r}: expected a finite number of seconds > 0")
            object.__setattr__(self, key, float(value))
        for key, choices in (
            ("verify", get_args(Verify)),
            ("load_mode", get_args(LoadMode)),
            ("pause_mode", get_args(PauseMode)),
            ("cache_policy", get_args(CachePolicy)),
            ("on_worker_failure", get_args(OnWorkerFailure)),
            ("retain", get_args(Retain)),
        ):
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(
                    f"{key}={value!r}: expected one of {', '.join(map(repr, choices))}"
                )

    def backend_of(self, rank: int) -> str:
        """The backend asked for by the worker at place `rank` of the constructor's list."""
        return self.backend if isinstance(self.backend, str) else self.backend[rank]

    @property
    def backends(self) -> tuple[str, ...]:
        """The distinct names asked for, in order."""
        names = (self.backend,) if isinstance(self.backend, str) else tuple(self.backend)
        return tuple(dict.fromkeys(names))


def _check_plain(value: Any, where: str) -> None:
    """What travels to workers is data: nothing whose unpickling could run code."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, (str, int)):
                raise ConfigError(f"{where} holds the key {key!r}: expected strings")
            _check_plain(inner, f"{where}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            _check_plain(inner, f"{where}[{index}]")
    elif type(value) not in (type(None), bool, int, float, str, bytes):
        raise ConfigError(
            f"{where} is a {type(value).__name__}: what travels to workers is plain data (None, bool, "
            "int, float, str, bytes, and lists and mappings of them)"
        )


def _check_backend(backend: Any) -> str | tuple[str, ...]:
    if isinstance(backend, str):
        if not backend:
            raise ConfigError("backend='': expected a registered name or 'auto'")
        return backend
    if not isinstance(backend, Sequence) or not all(isinstance(b, str) and b for b in backend):
        raise ConfigError(
            f"backend={backend!r}: expected a name, or a sequence of names, one per worker"
        )
    if not backend:
        raise ConfigError("backend=[]: expected one name per worker")
    return tuple(backend)
