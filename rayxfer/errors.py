"""Every error that rayxfer raises.

One tree, rooted in `RayxferError`. Each error says the value, the rule and the first offender, keeps
what a program needs as attributes, and survives a round trip through pickle and so through Ray:
Ray loses `__cause__` and breaks on keyword-only constructors, so the cause is a *field* here
(`cause`) and `__reduce__` rebuilds the object from its state.
"""

from __future__ import annotations

import pickle
import traceback
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayxfer.report import SyncReport

__all__ = [
    "BackendUnavailable",
    "ConfigError",
    "ContractError",
    "ControllerBusy",
    "ControllerClosed",
    "PartialUpdate",
    "RayxferError",
    "RemoteCause",
    "StateError",
    "TransferError",
    "TransferTimeout",
    "UnknownBackend",
    "WorkerLost",
]


class RemoteCause(Exception):
    """Stands in for a cause that cannot be pickled: its type, message and traceback as text."""

    def __init__(self, type_name: str, message: str, traceback_text: str = "") -> None:
        super().__init__(type_name, message, traceback_text)
        self.type_name = type_name
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.type_name}: {self.message}"


def portable_cause(cause: BaseException | None) -> BaseException | None:
    """`cause` itself if it survives pickling, else a `RemoteCause` that describes it."""
    if cause is None:
        return None
    try:
        pickle.loads(pickle.dumps(cause))
    except Exception:
        try:
            message = str(cause)
        except Exception:  # an error whose own text fails must not hide the one it caused
            message = "<no text>"
        text = "".join(traceback.format_exception(cause))
        return RemoteCause(type(cause).__name__, message, text)
    return cause


def _rebuild(cls: type[RayxferError], state: dict[str, Any]) -> RayxferError:
    error = cls.__new__(cls)
    RayxferError.__init__(error, state["message"], cause=state["cause"])
    error.__dict__.update(state)
    return error


class RayxferError(Exception):
    """Root of the tree.

    Attributes:
        message: the whole text.
        cause: the error underneath, also after Ray (where `__cause__` is lost), or None.
    """

    def __init__(self, message: str, *, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.cause = cause
        if cause is not None:
            self.__cause__ = cause

    def __reduce__(self) -> tuple[Any, ...]:
        state = dict(self.__dict__)
        state["cause"] = portable_cause(self.cause)
        return _rebuild, (type(self), state)

    def __str__(self) -> str:
        return self.message


class ConfigError(RayxferError, ValueError):
    """A setting or an argument that can never work; raised before anything is touched."""


class UnknownBackend(RayxferError, ValueError):
    """No engine of that name is registered in this process. The message lists those that are."""


class BackendUnavailable(RayxferError, ImportError):
    """The engine exists but cannot run here: names what to install or which hardware is missing."""


class ContractError(RayxferError):
    """Source and stream, or offer and worker, disagree: a name, a shape, a dtype, a count.

    Raised from preflight nothing has changed on any worker. Raised while streaming the round was
    aborted: in-place workers that had begun to load are TORN until the next sync.

    Attributes:
        problems: every disagreement found, as text, the first offender first.
        name: the first tensor at fault, if it is about one.
        worker: the rank of the first worker at fault, if it is about one.
        phase: "prepare" from preflight, else None.
    """

    def __init__(
        self,
        message: str,
        *,
        problems: tuple[str, ...] = (),
        name: str | None = None,
        worker: int | None = None,
        phase: str | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.problems = problems
        self.name = name
        self.worker = worker
        self.phase = phase


class TransferError(RayxferError):
    """A round failed and no worker took the new version: nothing was committed.

    Attributes:
        phase: "connect", "prepare", "update", "verify", "finish" or "commit".
        weight_version: the version that was on its way.
        worker: rank of the worker at fault, or None.
        name: the tensor it happened at, or None.
        report: the `SyncReport` of the failed call, where one exists.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        weight_version: int | None = None,
        worker: int | None = None,
        name: str | None = None,
        report: SyncReport | None = None,
        cause: BaseException | None = None,
    ) -> None:
        super().__init__(message, cause=cause)
        self.phase = phase
        self.weight_version = weight_version
        self.worker = worker
        self.name = name
        self.report = report


class TransferTimeout(TransferError, TimeoutError):
    """A deadline passed. Every party has been released; fields as in `TransferError`."""


class WorkerLost(TransferError):
    """A worker died or can no longer be reached; fields as in `TransferError`."""


class PartialUpdate(RayxferError):
    """The version was committed, but not by every worker.

    Attributes:
        report: the whole `SyncReport`; its rows say which worker is where, and why.
    """

    def __init__(
        self, message: str, *, report: SyncReport, cause: BaseException | None = None
    ) -> None:
        super().__init__(message, cause=cause)
        self.report = report


class StateError(RayxferError):
    """Right call, wrong moment: for example an update before any connect."""


class ControllerBusy(StateError):
    """Another sync is running. Nothing was changed by this call."""


class ControllerClosed(StateError):
    """The controller was shut down, or its actor is gone."""
