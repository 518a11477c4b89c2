"""What vLLM loads: registers backend "rayxfer", and the way in for control messages.

Entry point `rayxfer = rayxfer.vllm.plugin:register` in the group `vllm.general_plugins`, which vLLM loads
in every one of its processes. Where rayxfer is not installed but importable,
`worker_extension_cls="rayxfer.vllm.extension.WorkerExtension"` does the same.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from rayxfer.errors import (
    ConfigError,
    RayxferError,
    StateError,
    TransferError,
    UnknownBackend,
    portable_cause,
)
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.vllm.wire import decode, encode

__all__ = ["BACKEND", "ENGINES_VARIABLE", "register"]

BACKEND = "rayxfer"

ENGINES_VARIABLE = "RAYXFER_VLLM_ENGINES"
"""Environment variable of the serving process: more engines to register there, as
`name=module.path:ClassName`, comma-separated. Engines arrive by name only, never by request."""


def register() -> None:
    """Make rayxfer known to the vLLM in this process. Safe to call again.

    Raises:
        BackendUnavailable: no vLLM, or one whose API is unknown (see `rayxfer.vllm.compat`).
        ConfigError: `RAYXFER_VLLM_ENGINES` makes no sense.
    """
    from rayxfer.vllm.compat import installed

    installed()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Theirs
    from vllm.v1.worker.worker_base import WorkerBase

    if BACKEND not in Theirs._registry:
        Theirs.register_engine(BACKEND, "rayxfer.vllm.engine", "RayxferEngine")
    WorkerBase.rayxfer_call = rayxfer_call
    for name, module, cls in _named_engines(os.environ.get(ENGINES_VARIABLE, "")):
        try:
            WeightTransferEngineFactory.get_engine_class(name)
        except UnknownBackend:
            WeightTransferEngineFactory.register_engine(name, module, cls)


def rayxfer_call(worker: Any, op: str, message: str) -> str:
    """One control message to the session of a vLLM worker; answer and errors as text.

    Becomes a method of vLLM's worker class, for `collective_rpc("rayxfer_call", args=(op, message))`.
    Takes at most as long as the message's `wait_s`.
    """
    try:
        asked = decode(message)
        if "entry" in asked:
            # by name only: a request never brings an import string or a class with it
            name = str(dict(asked["entry"])["name"])
            asked["entry"] = asdict(WeightTransferEngineFactory.entry(name))
        if "ranks" in asked:  # what is different from rank to rank
            asked |= dict(asked.pop("ranks")[worker.rank])
        return encode(session_of(worker).handle(op, asked))
    except RayxferError as error:
        return encode({"raised": error})
    except Exception as error:
        text = f"{op} failed inside vLLM: {type(error).__name__}: {error}"
        return encode({"raised": TransferError(text, cause=portable_cause(error))})


def session_of(worker: Any) -> Any:
    """The session of a vLLM worker that was started with backend "rayxfer".

    Raises:
        StateError: it was started with another, or with none.
    """
    engine = getattr(worker, "weight_transfer_engine", None)
    session = getattr(engine, "rayxfer_session", None)
    if session is None:
        what = "none" if engine is None else type(engine).__name__
        raise StateError(
            'this vLLM was not started with weight_transfer_config={"backend": "rayxfer"} '
            f"(its weight-transfer engine: {what})"
        )
    return session(worker)


def _named_engines(text: str) -> list[tuple[str, str, str]]:
    found = []
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, _, target = item.partition("=")
        module, _, cls = target.partition(":")
        if not (name and module and cls):
            raise ConfigError(f"{ENGINES_VARIABLE}: {item!r} is not name=module.path:ClassName")
        found.append((name, module, cls))
    return found
