"""Faults on demand: for drills of your own, and for rayxfer's tests.

    name = faulty("shm", Fault(side="worker", action="kill", at=3, rank=1))
    controller = Controller(workers, WeightTransferConfig(backend=name))

`faulty` registers an engine that is the given one with faults built in; nothing of the product knows.
The faults happen for real: a kill is SIGKILL to the own process.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from rayxfer.errors import ConfigError
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.packing import as_bytes

__all__ = ["Fault", "faulty"]

Side = Literal["worker", "sender"]
Action = Literal["kill", "stop", "delay", "flip", "truncate", "raise"]

_count = itertools.count()


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        side: "worker" (as a bucket is handed to the loader) or "sender" (as a tensor is taken from
            the source).
        action: "kill" (SIGKILL to the own process), "stop" (SIGSTOP), "delay" (by `seconds`), "flip"
            (one bit of what passes), "truncate" (what passes is dropped), "raise" (RuntimeError).
        at: at which hand-over, counted from 0.
        rank: on which worker of the channel (its place there); None: on every one.
        seconds: for "delay".
        once: only once in all, over all processes and rounds; False: in every round.
    """

    side: Side
    action: Action
    at: int = 0
    rank: int | None = None
    seconds: float = 0.0
    once: bool = True
    token: str = field(default="", repr=False)

    def claim(self) -> bool:
        """Whether it is this process's turn to have the fault."""
        if not self.once:
            return True
        try:
            os.unlink(self.token)
        except FileNotFoundError:
            return False
        return True


def faulty(backend: str, *faults: Fault) -> str:
    """Register an engine that is `backend` with these faults; returns its name."""
    base = WeightTransferEngineFactory.get_engine_class(backend)
    armed = tuple(_arm(fault) for fault in faults)
    for fault in armed:
        if fault.action not in ("kill", "stop", "delay", "flip", "truncate", "raise"):
            raise ConfigError(f"fault action {fault.action!r}")
    on_worker = tuple(f for f in armed if f.side == "worker")
    on_sender = tuple(f for f in armed if f.side == "sender")

    class FaultyEngine(base):  # type: ignore[misc,valid-type]
        gated = base.gated

        def receive_weights(self, update_info: Any, load_weights: Callable[..., Any]) -> None:
            rank = self.parallel_config.rank
            mine = tuple(f for f in on_worker if f.rank is None or f.rank == rank)
            super().receive_weights(update_info, _FaultyLoad(load_weights, mine))

        @staticmethod
        def trainer_send_weights(
            iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
        ) -> None:
            base.trainer_send_weights(_faulty_iterator(iterator, on_sender), trainer_args)

    name = f"{backend}+faults-{os.getpid()}-{next(_count)}"
    WeightTransferEngineFactory.register_engine(name, FaultyEngine)
    return name


def _arm(fault: Fault) -> Fault:
    if not fault.once:
        return fault
    descriptor, path = tempfile.mkstemp(prefix="rayxfer-fault-")
    os.close(descriptor)
    atexit.register(_disarm, path)  # one that never strikes leaves nothing behind
    return replace(fault, token=path)


def _disarm(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


class _FaultyLoad:
    """`load_weights` with faults; everything else about it passes through."""

    def __init__(self, inner: Any, faults: tuple[Fault, ...]) -> None:
        self._inner, self._faults = inner, faults
        self._at = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _due(self) -> list[Fault]:
        due = [f for f in self._faults if f.at == self._at and f.claim()]
        self._at += 1
        return due

    def __call__(self, weights: list[tuple[str, torch.Tensor]]) -> Any:
        for fault in self._due():
            _strike(fault)
            if fault.action == "truncate":
                weights = weights[:-1]
            elif fault.action == "flip":
                weights = [(name, _flipped(tensor)) for name, tensor in weights[:1]] + weights[1:]
        return self._inner(weights)

    def keep(self, weights: list[tuple[str, torch.Tensor]], file: Any, claim: Any) -> None:
        for fault in self._due():
            _strike(fault)
            if fault.action == "truncate":
                weights = weights[:-1]
            elif fault.action == "flip":
                for flat in [as_bytes(t) for _, t in weights if t.numel()][:1]:
                    flat[flat.numel() // 2] ^= 1  # in a private mapping: nobody else sees it
        self._inner.keep(weights, file, claim)

    def landed(self, name: str) -> None:
        if self._struck([name]):
            self._inner.landed(name)

    def landed_all(self, names: tuple[str, ...]) -> None:
        left = self._struck(names)
        if left:
            self._inner.landed_all(names[:left])

    def _struck(self, names: Sequence[str]) -> int:
        """Have the faults that are due strike what has landed; how many of these tensors are left."""
        due = self._due()
        place = self._inner.landing(names[0]) if due else None
        for fault in due:
            _strike(fault)
            if fault.action == "flip" and place is not None and place.numel():
                place[place.numel() // 2] ^= 1
        return len(names) - any(fault.action == "truncate" for fault in due)


def _faulty_iterator(
    iterator: Iterator[tuple[str, torch.Tensor]], faults: tuple[Fault, ...]
) -> Iterator[tuple[str, torch.Tensor]]:
    for index, (name, tensor) in enumerate(iterator):
        due = [f for f in faults if f.at == index and f.claim()]
        for fault in due:
            _strike(fault)
        if any(fault.action == "truncate" for fault in due):
            continue
        yield name, _flipped(tensor) if any(f.action == "flip" for f in due) else tensor


def _strike(fault: Fault) -> None:
    if fault.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # the signal is on its way
    elif fault.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault.action == "delay":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        raise RuntimeError(f"injected fault at hand-over {fault.at} of the {fault.side}")


def _flipped(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    if copy.numel():
        flat = as_bytes(copy)
        flat[flat.numel() // 2] ^= 1
    return copy
