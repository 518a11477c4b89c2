from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rayxfer import errors
from rayxfer.errors import (
    BackendUnavailable,
    ConfigError,
    ContractError,
    ControllerBusy,
    ControllerClosed,
    PartialUpdate,
    RayxferError,
    RemoteCause,
    StateError,
    TransferError,
    TransferTimeout,
    UnknownBackend,
    WorkerLost,
    portable_cause,
)
from rayxfer.report import SyncReport, WorkerReport, WorkerState

REPORT = SyncReport(
    version=7,
    num_bytes=123,
    num_tensors=2,
    seconds=0.5,
    workers=(
        WorkerReport(0, WorkerState.READY, 7, 0.4, "shm", verified="loaded", complete=True),
        WorkerReport(
            1,
            WorkerState.LOST,
            6,
            0.1,
            "gloo",
            casts={"a": "float32 -> bfloat16"},
            error=WorkerLost("worker 1 is gone", worker=1, cause=OSError(32, "Broken pipe")),
        ),
    ),
)

CAUSE = ValueError("underneath", 3)
TRANSFER = {
    "phase": "update",
    "weight_version": 7,
    "worker": 1,
    "name": "layers.0.weight",
    "report": REPORT,
    "cause": CAUSE,
}

ERRORS: list[tuple[type[RayxferError], dict[str, object]]] = [
    (RayxferError, {"cause": CAUSE}),
    (ConfigError, {"cause": CAUSE}),
    (UnknownBackend, {"cause": CAUSE}),
    (BackendUnavailable, {"cause": CAUSE}),
    (
        ContractError,
        {"problems": ("first", "second"), "name": "w", "worker": 2, "cause": CAUSE},
    ),
    (TransferError, TRANSFER),
    (TransferTimeout, TRANSFER),
    (WorkerLost, TRANSFER),
    (PartialUpdate, {"report": REPORT, "cause": CAUSE}),
    (StateError, {"cause": CAUSE}),
    (ControllerBusy, {"cause": CAUSE}),
    (ControllerClosed, {"cause": CAUSE}),
]
NAMES = [cls.__name__ for cls, _ in ERRORS]
MESSAGE = "value 3: expected 4, first at 'w'"

BUILT_IN = {
    ConfigError: ValueError,
    UnknownBackend: ValueError,
    BackendUnavailable: ImportError,
    TransferTimeout: TimeoutError,
}


def described(error: BaseException | None) -> object:
    """All that must survive, in a form that compares: exceptions themselves compare by identity."""
    if not isinstance(error, BaseException):
        return error
    fields = {key: described_field(value) for key, value in vars(error).items()}
    return type(error), str(error), error.args, fields


def described_field(value: object) -> object:
    if isinstance(value, BaseException):
        return described(value)
    if isinstance(value, SyncReport):
        return repr(value), [described(row.error) for row in value.workers]
    return value


class KeywordOnly(Exception):
    """Pickles without complaint and cannot be unpickled."""

    def __init__(self, *, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


class HoldsALock(Exception):
    def __init__(self) -> None:
        super().__init__("held")
        self.lock = threading.Lock()


class NoText(KeywordOnly):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("only known inside a function")


UNPICKLABLE = {
    "KeywordOnly": (lambda: KeywordOnly(code=5), "code 5"),
    "HoldsALock": (HoldsALock, "held"),
    "Local": (local_error, "only known inside a function"),
    "NoText": (lambda: NoText(code=5), "<no text>"),
}


# --- the tree -------------------------------------------------------------------------------


def test_every_class_is_covered_here() -> None:
    found = {
        getattr(errors, name)
        for name in errors.__all__
        if issubclass(getattr(errors, name), RayxferError)
    }
    assert found == {cls for cls, _ in ERRORS}


@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_bases(cls: type[RayxferError], fields: dict[str, object]) -> None:
    error = cls(MESSAGE, **fields)
    assert isinstance(error, RayxferError)
    built_in = (ValueError, ImportError, TimeoutError, OSError, KeyError, RuntimeError)
    expected = BUILT_IN.get(cls)
    found = {base for base in built_in if isinstance(error, base)}
    assert found == ({expected, OSError} if expected is TimeoutError else {expected} - {None})
    assert isinstance(error, TransferError) == (cls in (TransferError, TransferTimeout, WorkerLost))
    assert isinstance(error, StateError) == (cls in (StateError, ControllerBusy, ControllerClosed))


@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_fields_and_text(cls: type[RayxferError], fields: dict[str, object]) -> None:
    error = cls(MESSAGE, **fields)
    assert str(error) == error.message == MESSAGE
    assert error.args == (MESSAGE,)
    assert error.cause is error.__cause__ is CAUSE
    for key, value in fields.items():
        assert getattr(error, key) is value


@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_fields_default_to_nothing(cls: type[RayxferError], fields: dict[str, object]) -> None:
    error = cls(MESSAGE, report=REPORT) if cls is PartialUpdate else cls(MESSAGE)
    assert error.cause is None
    assert error.__cause__ is None
    for key in fields.keys() - {"cause"}:
        assert getattr(error, key) == (
            () if key == "problems" else REPORT if cls is PartialUpdate else None
        )


# --- pickle ---------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_pickle_keeps_everything(
    cls: type[RayxferError], fields: dict[str, object], protocol: int
) -> None:
    error = cls(MESSAGE, **fields)
    error.add_note("seen at step 3")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert described(again) == described(error)
    assert again.__notes__ == ["seen at step 3"]
    assert again.__cause__ is again.cause
    if cls is BackendUnavailable:
        assert again.msg == error.msg == MESSAGE


