"""A user's four-method engine inside vLLM: under a Controller, and by vLLM's own calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rayxfer import (
    Controller,
    RayxferError,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from tests.conformance.four_method_engine import FourMethodEngine
from tests.vllm.tiny import ENGINE_ARGS, PROMPTS, ask, build, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KIND = "llama"
TARGET = f"{FourMethodEngine.__module__}:{FourMethodEngine.__name__}"


@pytest.fixture(scope="module")
def registered() -> str:
    WeightTransferEngineFactory.register_engine("four", FourMethodEngine)
    return "four"


@pytest.mark.parametrize("engine", ["offline", "async"])
def test_under_a_controller(
    engine: str,
    registered: str,
    spawn: Callable[..., Any],
    fresh: Callable[..., Any],
    tmp_path: Path,
) -> None:
    config = WeightTransferConfig(
        backend=registered,
        init_info={"directory": str(tmp_path), "timeout_s": 20.0},
        update_info={"greeting": "hello"},
    )
    if engine == "async":
        # vLLM's own processes take engines by name only, so this one is unknown there …
        stranger = spawn(KIND, 0, engine="async")
        with pytest.raises(RayxferError, match="'four'"):
            Controller([stranger], config).sync_weights(build(KIND, 1))
        ray.kill(stranger)
    # … until it is registered in them
    worker = spawn(KIND, 0, engine=engine, engines={"four": TARGET} if engine == "async" else {})
    controller = Controller([worker], config)
    for version in (1, 2):
        model = build(KIND, version)
        assert controller.sync_weights(model).workers[0].state == "READY"
    assert ask(worker) == fresh(save(model, tmp_path / "model"))
    controller.shutdown()
    ray.kill(worker)


@ray.remote(num_cpus=0)
class Native:
    """vLLM driven by its own weight-transfer calls."""

    def __init__(self, path: str) -> None:
        import os

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["RAYXFER_VLLM_ENGINES"] = f"four={TARGET}"
        from vllm import LLM
        from vllm.config import WeightTransferConfig as Theirs

        self.llm = LLM(
            path,
            skip_tokenizer_init=True,
            enforce_eager=True,
            weight_transfer_config=Theirs(backend="rayxfer"),
            worker_extension_cls="rayxfer.vllm.extension.WorkerExtension",
            **ENGINE_ARGS,
        )

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.llm, method)(*args)

    def answers(self) -> list[tuple[list[int], list[float]]]:
        from vllm import SamplingParams

        self.llm.reset_prefix_cache()
        params = SamplingParams(
            max_tokens=8, temperature=0, logprobs=0, ignore_eos=True, detokenize=False
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        found = []
        for output in self.llm.generate(prompts, params, use_tqdm=False):
            one = output.outputs[0]
            tokens = list(one.token_ids)
            found.append((tokens, [a[t].logprob for a, t in zip(one.logprobs, tokens)]))  # noqa: B905
        return found


def test_by_vllms_own_calls(fresh: Callable[..., Any], tmp_path: Path, ray_session: None) -> None:
    """Also: an update that fails half-way leaves nothing behind that the next one would take up."""
    folder = tmp_path / "ports"
    folder.mkdir()
    native = Native.remote(save(build(KIND, 0), tmp_path / "0"))

    def call(method: str, *args: Any) -> Any:
        return ray.get(native.call.remote(method, *args), timeout=60)

    own = {"directory": str(folder), "timeout_s": 20.0}
    call("init_weight_transfer_engine", {"init_info": {"backend": "four", "init_info": own}})

    def send(model: torch.nn.Module, stop_after: int | None = None) -> None:
        named = [(n, p.detach()) for n, p in model.named_parameters()]
        info = {
            "names": [n for n, _ in named],
            "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in named],
            "shapes": [list(t.shape) for _, t in named],
            "greeting": "hello",
        }

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for count, item in enumerate(named):
                if count == stop_after:
                    return
                yield item

        args = {**own, "update_info": info, "num_workers": 1}
        sender = threading.Thread(
            target=FourMethodEngine.trainer_send_weights, args=(tensors(), args), daemon=True
        )
        call("start_weight_update")
        sender.start()
        call("update_weights", {"update_info": info})
        call("finish_weight_update")
        sender.join(20)

    for seed in (1, 2):
        for stop_after in (1, 5, 9):  # inside a fused layer, after it, in the next
            with pytest.raises(Exception, match="the sender left"):
                send(build(KIND, 90 + stop_after), stop_after)
        model = build(KIND, seed)
        send(model)
        got = ray.get(native.answers.remote(), timeout=60)
        assert got == fresh(save(model, tmp_path / str(seed)))
    with pytest.raises(Exception, match="no_such"):
        call("init_weight_transfer_engine", {"init_info": {"backend": "no_such"}})
    ray.kill(native)
