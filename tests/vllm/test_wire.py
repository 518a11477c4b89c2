"""Control messages as text: everything comes back, nothing is executed, the rest is refused."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayxfer import (
    ConfigError,
    ContractError,
    RayxferError,
    TransferError,
    TransferTimeout,
    WorkerLost,
)
from rayxfer.delivery import RoundAborted
from rayxfer.report import WorkerState
from rayxfer.vllm.wire import decode, encode

# two keys are the format's own
keys = st.text().filter(lambda text: not text.startswith("__"))
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(keys, inner),
)


@given(st.dictionaries(keys, plain))
def test_plain_data_comes_back(message: dict[str, object]) -> None:
    assert decode(encode({"k": message}))["k"] == message


def test_tuples_and_enums_become_plain() -> None:
    assert decode(encode({"a": (1, 2), "s": WorkerState.READY})) == {"a": [1, 2], "s": "READY"}


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("no"),
        ContractError("off", problems=("a", "b"), name="x", worker=2, phase="prepare"),
        TransferError("t", phase="update", weight_version=7, name="y", cause=ValueError("why")),
        TransferTimeout("late", phase="connect", worker=0),
        WorkerLost("gone"),
    ],
)
def test_errors_keep_class_fields_and_cause(error: RayxferError) -> None:
    back = decode(encode({"raised": error}))["raised"]
    assert type(back) is type(error)
    ours = {key: value for key, value in error.__dict__.items() if key != "cause"}
    assert {key: back.__dict__[key] for key in ours} == ours
    assert str(back) == str(error)
    if error.cause is not None:
        assert (back.cause.type_name, back.cause.message) == ("ValueError", "why")
    pickle.loads(pickle.dumps(back))


def test_a_private_error_travels_as_its_public_parent() -> None:
    back = decode(encode({"raised": RoundAborted("over", phase="update")}))["raised"]
    assert type(back) is TransferError
    assert (back.message, back.phase) == ("over", "update")


@pytest.mark.parametrize("value", [object(), {1: 2}, {3}, lambda: None, ConfigError])
def test_what_is_not_plain_is_refused(value: object) -> None:
    with pytest.raises(ContractError):
        encode({"value": value})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{",
        "\x80\x04K\x01.",
        '{"a": {"__bytes__": 3}}',
        '{"a": {"__bytes__": "$$"}}',
        '{"a": {"__error__": {}}}',
        '{"a": {"__error__": 3}}',
        '{"a": {"__error__": {"class": "SystemExit"}}}',
        '{"a": {"__error__": {"class": "os.system", "message": "x"}}}',
        "[" * 100_000,
    ],
)
def test_hostile_text_is_refused(text: str) -> None:
    with pytest.raises(ContractError):
        decode(text)


def test_an_error_that_names_a_method_does_not_replace_it() -> None:
    text = json.dumps({"a": {"__error__": {"class": "ConfigError", "message": "m", "cause": None}}})
    assert isinstance(decode(text)["a"], ConfigError)
