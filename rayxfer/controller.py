"""`Controller`: the handle that a user holds. Ray is used here and in `client.py` only."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

import cloudpickle
import ray
import torch

from rayxfer import background
from rayxfer.background import SyncHandle
from rayxfer.client import client_for, is_lost, mapped_error, spawn
from rayxfer.config import WeightTransferConfig
from rayxfer.controller_actor import NAMESPACE, controller_actor_class
from rayxfer.coordinator import Coordinator, RosterNeeded
from rayxfer.errors import (
    ConfigError,
    ControllerBusy,
    ControllerClosed,
    RayxferError,
    TransferError,
    TransferTimeout,
    portable_cause,
)
from rayxfer.factory import EngineEntry, WeightTransferEngineFactory
from rayxfer.keeper import Keeper
from rayxfer.memory import Memory
from rayxfer.report import Status, SyncReport
from rayxfer.sender import Sender
from rayxfer.source import WeightSource, as_source, is_sharded, named_tensors, num_shards

__all__ = ["Controller"]

_MARGIN_S = 15.0
_GONE_TIMEOUT_S = 5.0
_STATUS_TIMEOUT_S = 30.0  # answers in milliseconds, unless Ray is just restarting the controller


class _Remote:
    """The coordinator, called through its actor handle. Errors come back as ours."""

    def __init__(self, actor: Any, name: str, timeout_s: float, memory: Memory) -> None:
        self._actor, self._name, self._timeout_s = actor, name, timeout_s
        self._memory = memory

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """One call. While Ray restarts the actor it is tried again: every method may be repeated.
        An actor that was restarted and has to be told who its workers are is told, once."""
        try:
            return self._call(method, *args, timeout_s=timeout_s)
        except RosterNeeded:
            self.present()
            return self._call(method, *args, timeout_s=timeout_s)

    def present(self) -> None:
        """Tell the actor what this handle remembers of it."""
        self._call("present", cloudpickle.dumps(self._memory.told()), timeout_s=None)

    def _call(self, method: str, *args: Any, timeout_s: float | None) -> Any:
        timeout = self._timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout
        while True:
            left = max(0.01, deadline - time.monotonic())
            try:
                return ray.get(getattr(self._actor, method).remote(*args), timeout=left)
            except ray.exceptions.GetTimeoutError as error:
                raise TransferTimeout(
                    f"controller {self._name!r} did not answer {method!r} within {timeout:g} s",
                    cause=error,
                ) from error
            except Exception as error:
                if not is_lost(error):
                    raise mapped_error(error, None) from error
                restarting = isinstance(error, ray.exceptions.ActorUnavailableError)
                if not restarting or time.monotonic() > deadline:
                    raise ControllerClosed(
                        f"controller {self._name!r} is gone: {type(error).__name__}", cause=error
                    ) from error
                time.sleep(0.1)

    def begin(self, request: dict[str, Any]) -> dict[str, Any]:
        request = {**request, "seen_version": self._memory.version}
        answer: dict[str, Any] = self.call("begin", request)
        self._memory.see(version=answer["base"], round=answer["round_id"])
        if answer["members"] is not None:
            self._memory.see_owner(answer["owner"])
        return answer

    def status(self) -> Status:
        status: Status = self.call("status", timeout_s=_STATUS_TIMEOUT_S)
        if status.version < self._memory.version:  # it lost more than its workers could tell
            with contextlib.suppress(ControllerBusy):
                self.present()
                status = self.call("status", timeout_s=_STATUS_TIMEOUT_S)
        self._memory.see(version=status.version)
        return status

    def entries(self) -> dict[str, EngineEntry]:
        """The registrations that came with the controller's workers, made by their creator."""
        merged: dict[str, EngineEntry] = {}
        for blob in self.call("entries"):
            merged |= pickle.loads(blob)
        return merged

    def alive(self) -> bool:
        try:
            self.call("controller_id", timeout_s=1.0)
        except ControllerClosed:
            return False
        except TransferTimeout:
            return True
        return True

    def renew(self, claim: dict[str, Any]) -> None:
        self.call("renew", claim, timeout_s=5.0)

    def commit(
        self, claim: dict[str, Any], rows: list[dict[str, Any]], message: dict[str, Any]
    ) -> dict[str, Any]:
        answer: dict[str, Any] = self.call("commit", claim, rows, message)
        self._memory.see(version=claim["version"])
        return answer

    def settle(self, claim: dict[str, Any], rows: list[dict[str, Any]]) -> None:
        self.call("settle", claim, rows)


