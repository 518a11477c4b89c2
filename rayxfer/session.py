"""The worker's side of a round: a small state machine, with no Ray in it.

A `WorkerSession` is driven by messages (`handle`): describe, attach, connect, prepare, update, finish,
commit, abort, detach. Each is a plain dict. The ones that can take long (connect, update, finish,
commit) run in a thread of their own; a call waits for at most `wait_s` of it and then answers with
its progress, to be asked again. So no call blocks for long, an abort always gets through, and every
answer is a heartbeat.
"""

from __future__ import annotations

import array
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rayxfer.base import WeightTransferEngine
from rayxfer.binding import Binding, fingerprint, load_function
from rayxfer.config import ParallelConfig, WeightTransferConfig
from rayxfer.daemons import daemon
from rayxfer.delivery import Delivery, Offer, Round, RoundAborted
from rayxfer.digest import digest_named
from rayxfer.errors import (
    ConfigError,
    ContractError,
    RayxferError,
    StateError,
    TransferError,
    portable_cause,
)
from rayxfer.factory import EngineEntry, WeightTransferEngineFactory
from rayxfer.loader import ModuleLoader, WeightLoader
from rayxfer.mapped import MappedLoader
from rayxfer.opaque import OpaqueLoader, StagedLoader
from rayxfer.report import WorkerState
from rayxfer.tasks import Task
from rayxfer.topology import local_facts

__all__ = ["WorkerSession"]


