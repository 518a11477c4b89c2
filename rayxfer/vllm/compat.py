"""What the installed vLLM's weight-transfer API looks like, and whether rayxfer knows it."""

from __future__ import annotations

import inspect
from enum import Enum
from typing import Any

from rayxfer.errors import BackendUnavailable

__all__ = ["Style", "installed", "style_of"]


class Style(Enum):
    """Who does what in a vLLM engine class.

    HANDS_LOADER: (vLLM 0.16) built as `Engine(config, parallel_config)`;
        `receive_weights(update_info, load_weights)`; the worker runs the layer-wise reload around it.
    OWNS_MODEL: (vLLM 0.32) built as `Engine(config, vllm_config, device, model)`;
        `start_weight_update()`, `receive_weights(update_info)`, `finish_weight_update()`; the engine
        runs the reload itself.
    """

    HANDS_LOADER = "receive_weights(update_info, load_weights)"
    OWNS_MODEL = "start_weight_update(), receive_weights(update_info), finish_weight_update()"


def style_of(base: type[Any]) -> Style:
    """The style of a vLLM `WeightTransferEngine` class.

    Raises:
        BackendUnavailable: neither of the known ones; says what was found.
    """
    receive = _arguments(base, "receive_weights")
    built = _arguments(base, "__init__")
    if receive == ["update_info", "load_weights"] and built[:2] == ["config", "parallel_config"]:
        return Style.HANDS_LOADER
    if (
        receive == ["update_info"]
        and built == ["config", "vllm_config", "device", "model"]
        and hasattr(base, "start_weight_update")
        and hasattr(base, "finish_weight_update")
    ):
        return Style.OWNS_MODEL
    known = "; or ".join(style.value for style in Style)
    raise BackendUnavailable(
        f"this vLLM's weight-transfer engines are built with ({', '.join(built)}) and receive with "
        f"({', '.join(receive)}); rayxfer knows: {known}"
    )


def installed() -> tuple[Any, Style]:
    """vLLM's engine base class and its style.

    Raises:
        BackendUnavailable: no vLLM, or one without (or with an unknown) weight transfer.
    """
    try:
        from vllm.distributed.weight_transfer.base import WeightTransferEngine
    except ImportError as error:
        raise BackendUnavailable(
            f"vLLM with weight transfer (0.16 or later) is not installed: {error}", cause=error
        ) from error
    return WeightTransferEngine, style_of(WeightTransferEngine)


def _arguments(cls: type[Any], method: str) -> list[str]:
    function = getattr(cls, method, None)
    if function is None:
        return []
    return [name for name in inspect.signature(function).parameters if name != "self"]