@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_copies_keep_everything(cls: type[RayxferError], fields: dict[str, object]) -> None:
    error = cls(MESSAGE, **fields)
    assert described(copy.copy(error)) == described(error)
    assert described(copy.deepcopy(error)) == described(error)


@pytest.mark.parametrize(("make", "text"), UNPICKLABLE.values(), ids=UNPICKLABLE)
@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_a_cause_that_cannot_be_pickled_arrives_as_text(
    cls: type[RayxferError],
    fields: dict[str, object],
    make: Callable[[], Exception],
    text: str,
) -> None:
    cause = make()
    error = cls(MESSAGE, **{**fields, "cause": cause})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert isinstance(again.cause, RemoteCause)
    assert again.cause.type_name == type(cause).__name__
    assert again.cause.message == text
    assert str(again.cause) == f"{type(cause).__name__}: {text}"
    for key in fields.keys() - {"cause"}:
        assert described_field(getattr(again, key)) == described_field(fields[key])
    # the sender's own error is as it was, and what arrived survives the next hop as it is
    assert error.cause is cause
    assert described(pickle.loads(pickle.dumps(again))) == described(again)


def test_causes_survive_in_a_chain() -> None:
    error = TransferError("top", cause=WorkerLost("middle", worker=3, cause=KeywordOnly(code=9)))
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again.cause, WorkerLost)
    assert again.cause.worker == 3
    assert isinstance(again.cause.cause, RemoteCause)
    assert again.cause.cause.message == "code 9"


def test_a_remote_cause_holds_the_traceback() -> None:
    def fails_here() -> None:
        raise KeywordOnly(code=1)

    with pytest.raises(KeywordOnly) as caught:
        fails_here()
    cause = portable_cause(caught.value)
    assert isinstance(cause, RemoteCause)
    assert "in fails_here" in cause.traceback_text
    assert "KeywordOnly: code 1" in cause.traceback_text


def test_portable_causes_are_themselves() -> None:
    assert portable_cause(None) is None
    assert portable_cause(CAUSE) is CAUSE


def test_a_subclass_with_its_own_constructor_survives() -> None:
    again = pickle.loads(pickle.dumps(MyEngineError(code=4)))
    assert described(again) == described(MyEngineError(code=4))
    assert again.code == 4


class MyEngineError(TransferError):
    def __init__(self, *, code: int) -> None:
        super().__init__(f"my engine failed with {code}", phase="update")
        self.code = code


# --- through Ray ----------------------------------------------------------------------------


class Echo:
    """One process for all that these tests ask: to start one takes seconds."""

    def returns(self, error: object) -> object:
        return error

    def raises(self, error: RayxferError) -> None:
        raise error

    def raises_over(self, kind: str) -> None:
        raise TransferTimeout(MESSAGE, worker=1, cause=UNPICKLABLE[kind][0]())


@pytest.fixture(scope="module")
def echo(ray_session: None) -> Iterator[Any]:
    import ray

    actor = ray.remote(num_cpus=0)(Echo).remote()
    yield actor
    ray.kill(actor)


def test_returned_through_ray(echo: Any) -> None:
    import ray

    sent = [cls(MESSAGE, **fields) for cls, fields in ERRORS]
    found = ray.get(echo.returns.remote(sent))
    assert [described(error) for error in found] == [described(error) for error in sent]


@pytest.mark.parametrize(("cls", "fields"), ERRORS, ids=NAMES)
def test_raised_through_ray(echo: Any, cls: type[RayxferError], fields: dict[str, object]) -> None:
    import ray

    error = cls(MESSAGE, **fields)
    with pytest.raises(cls) as caught:
        ray.get(echo.raises.remote(error))
    # Ray raises a class of its own, which is also ours. The one that was raised is its `cause`.
    assert isinstance(caught.value, ray.exceptions.RayTaskError)
    assert described(caught.value.cause) == described(error)


@pytest.mark.parametrize("kind", UNPICKLABLE)
def test_raised_through_ray_over_a_cause_that_cannot_be_pickled(echo: Any, kind: str) -> None:
    import ray

    with pytest.raises(TransferTimeout) as caught:
        ray.get(echo.raises_over.remote(kind))
    error = caught.value.cause
    assert type(error) is TransferTimeout
    assert error.worker == 1
    assert isinstance(error.cause, RemoteCause)
    assert (error.cause.type_name, error.cause.message) == (kind, UNPICKLABLE[kind][1])