# One sender per controller and process, however many copies of the handle there are: channels are
# worth keeping. The creator's handle owns its sender, so that dropping the handle drops the
# controller. Copies come and go with every call to a trainer actor, so theirs are pinned, until the
# controller is found to be gone.
_senders: weakref.WeakValueDictionary[str, Sender] = weakref.WeakValueDictionary()
_pinned: dict[str, Sender] = {}
_senders_lock = threading.Lock()


def _unpin_the_dead() -> None:
    for key, sender in list(_pinned.items()):
        if sender.turns.try_take():
            try:
                if sender.orphaned():
                    _pinned.pop(key, None)
                    sender.close()
            finally:
                sender.turns.give_back()


class Controller:
    """Keeps a fleet of inference workers at one version of the weights.

    A handle: it can be pickled to another process (a trainer actor), and every copy talks to the
    same controller actor. Not detached, that actor dies with its creator, so create it in the
    driver.

    Args:
        workers: Ray actors that are inference workers (`InferenceActor`, or any actor whose class
            inherits `WorkerMixin`). None: attach to the running controller called `name`.
        config: settings; default `WeightTransferConfig()`.
        name: in Ray's namespace "rayxfer"; default unique.
        detached: live until `shutdown()`, beyond the creator.

    Raises:
        ConfigError: a worker that is none or is owned by another controller, a wrong number of
            backends, a live name with other workers or another config.
        UnknownBackend: before anything is touched. BackendUnavailable: a worker cannot run it.
        WorkerLost, TransferTimeout: a worker does not answer.

    After an error no controller actor is left.
    """

    def __init__(
        self,
        workers: Sequence[Any] | None = None,
        config: WeightTransferConfig | None = None,
        *,
        name: str | None = None,
        detached: bool = False,
    ) -> None:
        if config is not None and not isinstance(config, WeightTransferConfig):
            raise ConfigError(f"config is a {type(config).__name__}, not a WeightTransferConfig")
        if workers is None and name is None:
            raise ConfigError("Controller() needs workers, or the name of a running controller")
        if workers is not None and not isinstance(workers, (list, tuple)):
            raise ConfigError(f"workers is a {type(workers).__name__}: expected a list of actors")
        self._name = name if name is not None else f"rayxfer-{uuid.uuid4().hex[:12]}"
        self._entries: dict[str, EngineEntry] = {}
        self._memory = Memory()  # keeps the workers in scope: the controller's own handles do not
        self._own: Sender | None = None
        self._keeper: Any = None
        self._origin = False
        if workers is None:
            self._attach()
        else:
            self._create(list(workers), config, detached, maybe_running=name is not None)

    def _attach(self) -> None:
        try:
            self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
        except ValueError as error:
            raise ControllerClosed(
                f"no controller named {self._name!r} is running", cause=error
            ) from error
        remote = _Remote(self._actor, self._name, _STATUS_TIMEOUT_S, self._memory)
        self._config: WeightTransferConfig = remote.call("config")
        self._entries = remote.entries()

    def _create(
        self,
        workers: list[Any],
        config: WeightTransferConfig | None,
        detached: bool,
        *,
        maybe_running: bool,
    ) -> None:
        self._config = config if config is not None else WeightTransferConfig()
        backend = self._config.backend
        if not isinstance(backend, str) and len(backend) != len(workers):
            raise ConfigError(
                f"backend lists {len(backend)} names for {len(workers)} workers: one per worker, or a "
                "single name"
            )
        for one in self._config.backends:
            if one != "auto":
                self._entries[one] = WeightTransferEngineFactory.entry(one)
        seen: dict[str, int] = {}
        for rank, worker in enumerate(workers):
            client_for(worker).check()
            first = seen.setdefault(Coordinator.key_of(worker), rank)
            if first != rank:
                raise ConfigError(f"workers {first} and {rank} are the same actor: it has one rank")
        if maybe_running:
            try:
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
            except ValueError:
                pass  # nobody of that name: make it
            else:
                _Remote(self._actor, self._name, _STATUS_TIMEOUT_S, self._memory).call(
                    "same_request", workers, config
                )
                self._remember(workers)
                return
        actor_class = controller_actor_class()
        options: dict[str, Any] = {
            "name": self._name,
            "namespace": NAMESPACE,
            "num_cpus": 0,
            "max_restarts": -1,
            # Ray sends again what a death cut off, as soon as the actor is back. Otherwise it takes
            # up to two seconds to say that it failed, and again when asked too early.
            "max_task_retries": -1,
        }
        if detached:
            options["lifetime"] = "detached"
        if self._config.retain == "host":
            extra = {"lifetime": "detached", "namespace": NAMESPACE} if detached else {}
            names = {"name": f"{self._name}-keeper"} if detached else {}
            self._keeper = (
                ray.remote(Keeper).options(num_cpus=0, max_restarts=-1, **extra, **names).remote()
            )
        try:
            self._actor = actor_class.options(**options).remote(
                self._name,
                cloudpickle.dumps(workers),
                self._config,
                pickle.dumps(self._entries),
                uuid.uuid4().hex[:16],
                cloudpickle.dumps(self._keeper),
            )
            self._origin = True
            self._remote().call("open")
            self._remember(workers)
        except BaseException as error:
            actor = getattr(self, "_actor", None)
            for doomed in (actor, self._keeper):
                if doomed is not None:
                    ray.kill(doomed)
            self._wait_gone()
            if isinstance(error, RayxferError) or not isinstance(error, Exception):
                raise
            raise _creation_error(error) from error

    # ---- the handle -----------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The name under which `Controller(name=…)` finds this controller."""
        return self._name

    @property
    def config(self) -> WeightTransferConfig:
        """The settings it was made with."""
        return self._config

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None, "_origin": False}

    def __repr__(self) -> str:
        return f"Controller(name={self._name!r})"

    def _remote(self) -> _Remote:
        config = self._config
        # begin may first have to end a dead trainer's round, and look for lost workers
        timeout = config.connect_timeout_s + 2 * config.stall_timeout_s + _MARGIN_S
        return _Remote(self._actor, self._name, timeout, self._memory)

    def _remember(self, workers: list[Any]) -> None:
        ranks = range(len(workers))
        self._memory.add(ranks, workers, [self._config.backend_of(rank) for rank in ranks])

    def _sender(self) -> Sender:
        key = str(self._actor._actor_id.hex())
        with _senders_lock:
            sender = _senders.get(key)
            if sender is None:
                _unpin_the_dead()
                remote = self._remote()
                sender = _senders[key] = Sender(remote, dict(self._entries), remote.entries)
            if self._origin:
                self._own = sender
            else:
                _pinned[key] = sender
            return sender

    def sync_weights(
        self,
        model: Any,
        *,
        version: int | None = None,
        partial: bool = False,
        trainer_group: Any = None,
    ) -> SyncReport:
        """Bring every worker to a new version of the weights.

        Args:
            model: an `nn.Module`, a mapping of names to tensors, a `WeightSource`, or the handle
                (or handles) of trainer actors, which then send their own model. Never changed,
                and free to be changed the moment this returns.
            version: the new version; default one above the committed. Must be above it.
            partial: offer only some of the weights; the rest stays.
            trainer_group: not built yet.

        Returns:
            the report: version, bytes, seconds, one row per worker.

        Raises:
            ContractError: the offer does not fit (from preflight: nothing has changed), or the
                source yields other than it declared (in-place workers that had begun are TORN).
            ControllerBusy, StateError, ControllerClosed: nothing has changed. (One of this process's own
                that goes on in the background is waited for.)
            PartialUpdate: committed, but not by every worker (on_worker_failure="raise").
            TransferError, TransferTimeout: no worker took it; nothing was committed. Whoever had
                begun to load in place is TORN; the next sync repairs it.
        """
        handles = _trainer_handles(model)
        if handles:
            return self._sync_trainers(handles, version, partial)
        source = as_source(model)
        _check_local(model, source, trainer_group)

        def run() -> SyncReport:
            sender = self._sender()
            sender.turns.take(
                background=False,
                timeout_s=self._config.sync_timeout_s,
                who=f"controller {self._name!r}",
            )
            try:
                return sender.sync(source, version=version, partial=partial)
            finally:
                sender.turns.give_back()

        if not _in_event_loop():
            return run()
        # no deadline: run() has its own, as in any other thread
        report: SyncReport = spawn(run, "rayxfer-sync").result()
        return report

    def sync_weights_async(
        self, model: Any, *, version: int | None = None, partial: bool = False
    ) -> SyncHandle:
        """As `sync_weights`, but the trainer goes on as soon as its weights were copied.

        Returns when `model` is free to be changed: after one copy of it, on the device where it is (on
        the CPU: in memory that `shm` workers read). That memory is kept for the next time, and freed by
        `shutdown`. The workers get the copy behind the trainer, which a retry reads as well. In an event
        loop the call holds up the loop for that copy; what it returns can be awaited.

        One sync of a process goes on at a time: the next one, of either kind, first waits for the end of
        this one, for sync_timeout_s at most. So a loop may call it at every step. Other processes get
        ControllerBusy meanwhile. `shutdown` lets it end within stall_timeout_s, else calls it off.

        Args:
            model: a module, a mapping or a source; no trainer actors, which call it themselves.
            version, partial: as in `sync_weights`.

        Returns:
            a handle: `wait()`, or await it, for the report, and for what `sync_weights` raises once the
            round has begun. An error that nobody looks at is logged.

        Raises:
            ConfigError, ContractError: what is offered is no source, or its metadata or its tensors are
                bad. TransferError: the source raised, or there is no room for the copy.
            ControllerBusy: another thread is in a sync of its own. In each case nothing was begun.
        """
        if _trainer_handles(model):
            raise ConfigError(
                "sync_weights_async got trainer actors: the copy is made where the weights are, so call it "
                "in the trainer (a Controller can be sent there)"
            )
        source = as_source(model)
        _check_local(model, source, None)
        # the first use may have to ask Ray something, which is not to be done in an event loop
        sender: Sender = (
            spawn(self._sender, "rayxfer-sender").result(timeout=self._config.connect_timeout_s)
            if _in_event_loop()
            else self._sender()
        )
        return background.start(
            sender,
            source,
            version=version,
            partial=partial,
            timeout_s=self._config.sync_timeout_s,
            who=f"controller {self._name!r}",
        )

    def _sync_trainers(self, handles: list[Any], version: int | None, partial: bool) -> SyncReport:
        refs = [h.sync_weights.remote(self, version=version, partial=partial) for h in handles]
        reports: list[SyncReport | None] = []
        errors: list[RayxferError] = []
        for index, ref in enumerate(refs):
            try:
                # no deadline: the call waits its turn in the trainer's own queue, and is bounded there
                reports.append(ray.get(ref))
            except Exception as error:
                errors.append(_trainer_error(error, index))
        made = [report for report in reports if report is not None]
        if len(made) + sum(isinstance(error, ControllerBusy) for error in errors) > 1:
            raise ConfigError(
                f"{len(handles)} trainer actors, and more than one synced on its own: any of them may have "
                "won (a sync that several ranks share is not built yet). Let rank 0 alone call sync_weights"
            )
        if errors:
            raise errors[0]
        if not made:
            raise ConfigError(
                "no trainer actor returned a report: its sync_weights has to return it"
            )
        return made[0]

    def status(self) -> Status:
        """The committed version and every worker as last seen; answers during a sync, too.

        Raises:
            ControllerClosed: the controller was shut down.
            StateError: it was restarted, no worker that it was made with remembers it, and neither
                does this handle. One that does has to be used first.
        """
        return self._remote().status()

    def add_workers(
        self, workers: Sequence[Any], backend: str | Sequence[str] | None = None
    ) -> list[int]:
        """New members, at the next ranks (returned). They hold the committed version after the
        next sync; until then `status()` says CONNECTING.

        Raises:
            as the constructor; ControllerBusy: a sync is under way. Then nobody was added.
        """
        default = self._config.backend if isinstance(self._config.backend, str) else "auto"
        names = (
            [backend or default] * len(workers)
            if backend is None or isinstance(backend, str)
            else list(backend)
        )
        if len(names) != len(workers):
            raise ConfigError(f"backend lists {len(names)} names for {len(workers)} workers")
        for name in names:
            if name != "auto":
                self._entries.setdefault(name, WeightTransferEngineFactory.entry(name))
        new = {n: self._entries[n] for n in names if n != "auto"}
        ranks: list[int] = self._remote().call(
            "add_workers", list(workers), names, pickle.dumps(new)
        )
        self._memory.add(ranks, workers, names)
        return ranks

    def remove_workers(self, workers: Sequence[Any]) -> None:
        """Members no more, by rank or by handle. They keep the weights they hold.

        Raises:
            ConfigError: no such member. ControllerBusy: a sync is under way.
        """
        ranks = [w for w in workers if isinstance(w, int)]
        self._remote().call("remove_workers", ranks, [w for w in workers if not isinstance(w, int)])
        self._memory.remove(workers)

    def shutdown(self) -> None:
        """End the controller and let the workers go; never kills them. Safe to call twice."""
        key = str(self._actor._actor_id.hex())
        with _senders_lock:
            sender = _senders.pop(key, None)
            _pinned.pop(key, None)
            self._own = None
        if sender is not None:
            background.end(sender, self._config.stall_timeout_s, 2 * self._config.stall_timeout_s)
            sender.close()
        if not ray.is_initialized():
            return
        with contextlib.suppress(ControllerClosed, TransferTimeout):  # gone, or about to be
            self._remote().call("close", timeout_s=30.0)
        ray.kill(self._actor)
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            ray.kill(keeper)
        self._wait_gone()

    def _wait_gone(self) -> None:
        """Ray ends actors in its own time; the name is to be free when this returns."""
        deadline = time.monotonic() + _GONE_TIMEOUT_S
        while time.monotonic() < deadline:
            try:
                ray.get_actor(self._name, namespace=NAMESPACE)
            except ValueError:
                return
            time.sleep(0.01)

    def __enter__(self) -> Controller:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _trainer_handles(model: Any) -> list[Any]:
    """The trainer actors in `model`, or [] if it is something else."""
    candidates = list(model) if isinstance(model, (list, tuple)) and model else [model]
    if not all(isinstance(one, ray.actor.ActorHandle) for one in candidates):
        return []
    for one in candidates:
        if not hasattr(one, "sync_weights"):
            raise ConfigError(
                f"{one!r} is no trainer: its class needs sync_weights(controller, *, version=None, "
                "partial=False)"
            )
    return candidates


