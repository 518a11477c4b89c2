"""Control messages as JSON text: what crosses into vLLM's processes, and HTTP. Never a pickle."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

from rayxfer import errors
from rayxfer.errors import ContractError, RayxferError, RemoteCause

__all__ = ["decode", "encode"]

_BYTES, _ERROR = "__bytes__", "__error__"
_PLAIN = (str, int, float, bool, type(None))


def encode(message: dict[str, Any]) -> str:
    """Text for a message of plain data, bytes and errors of ours.

    Raises:
        ContractError: it holds something else.
    """
    return json.dumps(_pack(message), separators=(",", ":"))


def decode(text: str) -> dict[str, Any]:
    """The message again; tuples come back as lists.

    Raises:
        ContractError: no such message.
    """
    try:
        message = _unpack(json.loads(text))
    except (
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        binascii.Error,
        RecursionError,
    ) as error:
        raise ContractError(f"not a message of rayxfer's: {error}") from error
    if not isinstance(message, dict):
        raise ContractError(f"not a message of rayxfer's: a {type(message).__name__}")
    return message


def _pack(value: Any) -> Any:
    if isinstance(value, str):
        return str(value)  # str-based enums too
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        return {_BYTES: base64.b64encode(bytes(value)).decode()}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ContractError(f"a message has string keys, not {list(value)[:3]}")
        return {key: _pack(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_pack(item) for item in value]
    if isinstance(value, RayxferError):
        return {_ERROR: _pack(_error_state(value))}
    raise ContractError(f"a {type(value).__name__} cannot travel in a message: plain data only")


def _error_state(error: RayxferError) -> dict[str, Any]:
    # by the nearest public class: the other side may not know a private one
    cls = next(cls for cls in type(error).__mro__ if cls.__name__ in errors.__all__)
    state: dict[str, Any] = {"class": cls.__name__}
    for key, value in error.__dict__.items():
        if key == "cause":
            state["cause"] = None if value is None else [type(value).__name__, str(value)]
        elif isinstance(value, _PLAIN):
            state[key] = value
        elif isinstance(value, tuple) and all(isinstance(item, str) for item in value):
            state[key] = list(value)
    return state


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _BYTES in value:
        return base64.b64decode(value[_BYTES], validate=True)
    if _ERROR in value:
        return _error(value[_ERROR])
    return {key: _unpack(item) for key, item in value.items()}


def _error(state: dict[str, Any]) -> RayxferError:
    name = state.pop("class")
    cls = getattr(errors, name) if name in errors.__all__ and name != "RemoteCause" else None
    if cls is None:
        raise ContractError(f"an error of unknown class {name!r}")
    cause = state.pop("cause", None)
    error: RayxferError = cls.__new__(cls)
    text = str(state.get("message", name))
    RayxferError.__init__(error, text, cause=None if cause is None else RemoteCause(*cause))
    for key, value in state.items():
        setattr(error, key, tuple(value) if isinstance(value, list) else value)
    return error
