"""Which of vLLM's weight-transfer APIs is installed. The classes here stand in for vLLM's own."""

from __future__ import annotations

from typing import Any

import pytest

from rayxfer import BackendUnavailable
from rayxfer.vllm.compat import Style, style_of
from tests.vllm.conftest import HAS_VLLM


class Like016:
    def __init__(self, config: Any, parallel_config: Any) -> None: ...

    def receive_weights(self, update_info: Any, load_weights: Any) -> None: ...


class Like032:
    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None: ...

    def start_weight_update(self) -> None: ...

    def receive_weights(self, update_info: Any) -> None: ...

    def finish_weight_update(self) -> None: ...


class Unknown:
    def __init__(self, config: Any) -> None: ...

    def receive_weights(self, stream: Any) -> None: ...


def test_both_known_styles() -> None:
    assert style_of(Like016) is Style.HANDS_LOADER
    assert style_of(Like032) is Style.OWNS_MODEL


@pytest.mark.parametrize("base", [Unknown, object])
def test_an_unknown_one_says_what_it_found(base: type[Any]) -> None:
    with pytest.raises(BackendUnavailable, match="rayxfer knows"):
        style_of(base)


@pytest.mark.skipif(HAS_VLLM, reason="vLLM is installed")
def test_without_vllm_it_says_what_is_missing() -> None:
    from rayxfer.vllm.compat import installed

    with pytest.raises(BackendUnavailable, match="not installed"):
        installed()


@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_the_installed_one_is_known() -> None:
    from rayxfer.vllm.compat import installed

    assert installed()[1] is Style.OWNS_MODEL
