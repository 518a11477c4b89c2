"""How any Ray actor becomes an inference worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayxfer.binding import Binding
from rayxfer.client import reconstructed
from rayxfer.errors import ConfigError, StateError
from rayxfer.loader import FuseRule, WeightLoader
from rayxfer.report import WorkerState
from rayxfer.session import WorkerSession
from rayxfer.source import Rename, WeightSource

__all__ = ["WorkerMixin"]


class WorkerMixin:
    """A plain class: inherit it in your actor's class and call `rayxfer_bind` once.

    Example:
        @ray.remote
        class MyWorker(rayxfer.WorkerMixin):
            def __init__(self):
                self.model = build()
                self.rayxfer_bind(self.model)

    Works on a plain single-threaded actor: no call of rayxfer's blocks it for more than about a
    second. Two methods are called from outside, `rayxfer_call` and `rayxfer_signal`; an actor with
    concurrency groups should put the latter in one of its own (with two threads), so that an
    abort never waits behind anything.
    """

    _rayxfer_session: WorkerSession | None = None

    def rayxfer_bind(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        *,
        load_weights: Callable[[Any, list[tuple[str, torch.Tensor]]], Any] | None = None,
        pause: Callable[[str], Any] | None = None,
        resume: Callable[[], Any] | None = None,
        reset_cache: Callable[[], Any] | None = None,
        start_update: Callable[[], Any] | None = None,
        finish_update: Callable[[], Any] | None = None,
        on_state: Callable[[WorkerState], Any] | None = None,
        rename: Rename | None = None,
        fuse: Sequence[FuseRule] = (),
        make_loader: Callable[[], WeightLoader] | None = None,
        make_source: Callable[[], WeightSource] | None = None,
    ) -> None:
        """Lend the model and hooks to rayxfer. Arguments are those of `rayxfer.binding.Binding`.

        An actor that Ray reconstructed holds what its constructor built, not the committed version:
        it starts CONNECTING and becomes READY with the next version it is given.

        Without `pause` and `resume` nothing keeps the actor's other threads from reading weights that
        are half new: give both if it has any.

        Raises:
            ConfigError: `model` is neither a module nor a function that returns one.
        """
        if not isinstance(model, torch.nn.Module) and (
            isinstance(model, Mapping) or not callable(model)
        ):
            raise ConfigError(
                f"rayxfer_bind got a {type(model).__name__}: expected an nn.Module, or a function that "
                "returns the live one"
            )
        self._rayxfer_session = WorkerSession(
            Binding(
                model=model,
                load_weights=load_weights,
                pause=pause,
                resume=resume,
                reset_cache=reset_cache,
                start_update=start_update,
                finish_update=finish_update,
                on_state=on_state,
                rename=rename,
                fuse=tuple(fuse),
                make_loader=make_loader,
                make_source=make_source,
            ),
            caught_up=not reconstructed(),
        )

    def rayxfer_call(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """One control message that may take up to about a second. For rayxfer's use."""
        if self._rayxfer_session is None:
            raise StateError(f"{type(self).__name__} has not called rayxfer_bind(model) yet")
        return self._rayxfer_session.handle(op, message)

    def rayxfer_signal(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """One urgent control message: describe, attach, snapshot, abort. For rayxfer's use."""
        return self.rayxfer_call(op, message)

    def state(self) -> str:
        """This worker's `WorkerState`."""
        session = self._rayxfer_session
        return str(WorkerState.CONNECTING if session is None else session.state)

    def weight_version(self) -> int:
        """The version that this worker holds (0: what it was built with)."""
        return 0 if self._rayxfer_session is None else self._rayxfer_session.version

    def ping(self) -> bool:
        """True: this process answers."""
        return True
