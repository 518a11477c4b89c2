"""An inference worker around vLLM, with the surface of `InferenceActor`.

`engine="offline"`: vLLM's engine in this actor's process, stepped by a thread of its own. `engine="async"`:
vLLM's `AsyncLLM`, whose engine core (and, with tensor parallelism, every rank) is a process of its own.
Either way the weights are changed inside vLLM's worker processes by `rayxfer.vllm`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch

import rayxfer
from actors.gate import Gate, RequestAborted
from actors.generation import Completion, check_request
from actors.inference import CONCURRENCY_GROUPS
from rayxfer.client import reconstructed
from rayxfer.daemons import daemon
from rayxfer.errors import BackendUnavailable, ConfigError, StateError, TransferTimeout
from rayxfer.report import WorkerState
from rayxfer.vllm.plugin import BACKEND, ENGINES_VARIABLE, session_of
from rayxfer.vllm.relay import Relay
from rayxfer.vllm.session import REBUILT_VARIABLE
from rayxfer.vllm.wire import decode, encode
from rayxfer.worker import WorkerMixin

__all__ = ["VLLMActor", "VLLMWorker"]

T = TypeVar("T")

_CPU_KV_CACHE_BYTES = 256 << 20
_START_TIMEOUT_S = 600.0
_CALL_TIMEOUT_S = 600.0


class VLLMWorker(WorkerMixin):
    """The plain class; `VLLMActor` is the Ray actor class made of it.

    Args:
        model: path of a model that vLLM can load.
        engine: "offline" or "async"; see the module's text.
        engines: rayxfer engines of your own to register inside vLLM's processes: name →
            "module.path:ClassName".
        engine_args: vLLM's own (`vllm.EngineArgs`). Here `skip_tokenizer_init` is on by default, since
            prompts are token ids, and on a CPU `enforce_eager` and a key-value cache of 256 MiB are.

    Raises:
        ConfigError: an unknown `engine`. BackendUnavailable: no vLLM, or one that rayxfer does not know.
    """

    def __init__(
        self,
        model: str,
        *,
        engine: str = "offline",
        engines: dict[str, str] | None = None,
        **engine_args: Any,
    ) -> None:
        if engine not in ("offline", "async"):
            raise ConfigError(f"engine={engine!r}: expected 'offline' or 'async'")
        _prepare_environment(engines or {})
        args = _arguments(model, engine_args)
        self._vllm: _Offline | _Async = _Offline(args) if engine == "offline" else _Async(args)
        self._refusal: str | None = None
        self._relay = Relay(self._vllm.rpc, self._vllm, self._on_state)
        self._relay.refresh()
        self._on_state(self._relay.state)

    def _on_state(self, state: WorkerState) -> None:
        self._refusal = None
        if state == WorkerState.CONNECTING:
            self._refusal = (
                "this worker does not hold the committed version (it was restarted, or slept without "
                "keeping its weights): it serves again after the next sync"
            )

    @ray.method(concurrency_group="generate")
    def generate(
        self,
        prompt_token_ids: list[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        eos_token_id: int | None = None,
        timeout_s: float = 600.0,
    ) -> list[Completion]:
        """One completion per prompt. During a sync requests wait (see
        `WeightTransferConfig.pause_mode`), and fail only at their own `timeout_s` or at shutdown.

        Raises:
            ConfigError: bad arguments. TransferTimeout: `timeout_s` passed. StateError: this worker
                refuses, or was shut down.
        """
        check_request(prompt_token_ids, max_new_tokens, temperature)
        if self._refusal is not None:
            raise StateError(self._refusal)
        from vllm import SamplingParams

        params = [
            SamplingParams(
                max_tokens=max_new_tokens,
                temperature=temperature,
                seed=None if seed is None or temperature == 0 else seed + index,
                logprobs=0,
                ignore_eos=True,
                stop_token_ids=None if eos_token_id is None else [eos_token_id],
                detokenize=False,
            )
            for index in range(len(prompt_token_ids))
        ]
        prompts = [list(map(int, prompt)) for prompt in prompt_token_ids]
        return self._vllm.generate(
            prompts, params, time.monotonic() + timeout_s, lambda: self._relay.version
        )

    def apply(self, fn: Callable[[torch.nn.Module], T]) -> T:
        """`fn(model)` on vLLM's own module, while no round changes the weights; its result.

        Raises:
            BackendUnavailable: the model is in another process (`engine="async"`, tensor parallelism):
                callables do not travel there.
        """
        worker = self._vllm.local_worker()
        if worker is None:
            raise BackendUnavailable(
                "apply() needs the model in this process: engine='offline' on one rank has it; "
                "callables are never sent to vLLM's own processes"
            )
        with session_of(worker).outside_rounds():
            return fn(worker.get_model())

    @ray.method(concurrency_group="control")
    def pause(self, mode: str = "keep") -> None:
        """Stop generation as a sync would ("keep", "wait" or "abort"), until `resume`."""
        self._vllm.pause(mode)

    @ray.method(concurrency_group="control")
    def resume(self) -> None:
        """Let generation go on. Does nothing while the weights are torn, being updated or away."""
        if self._whole() and not self._relay.sleeping[1]:
            self._vllm.resume()

    def _whole(self) -> bool:
        return self._relay.state == WorkerState.READY and not self._relay.in_round()

    def sleep(self, level: int = 1) -> None:
        """vLLM's sleep: 1 keeps the weights in host memory, 2 throws them away.

        No sync can begin until `wake_up`. After level 2 this worker is CONNECTING, and refuses
        requests, until the next sync has brought weights; those that were running wait for it.

        Raises:
            StateError: in the middle of a round. Nothing has changed.
        """
        before = self._relay.sleeping
        self._relay.asleep(True)
        if self._relay.in_round():
            self._relay.asleep(*before)
            raise StateError("cannot sleep in the middle of a round")
        self._vllm.sleep(level)
        if level >= 2:
            self._relay.forget()

    def wake_up(self, tags: list[str] | None = None) -> None:
        """vLLM's wake-up. With tags, `["weights"]` is what a sync needs; requests run again once
        everything is awake and the weights are whole."""
        whole = self._whole()
        awake = self._vllm.wake_up(tags, whole)
        weights_back = tags is None or "weights" in tags
        self._relay.asleep(self._relay.sleeping[0] and not weights_back, not awake)
        if awake and not whole and self._whole():  # a round has ended meanwhile
            self._vllm.resume()

    @ray.method(concurrency_group="control")
    def state(self) -> str:
        """This worker's `WorkerState`."""
        return str(self._relay.state)

    @ray.method(concurrency_group="control")
    def weight_version(self) -> int:
        """The version that this worker holds (0: what it was built with)."""
        return self._relay.version

    @ray.method(concurrency_group="control")
    def vllm_weight_version(self) -> str:
        """What vLLM itself says, as text ("default" before the first sync)."""
        return self._vllm.get_version()

    @ray.method(concurrency_group="control")
    def ping(self) -> bool:
        """True: this process answers, and vLLM's engine is alive."""
        self._vllm.check()
        return True

    @ray.method(concurrency_group="rayxfer")
    def rayxfer_call(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """For rayxfer's use."""
        return self._relay.handle(op, message)

    @ray.method(concurrency_group="control")
    def rayxfer_signal(self, op: str, message: dict[str, Any]) -> dict[str, Any]:
        """For rayxfer's use."""
        return self._relay.handle(op, message)

    def shutdown(self) -> None:
        """End waiting and coming requests, and vLLM. The actor itself goes on."""
        self._vllm.shutdown()


def _prepare_environment(engines: dict[str, str]) -> None:
    """What vLLM's processes will read. Has to come before vLLM is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    named = ",".join(f"{name}={target}" for name, target in engines.items())
    given = os.environ.get(ENGINES_VARIABLE, "")
    os.environ[ENGINES_VARIABLE] = ",".join(filter(None, [named, given]))  # the first one counts
    os.environ[REBUILT_VARIABLE] = "1" if reconstructed() else "0"
    # vLLM's processes are started afresh: they have to find rayxfer where this one did
    here = str(Path(rayxfer.__file__).parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    if here not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, known]))


def _arguments(model: str, given: dict[str, Any]) -> dict[str, Any]:
    try:
        from vllm.config import WeightTransferConfig
        from vllm.platforms import current_platform
    except ImportError as error:
        raise BackendUnavailable(
            "VLLMActor needs vLLM: pip install 'rayxfer[vllm]' (or, on a CPU, see the README)",
            cause=error,
        ) from error
    args: dict[str, Any] = {"skip_tokenizer_init": True}
    if current_platform.is_cpu():
        args |= {"enforce_eager": True, "kv_cache_memory_bytes": _CPU_KV_CACHE_BYTES}
    args |= {"model": model, "weight_transfer_config": WeightTransferConfig(backend=BACKEND)}
    if not _installed_plugin():
        args["worker_extension_cls"] = "rayxfer.vllm.extension.WorkerExtension"
    return {**args, **given}


def _installed_plugin() -> bool:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    allowed = os.environ.get("VLLM_PLUGINS")
    named = any(point.name == BACKEND for point in points)
    return named and (allowed is None or BACKEND in allowed.split(","))


class _Offline:
    """vLLM's `LLMEngine` in this process, stepped by a thread while its gate is open."""

    def __init__(self, args: dict[str, Any]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from vllm import LLM

        self._engine: Any = LLM(**args).llm_engine
        self._gate = Gate()
        self._lock = threading.Lock()  # vLLM's engine takes one caller at a time
        self._turn = threading.Condition()
        self._waiting = 0  # callers that the next step lets go first: a lock is not fair
        self._work = threading.Condition()
        self._outputs: dict[str, Any] = {}
        self._wanted: set[str] = set()
        self._ids = itertools.count()
        self._failure: BaseException | None = None
        self._closed = False
        daemon(self._step_forever, "vllm-step", self.shutdown)

    def _step_forever(self) -> None:
        while not self._closed:
            with self._work:
                if not self._engine.has_unfinished_requests():
                    self._work.wait(0.5)
                    continue
            with self._turn:
                while self._waiting:
                    self._turn.wait(1.0)
            try:
                with self._gate.step(self._gate.ticket(), float("inf")), self._lock:
                    outputs = self._engine.step()
            except RequestAborted:
                continue
            except BaseException as error:
                if self._closed:
                    return
                self._failure = error
                outputs = []
            with self._work:
                for output in outputs:
                    if output.request_id in self._wanted:
                        self._outputs[output.request_id] = output
                self._work.notify_all()
            if self._failure is not None:
                return

    def generate(
        self,
        prompts: list[list[int]],
        params: list[Any],
        deadline: float,
        version: Callable[[], int],
    ) -> list[Completion]:
        with self._gate.request(deadline) as ticket:
            self.check()
            dispatched = version()
            ids = [f"rayxfer-{next(self._ids)}" for _ in prompts]
            with self._work:
                self._wanted.update(ids)
            try:
                self._add(ids, prompts, params)
                late = self._await(ids, ticket, deadline)
            finally:
                with self._work:
                    self._wanted.difference_update(ids)
                    outputs = [self._outputs.pop(request_id, None) for request_id in ids]
            if late:
                raise TransferTimeout("the request's own deadline passed")
            finished = version()
        return [_completion(output, dispatched, finished) for output in outputs]

    def _add(self, ids: list[str], prompts: list[list[int]], params: list[Any]) -> None:
        """All of them, or none."""
        with self._between_steps():
            try:
                for request_id, prompt, one in zip(ids, prompts, params, strict=True):
                    self._engine.add_request(request_id, {"prompt_token_ids": prompt}, one)
            except BaseException:
                self._engine.abort_request(ids)
                raise

    def _await(self, ids: list[str], ticket: int, deadline: float) -> bool:
        """Until all are finished or aborted; True: the deadline passed."""

        def open_ids() -> list[str]:
            found = (self._outputs.get(request_id) for request_id in ids)
            return [i for i, o in zip(ids, found, strict=True) if o is None or not o.finished]

        while True:
            with self._work:
                self._work.notify_all()
                if not (left := open_ids()):
                    return False
                self._work.wait(0.05)
                left = open_ids()
            if self._closed:
                raise StateError("this worker was shut down")
            self.check()
            late = time.monotonic() > deadline
            if left and (late or self._gate.ticket() != ticket):
                with self._between_steps():
                    self._engine.abort_request(left)
                return late

    def check(self) -> None:
        if self._failure is not None:
            raise StateError(f"vLLM's engine failed: {self._failure}")

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        """vLLM's engine, for others than the thread that steps it, which gives way."""
        with self._turn:
            self._waiting += 1
        try:
            with self._lock:
                yield
        finally:
            with self._turn:
                self._waiting -= 1
                self._turn.notify_all()

    def local_worker(self) -> Any:
        """vLLM's worker, if it is in this process."""
        executor = self._engine.engine_core.engine_core.model_executor
        wrapper = getattr(executor, "driver_worker", None)
        return getattr(wrapper, "worker", None)

    def rpc(self, op: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        worker = self.local_worker()
        if worker is not None:
            # no process in between: nothing to encode, and engines as their owner has them
            ranks = message.get("ranks")
            return [session_of(worker).handle(op, {**message, **ranks[0]} if ranks else message)]
        with self._between_steps():
            return _decoded(self._engine.collective_rpc("rayxfer_call", args=(op, encode(message))))

    def pause(self, mode: str) -> None:
        self._gate.pause(mode)

    def resume(self) -> None:
        self._gate.resume()

    def reset_cache(self) -> bool:
        with self._between_steps():
            done = bool(self._engine.reset_prefix_cache(reset_running_requests=True))
            self._engine.reset_mm_cache()
            self._engine.reset_encoder_cache()
        return done

    def set_version(self, version: int) -> None:
        with self._between_steps():
            self._engine.set_weight_version(str(version))

    def get_version(self) -> str:
        return str(self._engine.get_weight_version())

    def sleep(self, level: int) -> None:
        self._gate.pause("keep")
        with self._between_steps():
            self._engine.sleep(level, "keep")

    def wake_up(self, tags: list[str] | None, whole: bool) -> bool:
        with self._between_steps():
            awake = bool(self._engine.wake_up(tags))
        if awake and whole:
            self._gate.resume()
        return awake

    def shutdown(self) -> None:
        self._closed = True
        self._gate.shut()
        with self._work:
            self._work.notify_all()


class _Async:
    """vLLM's `AsyncLLM`, on an event loop in a thread of its own."""

    def __init__(self, args: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm-loop", daemon=True).start()
        self._ids = itertools.count()
        self._closed = False
        self._open, self._paused = threading.Condition(), False
        self._llm: Any = self._run(self._start(args), _START_TIMEOUT_S)

    async def _start(self, args: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    def _run(self, coroutine: Coroutine[Any, Any, T], timeout_s: float = _CALL_TIMEOUT_S) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise TransferTimeout(f"vLLM did not answer within {timeout_s:g} s") from None
        except Exception as error:
            if self._dead():
                # vLLM's processes are gone and do not come back: neither does this actor without a
                # restart, which is Ray's to do.
                os._exit(1)
            raise error

    def _dead(self) -> bool:
        llm = getattr(self, "_llm", None)
        return llm is not None and bool(llm.errored) and not self._closed

    def generate(
        self,
        prompts: list[list[int]],
        params: list[Any],
        deadline: float,
        version: Callable[[], int],
    ) -> list[Completion]:
        self._await_open(deadline)
        dispatched = version()

        async def one(prompt: list[int], param: Any) -> Any:
            last = None
            async for output in self._llm.generate(
                {"prompt_token_ids": prompt}, param, f"rayxfer-{next(self._ids)}"
            ):
                last = output
            return last

        async def all_of_them() -> list[Any]:
            jobs = [asyncio.ensure_future(one(*pair)) for pair in zip(prompts, params, strict=True)]
            left = max(0.01, deadline - time.monotonic())
            try:
                return list(await asyncio.wait_for(asyncio.gather(*jobs), left))
            finally:
                for job in jobs:  # where one has failed, the others are not left running
                    job.cancel()

        try:
            outputs = self._run(all_of_them(), max(0.01, deadline - time.monotonic()) + 5.0)
        except TimeoutError:
            raise TransferTimeout("the request's own deadline passed") from None
        finished = version()
        return [_completion(output, dispatched, finished) for output in outputs]

    def _await_open(self, deadline: float) -> None:
        """Hold a request that comes in a pause: the version that serves it is the one after."""
        with self._open:
            while self._paused or self._closed:
                if self._closed:
                    raise StateError("this worker was shut down")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TransferTimeout(
                        "the request's own deadline passed while the weights were being updated"
                    )
                self._open.wait(min(left, 1.0))

    def _set_paused(self, paused: bool) -> None:
        with self._open:
            self._paused = paused
            self._open.notify_all()

    def check(self) -> None:
        if self._dead():
            os._exit(1)

    def local_worker(self) -> Any:
        return None

    def rpc(self, op: str, message: dict[str, Any]) -> list[dict[str, Any]]:
        call = self._llm.collective_rpc("rayxfer_call", args=(op, encode(message)))
        return _decoded(self._run(call))

    def pause(self, mode: str) -> None:
        before = self._paused
        self._set_paused(True)
        try:
            self._run(self._llm.pause_generation(mode=mode, clear_cache=False))
        except BaseException:
            self._set_paused(before)
            raise

    def resume(self) -> None:
        self._run(self._llm.resume_generation())
        self._set_paused(False)

    def reset_cache(self) -> bool:
        async def reset() -> bool:
            done = await self._llm.reset_prefix_cache(reset_running_requests=True)
            await self._llm.reset_mm_cache()
            await self._llm.reset_encoder_cache()
            return bool(done)

        return self._run(reset())

    def set_version(self, version: int) -> None:
        self._run(self._llm.update_weight_version(str(version)))

    def get_version(self) -> str:
        return str(self._run(self._llm.get_weight_version()))

    def sleep(self, level: int) -> None:
        self._set_paused(True)
        self._run(self._llm.sleep(level, "keep"))

    def wake_up(self, tags: list[str] | None, whole: bool) -> bool:
        async def wake() -> bool:
            # Fully awake, vLLM resumes by itself: the pause is to be there before the next step.
            waking = asyncio.ensure_future(self._llm.wake_up(tags))
            if not whole:
                for _ in range(3):  # let it be sent
                    await asyncio.sleep(0)
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            awake = bool(await waking)
            if not whole:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            return awake

        awake = self._run(wake())
        if awake and whole:
            self._set_paused(False)
        return awake

    def shutdown(self) -> None:
        self._closed = True
        self._set_paused(self._paused)
        with contextlib.suppress(RuntimeError):
            self._llm.shutdown()


def _decoded(texts: list[str]) -> list[dict[str, Any]]:
    return [decode(text) for text in texts]


def _completion(output: Any, dispatched: int, finished: int) -> Completion:
    if output is None or not output.outputs:
        return Completion([], [], dispatched, finished, "abort")
    one = output.outputs[0]
    tokens = [int(token) for token in one.token_ids]
    scores = [
        float(at[token].logprob) for at, token in zip(one.logprobs or (), tokens, strict=False)
    ]
    reason = one.finish_reason if one.finish_reason in ("length", "stop") else "abort"
    return Completion(tokens, scores, dispatched, finished, reason)


VLLMActor = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(VLLMWorker)
"""`VLLMActor.options(num_cpus=0).remote(model=PATH, **engine_args)`; see `VLLMWorker`."""