def _check_local(model: Any, source: WeightSource, trainer_group: Any) -> None:
    """Collective syncs are a seam: refuse them rather than send one rank's view as the whole."""
    collective = trainer_group is not None or type(source).held_names is not WeightSource.held_names
    if not collective and not isinstance(model, WeightSource):
        tensors = (
            named_tensors(model).values() if hasattr(model, "named_parameters") else model.values()
        )
        usual = (torch.Tensor, torch.nn.Parameter)
        collective = any(
            is_sharded(t) and num_shards(t) > 1 for t in tensors if type(t) not in usual
        )
    if collective:
        raise ConfigError(
            "a sync over several trainer ranks (DTensors, held_names() or trainer_group) is not built "
            "yet: gather on one rank and sync from there"
        )


def _trainer_error(error: Exception, index: int) -> RayxferError:
    if not is_lost(error):
        return mapped_error(error, None)
    return TransferError(
        f"trainer {index} died during the sync ({type(error).__name__}): nothing was committed unless "
        "status() says so; the controller frees its workers, and a new trainer can sync at once",
        phase="update",
        cause=portable_cause(error),
    )


def _creation_error(error: Exception) -> RayxferError:
    return ConfigError(
        f"the controller could not be made: {type(error).__name__}: {error}", cause=error
    )