class WorkerSession:
    """One worker's part in every round. Thread-safe; see the module's text.

    State after a failure: nothing loaded → the old version is READY again and generation resumed;
    something loaded in place → TORN, generation stays paused until a later round commits.
    """

    def __init__(self, binding: Binding, *, caught_up: bool = True) -> None:
        self._binding = binding
        self._lock = threading.RLock()
        self._task: Task | None = None
        self._engine: WeightTransferEngine[Any, Any] | None = None
        self._engine_lock = threading.Lock()
        self._session_id: str | None = None
        self._dead_sessions: deque[str] = deque(maxlen=16)
        self._config = WeightTransferConfig()
        self._round: Round | None = None
        self._load: Delivery | None = None
        self._offer: Offer | None = None
        self._memo: dict[str, Any] = {}
        self._kept: dict[str, dict[str, Any]] = {}
        self._learned: dict[str, frozenset[str]] = {}
        self._owner: dict[str, Any] | None = None
        self._last_round = (-1, -1)
        self._quiet = threading.Condition()
        self._visitors = 0
        self._changing = False
        self._exact = True
        self._committed_round = -1
        self.incarnation = uuid.uuid4().hex
        self.version = 0
        self.state = WorkerState.READY if caught_up else WorkerState.CONNECTING
        self.torn_towards: int | None = None
        self.calls: dict[str, int] = {}
        self._ops: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "describe": self.describe,
            "attach": self.attach,
            "connect": self.connect,
            "prepare": self.prepare,
            "update": self.update,
            "finish": self.finish,
            "commit": self.commit,
            "abort": self.abort,
            "detach": self.detach,
            "snapshot": lambda message: self.snapshot(),
            "donate": self.donate,
        }

    def handle(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out one message.

        Raises:
            StateError: an unknown operation, or one that does not fit the state.
            ContractError: a message with missing or senseless fields.
            ConfigError, ContractError, BackendUnavailable: as the operation says.
        """
        function = self._ops.get(op) if isinstance(op, str) else None
        if function is None or not isinstance(message, dict):
            raise StateError(f"unknown operation {op!r}: expected one of {', '.join(self._ops)}")
        self.calls[op] = self.calls.get(op, 0) + 1
        try:
            return function(message)
        except RayxferError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            text = f"bad {op!r} message: {type(error).__name__}: {error}"
            raise ContractError(text, cause=portable_cause(error)) from error

    # ---- who am I ------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """State and version, without waiting for anything."""
        load, current = self._load, self._round
        return {
            "state": str(self.state),
            "version": self.version,
            "open": None if current is None else current.round_id,
            "towards": self.torn_towards,
            "incarnation": self.incarnation,
            "controller": None if self._owner is None else self._owner["name"],
            "num_bytes": 0 if load is None else load.num_bytes,
        }

    def describe(self, message: dict[str, Any]) -> dict[str, Any]:
        """Everything that a controller wants to know about a new member.

        Raises:
            BackendUnavailable: the built-in engine in `message["backend"]` cannot run here.
        """
        backend = message.get("backend")
        if backend in WeightTransferEngineFactory.built_in:
            WeightTransferEngineFactory.get_engine_class(backend).check_available()
        model = self._binding.live_model()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        function = load_function(self._binding, model)
        plain = function is None and self._binding.rename is None and not self._binding.fuse
        return {
            **self.snapshot(),
            "facts": local_facts(device).to_wire(),
            "owner": self._owner,
            "last_round": self._last_round[0],
            "fingerprint": fingerprint(model),
            "plain": plain,
            "exact": self._exact,
            "keeper": self._binding.make_source is not None,
        }

    def donate(self, message: dict[str, Any]) -> dict[str, Any]:
        """Give this worker's weights to another, which has to catch up. See `rayxfer.catchup`."""
        self._check_owner(message)
        from rayxfer.catchup import donate

        def run() -> dict[str, Any]:
            with self.outside_rounds():
                if self.state != WorkerState.READY or self.version != message["version"]:
                    raise StateError(
                        f"this worker is {self.state} at version {self.version}: it cannot give "
                        f"version {message['version']}"
                    )
                donate(self._binding.source(), message)
            return {}

        return self._drive(("donate", int(message["round_id"])), run, message)

    def attach(self, message: dict[str, Any]) -> dict[str, Any]:
        """Take `message["owner"]` (name, controller_id, rank, …) as this worker's controller.

        Raises:
            StateError: another controller owns it and `replace` is not given.
        """
        owner = dict(message["owner"])
        with self._lock:
            mine = self._owner
            foreign = mine is None or mine["controller_id"] != owner["controller_id"]
            if foreign and mine is not None and message.get("replace") != mine["controller_id"]:
                raise StateError(
                    f"this worker belongs to controller {mine['name']!r}: a worker has one "
                    "controller; shut that one down first"
                )
            if not foreign and mine is not None and owner["epoch"] < mine["epoch"]:
                raise StateError(
                    f"epoch {owner['epoch']} of controller {owner['name']!r} is over: this worker "
                    f"follows its restart {mine['epoch']}"
                )
        if foreign:
            self._abort_stale_round()
            with self._lock:
                self._close_engine()
                self._last_round, self._committed_round = (-1, -1), -1
        self._owner = owner
        return self.snapshot()

    def _abort_stale_round(self) -> None:
        """End a round whose trainer or controller is gone (or which this process slept through)."""
        current = self._round
        if current is not None:
            self.abort({"round_id": current.round_id, "timeout_s": 5.0})

    def detach(self, message: dict[str, Any]) -> dict[str, Any]:
        """Forget the controller: abort what runs, close the channel. The weights stay."""
        with self._lock:
            owner = self._owner
            if owner is None or owner["controller_id"] != message.get("controller_id"):
                return self.snapshot()
        self._abort_stale_round()
        with self._lock:
            self._close_engine()
            self._kept = {}
            self._owner = None
        return self.snapshot()

    # ---- connect -------------------------------------------------------------------------------

    def connect(self, message: dict[str, Any]) -> dict[str, Any]:
        """Open a channel: make the engine and run its `init_transfer_engine`.

        Raises (in the answer's "error"):
            ConfigError: bad init info. BackendUnavailable: cannot run here. TransferError: else.
        """
        if self._owner is None:
            return {"need": "attach"}
        self._check_owner(message)
        key = ("connect", message["session_id"])
        task = self._task
        if task is None or task.key != key:
            self._abort_stale_round()
            if task is not None and task.key[0] == "connect" and not task.done.is_set():
                self._abort_engine()
                # A transport may sit in its own connect long after its peer has died: that thread
                # is left to itself (it closes what it opened), rather than held against the worker.
                if not task.done.wait(_ABANDON_S):
                    with self._lock:
                        if self._task is task:
                            self._task = None

        def run() -> dict[str, Any]:
            self._close_engine()
            config = WeightTransferConfig(**message["config"])
            engine_cls = EngineEntry(**message["entry"]).load()
            engine_cls.check_available()
            engine = engine_cls(config, ParallelConfig(**message["parallel_config"]))
            engine.kept = self._kept_for(config.backends[0])
            info = engine.parse_init_info(dict(message["init_info"]))
            with self._engine_lock:
                self._engine = engine
                aborted = message["session_id"] in self._dead_sessions
            try:
                if aborted:
                    raise TransferError("the sender gave this connect up", phase="connect")
                engine.init_transfer_engine(info)
                with self._engine_lock:
                    if self._engine is not engine:
                        raise TransferError("another connect has taken over", phase="connect")
            except BaseException:
                with self._engine_lock:
                    if self._engine is engine:
                        self._engine = None
                engine.shutdown()
                raise
            self._config = config
            self._session_id = message["session_id"]
            return {"gated": engine_cls.gated}

        return self._drive(key, run, message)

    def _kept_for(self, backend: str) -> dict[str, Any] | None:
        """What the engine is to find again. Another backend's is let go: it may be twice the weights."""
        if self._binding.make_loader is not None:
            return None
        self._kept = {backend: self._kept.get(backend, {})}
        return self._kept[backend]

    def _close_engine(self) -> None:
        with self._engine_lock:
            engine, self._engine = self._engine, None
            self._session_id = None
        if engine is not None:
            engine.shutdown()

    def _check_owner(self, message: dict[str, Any]) -> None:
        owner = self._owner
        if owner is None or owner["controller_id"] != message.get("controller_id"):
            who = "no controller" if owner is None else f"controller {owner['name']!r}"
            raise StateError(f"this worker belongs to {who}, not to the sender of this message")

    # ---- one round -----------------------------------------------------------------------------

    def prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        """Preflight. Touches nothing; answers with every problem, or `{"need": …}`.

        A round with a higher id replaces one whose trainer is gone.
        """
        if self._owner is None:
            return {"need": "attach"}
        self._check_owner(message)
        round_id, attempt = int(message["round_id"]), int(message["attempt"])
        version = int(message["version"])
        if self._engine is None or self._session_id != message["session_id"]:
            return {"need": "connect"}
        self._check_new(round_id, attempt)
        if self._round is not None:
            self._abort_stale_round()
            return {"need": "connect"}
        offer = self._offer
        if offer is None or offer.digest != message["metadata_digest"]:
            if "metadata" not in message:
                return {"need": "metadata"}
            offer = self._offer = Offer.read(message["metadata"], message["metadata_digest"])
        metadata = offer.metadata
        update_info = self._engine.parse_update_info(
            {
                **offer.wire,
                **self._config.update_info,
                **message["update_info"],
            }
        )
        partial = bool(message["partial"])
        if partial and (self.state != WorkerState.READY or self.version != message["base"]):
            return {
                "behind": f"this worker is {self.state} at version {self.version}: a part of the model "
                f"is no use to it without version {message['base']}; the next full sync brings it",
                "state": str(self.state),
                "version": self.version,
            }
        checkpoint_format = bool(getattr(update_info, "is_checkpoint_format", True))
        loader = self._make_loader(checkpoint_format, partial)
        digest = loader.digest = digest_named(message.get("digest", loader.digest.name))
        preflight = loader.preflight(metadata, partial=partial, memo=self._memo)
        if preflight.problems:
            return {"problems": preflight.problems, "name": preflight.first_name}
        with self._lock:
            self._check_new(round_id, attempt)  # an abort may have come meanwhile
            self._last_round = (round_id, attempt)
            self._round = Round(
                round_id=round_id,
                attempt=attempt,
                version=version,
                metadata=metadata,
                partial=partial,
                update_info=update_info,
                loader=loader,
                digest=digest if self._config.verify == "digest" else None,
                previous=self.state,
                checkpoint_format=checkpoint_format,
                casts=bool(preflight.casts),
                columns=offer.columns,
            )
            self._load = None
            self._round.preflight = {"casts": preflight.casts, "kept": preflight.kept}
            return self._round.preflight

    def _check_new(self, round_id: int, attempt: int) -> None:
        with self._lock:
            seen = self._last_round
        if (round_id, attempt) <= seen:
            raise StateError(
                f"round {round_id}.{attempt} is over: this worker has seen {seen[0]}.{seen[1]}"
            )

    def _make_loader(self, checkpoint_format: bool, partial: bool) -> WeightLoader:
        binding, config = self._binding, self._config
        if binding.make_loader is not None:
            return binding.make_loader()
        model = binding.live_model()
        staged, verify = config.load_mode != "in_place", config.verify == "digest"
        mapped = config.load_mode == "mapped"
        if not checkpoint_format:
            return ModuleLoader(model, staged=staged, verify=verify)
        function = load_function(binding, model)
        if function is not None:
            if mapped:
                raise ConfigError(
                    'load_mode="mapped" needs the default loader, and this worker has one of its own: '
                    'use "in_place" or "staged"'
                )
            opaque = OpaqueLoader(function, module=model, learned=self._learned)
            return StagedLoader(opaque) if staged else opaque
        if mapped and not partial:
            return MappedLoader(model, rename=binding.rename, fuse=binding.fuse, verify=verify)
        return ModuleLoader(
            model, rename=binding.rename, fuse=binding.fuse, staged=staged, verify=verify
        )

    def update(self, message: dict[str, Any]) -> dict[str, Any]:
        """Pause, start, receive, prove. The answer, once done, is the worker's vote.

        A message with a gate carries the offer as well, and is `prepare` at the same time: nothing is
        touched before all workers of the channel have said yes. One that says anything else answers
        `{"refused": …}`; it is asked in two steps then.

        Raises:
            StateError: no such round was prepared, or no channel is open.
        """
        if "gate" in message:
            if type(message["gate"]) is not int or not 0 <= message["gate"] < 1 << 64:
                raise ContractError(f"bad 'update' message: gate {message['gate']!r}")
            try:
                said = self.prepare(message)
            except RayxferError as error:
                return {"refused": str(error)}
            if "casts" not in said:
                return {"refused": ", ".join(said)}
        current = self._current(message)
        current.gate = message.get("gate", current.gate)
        current.prove = bool(message.get("prove", current.prove))
        engine = self._engine
        if engine is None:
            raise StateError("update before connect: this worker has no open channel")
        key = ("update", current.round_id, current.attempt)
        wait_s = float(message.get("wait_s", 0.0))
        if message.get("payload") is not None:
            # Payloads ride on update calls; a call answers when its payload was consumed, so the
            # actor's own queue is the flow control.
            until = time.monotonic() + wait_s
            self._drive(key, lambda: self._receive(engine, current), {"wait_s": 0.0}, current)
            consumed = engine.on_push(int(message["sequence"]), message["payload"])
            current.pushed[int(message["sequence"])] = consumed
            task = self._task
            if task is not None and task.done.is_set():
                consumed.set()
            consumed.wait(wait_s)
            wait_s = max(0.0, until - time.monotonic()) if message.get("last") else 0.0
        return self._drive(key, lambda: self._receive(engine, current), {"wait_s": wait_s}, current)

    def _receive(self, engine: WeightTransferEngine[Any, Any], current: Round) -> dict[str, Any]:
        try:
            return self._receive_all(engine, current)
        finally:
            for consumed in list(current.pushed.values()):
                consumed.set()

    def _receive_all(
        self, engine: WeightTransferEngine[Any, Any], current: Round
    ) -> dict[str, Any]:
        binding, config = self._binding, self._config
        load = self._load = Delivery(current)
        load.in_loader = (
            True  # others may not be ready, the pause may wait for requests: not a stall
        )
        current.loader.begin()
        if current.gate is not None:
            load.at_gate = True
            engine.enter(current.gate)
            load.at_gate = False
        if config.load_mode == "in_place":
            self._enter(current)
        load._check_abort()
        if binding.start_update is not None and current.checkpoint_format:
            binding.start_update()
        load.in_loader = False
        try:
            engine.receive_weights(current.update_info, load)
        except RoundAborted:
            raise
        except RayxferError:
            raise
        except Exception as error:
            load._check_abort()
            raise TransferError(
                f"{type(engine).__name__}.receive_weights raised: {type(error).__name__}: {error}",
                phase="update",
                weight_version=current.version,
                name=load.last_name,
                cause=portable_cause(error),
            ) from error
        load._check_abort()
        if load.loader_error is not None:
            raise load.loader_error
        try:
            return self._prove(current, load)
        except RayxferError as error:
            # the stream was drained: nobody else is held up by this
            raise TransferError(
                error.message,
                phase="verify",
                weight_version=current.version,
                name=getattr(error, "name", None),
                cause=error,
            ) from error

    def _enter(self, current: Round) -> None:
        """From here on nobody reads the weights."""
        current.pausing = True
        if self._binding.pause is not None:
            self._binding.pause(self._config.pause_mode)
        self._begin_changing(current)
        current.pausing = False
        self._set_state(WorkerState.UPDATING)

    def _prove(self, current: Round, load: Delivery) -> dict[str, Any]:
        """Exactly once, complete, and what digests this worker vouches for: the vote."""
        load.check_complete()
        loader = current.loader
        verified, digests = "off", b""
        verify = current.digest is not None
        shared = verify and loader.shared and not current.prove
        if shared:
            verified = "loaded"
        elif verify:
            load.in_loader = True
            loaded = loader.loaded_digests() if loader.one_to_one else None
            verified = "delivered" if loaded is None else "loaded"
            found = load.delivered_digests() if loaded is None else loaded
            digests = array.array("Q", found).tobytes()
        unproven = loader.unproven()
        if unproven and not current.partial:
            raise ContractError(
                f"{len(unproven)} parameters were not written, the first is {unproven[0]!r}: a full "
                "sync has to cover every parameter",
                name=unproven[0],
            )
        current.voted = True
        # nothing to run between the votes and the record: no call needed for it
        current.finished = self._finish_hook(current) is None
        return {
            **(current.preflight if current.gate is not None else {}),
            "digests": digests,
            "shared": shared,
            "shared_proof": verify and loader.proves_shared and not shared,
            "verified": verified,
            "complete": None if unproven is None else not unproven,
            "finish": not current.finished,
        }

    def finish(self, message: dict[str, Any]) -> dict[str, Any]:
        """All live workers voted: run the loader's own finishing, before the version is recorded."""
        current = self._current(message)
        if not current.voted:
            raise StateError(f"finish before the vote in round {current.round_id}")
        hook = self._finish_hook(current)
        if current.finished or hook is None:
            return {"done": True}

        def run() -> dict[str, Any]:
            hook()
            current.finished = True
            return {}

        return self._drive(("finish", current.round_id, current.attempt), run, message, current)

    def _finish_hook(self, current: Round) -> Callable[[], Any] | None:
        """What is to run before the record; a staged load runs it once its weights are live."""
        staged = self._config.load_mode != "in_place"
        return self._binding.finish_update if current.checkpoint_format and not staged else None

    def commit(self, message: dict[str, Any]) -> dict[str, Any]:
        """The version is recorded: make it live, reset the cache, resume. Safe to repeat."""
        round_id = int(message["round_id"])
        if self._committed_round == round_id:
            return {"done": True, **self.snapshot()}
        key, task = ("commit", round_id), self._task
        if task is not None and task.key == key:  # under way, or failed
            return self._drive(key, dict, message)
        current = self._current(message)
        if not current.finished:
            raise StateError(f"commit before finish in round {round_id}")
        # where nothing could take long: no thread, no second call
        own_thread = not self._is_quick(current)
        return self._drive(key, lambda: self._commit(current), message, own_thread=own_thread)

    def _is_quick(self, current: Round) -> bool:
        binding = self._binding
        if binding.reset_cache is not None:
            return False
        hooks = binding.pause is not None or binding.finish_update is not None
        in_place = self._config.load_mode == "in_place"
        return in_place or (current.loader.commits_at_once and not hooks)

    def _commit(self, current: Round) -> dict[str, Any]:
        try:
            self._make_live(current)
        except Exception as error:
            # The version stands. Half-new weights, or stale cache entries beside new weights, would
            # answer wrongly: better to hold.
            self.torn_towards = current.version
            self._end_round(WorkerState.TORN)
            text = f"failed after commit: {type(error).__name__}: {error}"
            raise TransferError(text, phase="commit", cause=portable_cause(error)) from error
        self._end_round(WorkerState.READY)
        return self.snapshot()

    def _make_live(self, current: Round) -> None:
        binding, config = self._binding, self._config
        if config.load_mode != "in_place":
            self._enter(current)
            current.loader.commit()
            if binding.finish_update is not None and current.checkpoint_format:
                binding.finish_update()
        if current.loader.seen:
            self._learned = current.loader.seen
        if not current.partial:
            self._exact = not current.casts
        self.version, self.torn_towards = current.version, None
        if config.cache_policy == "reset" and binding.reset_cache is not None:
            _reset(binding.reset_cache)
        self._committed_round = current.round_id

    def abort(self, message: dict[str, Any]) -> dict[str, Any]:
        """End the round now. Answers `stuck=True` if its thread did not come back in time.

        Nothing loaded: the old version is READY and generation resumes. Something loaded in place:
        TORN. In either case the channel is closed and a new connect is needed.
        """
        round_id = int(message["round_id"])
        with self._lock:
            current = self._round
            if current is None or current.round_id != round_id:
                self._never_begin(round_id, message)
        if current is None or current.round_id != round_id:
            self._abort_connect(message.get("session_id"))
            return self.snapshot()
        current.aborted.set()
        if current.pausing and self._binding.resume is not None:
            self._binding.resume()  # calls the pause off
        self._abort_engine()
        task = self._task
        if task is not None and not task.done.wait(float(message.get("timeout_s", 5.0))):
            self._mark_torn(current)
            return {**self.snapshot(), "stuck": True}
        self._close_engine()
        if self._round is current:
            current.loader.discard()
            if current.loader.touched or current.previous == WorkerState.TORN:
                self._mark_torn(current)
                self._end_round(WorkerState.TORN)
            else:
                self._end_round(current.previous)
        return self.snapshot()

    def _never_begin(self, round_id: int, message: dict[str, Any]) -> None:
        """An abort may overtake the offer that it is about (the process was stopped, say): what comes late
        must not open a round that nobody will end."""
        owner, attempt = self._owner, message.get("attempt")
        ours = owner is not None and owner["controller_id"] == message.get("controller_id")
        if ours and attempt is not None:
            self._last_round = max(self._last_round, (round_id, int(attempt)))

    @contextmanager
    def outside_rounds(self) -> Iterator[None]:
        """Hold off rounds while the caller looks at, or changes, the model.

        Waits for a round that changes weights to end; a torn model may be looked at.
        """
        with self._quiet:
            while self._changing:
                self._quiet.wait(1.0)
            self._visitors += 1
        try:
            yield
        finally:
            with self._quiet:
                self._visitors -= 1
                self._quiet.notify_all()

    def _begin_changing(self, current: Round) -> None:
        with self._quiet:
            while self._visitors:
                if current.aborted.is_set():
                    return
                self._quiet.wait(0.05)
            self._changing = True

    # ---- inside --------------------------------------------------------------------------------

    def _abort_connect(self, session_id: str | None) -> None:
        """End a connect that the sender gave up, also one that has not begun yet."""
        with self._engine_lock:
            if session_id is not None:
                self._dead_sessions.append(session_id)
            task = self._task
        running = task is not None and not task.done.is_set() and task.key[0] == "connect"
        if running and task is not None and session_id in (None, task.key[1]):
            self._abort_engine()

    def _call_off(self) -> None:
        """This process ends."""
        self._abort_engine()
        daemon(self._abort_stale_round, "rayxfer-end")

    def _abort_engine(self) -> None:
        engine = self._engine
        if engine is not None:
            engine.abort()

    def _mark_torn(self, current: Round) -> None:
        self.torn_towards = current.version
        self._set_state(WorkerState.TORN)

    def _end_round(self, state: WorkerState) -> None:
        self._round = None
        with self._quiet:
            self._changing = False
            self._quiet.notify_all()
        self._set_state(state)
        if state == WorkerState.READY and self._binding.resume is not None:
            self._binding.resume()

    def _set_state(self, state: WorkerState) -> None:
        self.state = state
        if self._binding.on_state is not None:
            self._binding.on_state(state)

    def _current(self, message: dict[str, Any]) -> Round:
        self._check_owner(message)
        current = self._round
        # a controller that completes or ends a dead trainer's round does not know the attempt
        attempt = message.get("attempt", current.attempt if current is not None else 0)
        key = (int(message["round_id"]), int(attempt))
        if current is None or (current.round_id, current.attempt) != key:
            now = "none" if current is None else current.round_id
            raise StateError(
                f"round {message['round_id']} is not open on this worker (open: {now})"
            )
        return current

    def _drive(
        self,
        key: tuple[Any, ...],
        function: Callable[[], dict[str, Any]],
        message: dict[str, Any],
        current: Round | None = None,
        *,
        own_thread: bool = True,
    ) -> dict[str, Any]:
        """Start the task of `key` unless it runs or ran; wait a slice; answer result or progress.

        While an earlier task is still ending, that is what is waited for: the caller asks again.
        `current`: the round that the task belongs to; it is not started once that is over.
        """
        until = time.monotonic() + float(message.get("wait_s", 0.0))
        mine = False
        while True:
            with self._lock:
                task = self._task
                if task is not None and task.key == key:
                    break
                if current is not None and (self._round is not current or current.aborted.is_set()):
                    raise StateError(f"round {current.round_id} is over on this worker")
                if task is None or task.done.is_set():
                    task = self._task = Task(
                        key, function, own_thread=own_thread, call_off=self._call_off
                    )
                    mine = not own_thread
                    break
            if not task.done.wait(max(0.0, until - time.monotonic())):
                return self._progress()
        if mine:
            task.run()
        task.done.wait(max(0.0, until - time.monotonic()))
        if task.done.is_set():
            return {"done": True, **task.result, "state": str(self.state), "version": self.version}
        return self._progress()

    def _progress(self) -> dict[str, Any]:
        load, current = self._load, self._round
        return {
            "done": False,
            "acked": 0 if current is None else _leading(current.pushed),
            "num_bytes": 0 if load is None else load.num_bytes,
            "busy": load is not None and load.in_loader and not load.at_gate,
            "at_gate": load is not None and load.at_gate,
            "name": None if load is None else load.last_name,
            "at": time.monotonic(),
            "failed": None if load is None else load.loader_error,
        }


_ABANDON_S = 0.5
_CACHE_TRIES = 3


def _reset(hook: Callable[[], Any]) -> None:
    """Run a cache hook; one that refuses (returns False) is asked again a few times."""
    for attempt in range(_CACHE_TRIES):
        if hook() is not False:
            return
        time.sleep(0.05 * (attempt + 1))
    raise StateError(f"the cache hook refused {_CACHE_TRIES} times (returned False)")


def _leading(pushed: dict[int, threading.Event]) -> int:
    """How many payloads from the first on were consumed."""
    count = 0
    while (event := pushed.get(count)) is not None and event.is_set():
        count += 1
    return count
