"""What goes wrong in front of a real vLLM: nothing half-new is ever served, and the next sync is exact."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from rayxfer import (
    ContractError,
    Controller,
    PartialUpdate,
    StateError,
    TransferError,
    TransferTimeout,
    WeightTransferConfig,
)
from rayxfer.source import MappingSource
from tests.vllm.tiny import ask, build, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

KIND = "qwen2"  # fused projections with biases, tied embeddings


@pytest.fixture(scope="module")
def worker(spawn: Callable[..., Any]) -> Any:
    return spawn(KIND, 0)


@pytest.fixture
def controller(worker: Any) -> Any:
    made = Controller([worker], WeightTransferConfig(backend="shm"))
    yield made
    made.shutdown()


def weights(seed: int) -> dict[str, torch.Tensor]:
    model = build(KIND, seed)
    return {name: p.detach() for name, p in model.named_parameters()}


def state_of(worker: Any) -> str:
    return str(ray.get(worker.state.remote(), timeout=20))


Q = "model.layers.0.self_attn.q_proj.weight"


def wrong_name(offer: dict[str, torch.Tensor]) -> None:
    offer["model.layers.0.self_attn.query.weight"] = offer.pop(Q)


def wrong_shape(offer: dict[str, torch.Tensor]) -> None:
    offer[Q] = offer[Q][:-1].clone()


def too_long(offer: dict[str, torch.Tensor]) -> None:
    """vLLM would cut it to size without a word."""
    offer[Q] = torch.cat([offer[Q], offer[Q]])


def too_wide(offer: dict[str, torch.Tensor]) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    offer[name] = torch.cat([offer[name], offer[name]], dim=1)


def more_words(offer: dict[str, torch.Tensor]) -> None:
    name = "model.embed_tokens.weight"
    offer[name] = torch.cat([offer[name], offer[name][:20]])


def integers(offer: dict[str, torch.Tensor]) -> None:
    offer[Q] = offer[Q].to(torch.int64)


def eight_bits(offer: dict[str, torch.Tensor]) -> None:
    offer["model.norm.weight"] = offer["model.norm.weight"].to(torch.float8_e4m3fn)


def several(offer: dict[str, torch.Tensor]) -> None:
    wrong_shape(offer)
    offer["model.norm.wait"] = offer.pop("model.norm.weight")
    integers_elsewhere = "model.layers.1.mlp.up_proj.weight"
    offer[integers_elsewhere] = offer[integers_elsewhere].to(torch.int32)


def missing_part(offer: dict[str, torch.Tensor]) -> None:
    del offer["model.layers.1.self_attn.v_proj.weight"]


def missing_bias(offer: dict[str, torch.Tensor]) -> None:
    del offer["model.layers.1.self_attn.v_proj.bias"]


def missing_norm(offer: dict[str, torch.Tensor]) -> None:
    del offer["model.norm.weight"]


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (wrong_name, r"self_attn\.query"),
        (wrong_shape, r"q_proj\.weight"),
        (too_long, r"shape mismatch at .*q_proj\.weight.*\[256, 128\]"),
        (too_wide, r"shape mismatch at .*down_proj\.weight"),
        (more_words, r"embed_tokens.*120, 128.*assert"),
        (integers, r"dtype mismatch at .*q_proj\.weight.*bfloat16.*int64"),
        (eight_bits, r"dtype mismatch at 'model\.norm\.weight'.*float8"),
        (several, r"(?s)q_proj\.weight.*norm\.wait.*up_proj\.weight"),
        (missing_part, r"layers\.1\.self_attn\.qkv_proj\.weight.*elements would be written"),
        (missing_bias, r"layers\.1\.self_attn\.qkv_proj\.bias"),
        (missing_norm, r"model\.norm\.weight"),
    ],
)
def test_an_offer_that_does_not_fit_changes_nothing(
    worker: Any, controller: Any, spoil: Callable[[dict[str, torch.Tensor]], None], says: str
) -> None:
    before = ask(worker)
    version = controller.status().version
    offer = weights(21)
    spoil(offer)
    with pytest.raises(ContractError, match=says):
        controller.sync_weights(offer)
    assert state_of(worker) == "READY"
    assert controller.status().version == version
    assert ask(worker) == before


def test_a_part_of_a_layer_is_refused_and_a_whole_one_is_exact(
    worker: Any, controller: Any, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    base = build(KIND, 22)
    controller.sync_weights(base)
    other = weights(23)
    prefix = "model.layers.1.self_attn."
    part = {name: t for name, t in other.items() if name == prefix + "k_proj.weight"}
    with pytest.raises(ContractError, match="offered together"):
        controller.sync_weights(part, partial=True)
    # even its weights without its biases: vLLM reloads a layer as a whole
    halves = {n: t for n, t in other.items() if n.startswith(prefix) and n.endswith("proj.weight")}
    with pytest.raises(ContractError, match="bias"):
        controller.sync_weights(halves, partial=True)
    assert state_of(worker) == "READY"
    whole = {name: t for name, t in other.items() if name.startswith(prefix)}
    report = controller.sync_weights(whole, partial=True)
    assert report.workers[0].state == "READY"
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if name in whole:
                parameter.copy_(whole[name])
    assert ask(worker) == fresh(save(base, tmp_path / "mixed"))


def test_several_dtypes_in_one_bucket(
    worker: Any, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    controller = Controller(
        [worker], WeightTransferConfig(backend="gloo", bucket_size_bytes=1 << 30)
    )
    model = build(KIND, 24)
    offer = {
        name: p.detach().float() if "norm" in name or name.endswith("bias") else p.detach()
        for name, p in model.named_parameters()
    }
    report = controller.sync_weights(MappingSource(offer))
    casts = report.workers[0].casts
    assert casts["model.norm.weight"] == "float32 -> bfloat16"
    assert set(casts) == {name for name in offer if "norm" in name or name.endswith("bias")}
    assert ask(worker) == fresh(save(model, tmp_path / "24"))
    controller.shutdown()


def break_loader(after: int) -> Callable[[torch.nn.Module], None]:
    """Make vLLM's own `load_weights` raise once, after some tensors with real bytes."""

    def patch(model: torch.nn.Module) -> None:
        original = type(model).load_weights
        seen = {"count": 0}

        def load(self: Any, items: Any) -> Any:
            def counted() -> Any:
                for name, tensor in items:
                    if not tensor.is_meta and self is model:
                        seen["count"] += 1
                        if seen["count"] == after:
                            raise RuntimeError("the disk is on fire")
                    yield name, tensor

            return original(self, counted())

        model.load_weights = load.__get__(model)  # type: ignore[attr-defined]

    return patch


def mend_loader(model: torch.nn.Module) -> None:
    del model.load_weights


@pytest.mark.parametrize("after", [1, 2, 9, 20])
def test_a_load_that_fails_half_way_tears_and_the_next_one_is_exact(
    worker: Any, fresh: Callable[..., Any], tmp_path: Path, after: int
) -> None:
    controller = Controller([worker], WeightTransferConfig(backend="shm", bucket_size_bytes=1))
    controller.sync_weights(build(KIND, 30))
    version = controller.status().version
    ray.get(worker.apply.remote(break_loader(after)), timeout=20)
    try:
        with pytest.raises(TransferError, match="the disk is on fire"):
            controller.sync_weights(build(KIND, 31))
    finally:
        ray.get(worker.apply.remote(mend_loader), timeout=20)
    assert state_of(worker) == "TORN"
    assert controller.status().version == version
    with pytest.raises(TransferTimeout):  # held, not answered with half of each
        ask(worker, timeout_s=0.5)
    model = build(KIND, 32)
    report = controller.sync_weights(model)
    assert report.workers[0].state == "READY"
    assert ask(worker) == fresh(save(model, tmp_path / "32"))
    controller.shutdown()


def test_staged_weights_leave_the_old_ones_whole(
    worker: Any, fresh: Callable[..., Any], tmp_path: Path
) -> None:
    config = WeightTransferConfig(backend="shm", load_mode="staged", bucket_size_bytes=1)
    controller = Controller([worker], config)
    controller.sync_weights(build(KIND, 33))
    before = ask(worker)
    offer = weights(34)

    def broken() -> Any:
        yield from list(offer.items())[:7]
        raise RuntimeError("the trainer stumbled")

    class Stumbling(MappingSource):
        def __iter__(self) -> Any:
            return broken()

    with pytest.raises(Exception, match="stumbled"):
        controller.sync_weights(Stumbling(offer))
    assert state_of(worker) == "READY"
    assert ask(worker) == before
    model = build(KIND, 34)
    controller.sync_weights(model)
    assert ask(worker) == fresh(save(model, tmp_path / "34"))
    controller.shutdown()


def test_a_cached_prefix_is_never_answered_from_old_weights(worker: Any) -> None:
    """The prompt is longer than a block and was cached before each sync. With the cache kept the answer
    is another, so this would be seen."""
    answers = {}
    for policy in ("reset", "keep"):
        controller = Controller([worker], WeightTransferConfig(backend="shm", cache_policy=policy))
        controller.sync_weights(build(KIND, 40))
        ask(worker)
        controller.sync_weights(build(KIND, 41))
        answers[policy] = ask(worker)
        controller.shutdown()
        fill = Controller([worker], WeightTransferConfig(backend="shm"))
        fill.sync_weights(build(KIND, 39))
        fill.shutdown()
    assert answers["reset"][0] != answers["keep"][0]
    assert answers["reset"][1] == answers["keep"][1]  # too short to be cached


@pytest.fixture(scope="module")
def other_process(spawn: Callable[..., Any]) -> Any:
    """vLLM's engine core in a process of its own."""
    return spawn(KIND, 0, engine="async")


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
@pytest.mark.parametrize("where", ["worker", "other_process"])
def test_requests_that_a_sync_comes_across(
    where: str, mode: str, request: pytest.FixtureRequest
) -> None:
    worker = request.getfixturevalue(where)
    controller = Controller([worker], WeightTransferConfig(backend="shm", pause_mode=mode))
    controller.sync_weights(build(KIND, 50))
    first = controller.status().version
    running = worker.generate.remote([[1, 2, 3]], max_new_tokens=120)
    time.sleep(0.1)
    controller.sync_weights(build(KIND, 51))
    [completion] = ray.get(running, timeout=60)
    labels = (completion.weight_version, completion.finished_version)
    if completion.finish_reason == "abort":
        assert mode == "abort"
        assert len(completion.token_ids) < 120
        assert labels[0] == first
    else:
        assert len(completion.token_ids) == 120
        assert labels in ([(first, first + 1)] if mode == "keep" else [(first, first)])
    assert len(completion.logprobs) == len(completion.token_ids)
    assert ask(worker)
    controller.shutdown()


def test_asleep_and_awake(worker: Any, controller: Any) -> None:
    ray.get(worker.sleep.remote(2), timeout=30)
    assert state_of(worker) == "CONNECTING"
    with pytest.raises(StateError, match="next sync"):
        ask(worker)
    with pytest.raises(TransferError, match="sleeps"):
        controller.sync_weights(build(KIND, 60))
    ray.get(worker.wake_up.remote(), timeout=30)
    with pytest.raises(StateError, match="next sync"):
        ask(worker)
    controller.sync_weights(build(KIND, 60))
    assert state_of(worker) == "READY"
    assert ask(worker)


@pytest.mark.parametrize("where", ["worker", "other_process"])
def test_what_runs_while_the_weights_go_waits_for_new_ones(
    where: str, request: pytest.FixtureRequest
) -> None:
    actor = request.getfixturevalue(where)
    made = Controller([actor], WeightTransferConfig(backend="shm"))
    made.sync_weights(build(KIND, 61))
    running = actor.generate.remote([[1, 2, 3]], max_new_tokens=120)
    time.sleep(0.1)
    ray.get(actor.sleep.remote(2), timeout=30)
    ray.get(actor.wake_up.remote(), timeout=30)
    ray.get(actor.resume.remote(), timeout=30)
    assert not ray.wait([running], timeout=3)[0]
    made.sync_weights(build(KIND, 62))
    [completion] = ray.get(running, timeout=60)
    assert len(completion.token_ids) == 120
    assert completion.finished_version == completion.weight_version + 1
    made.shutdown()


@pytest.mark.parametrize("where", ["worker", "other_process"])
def test_with_its_weights_awake_alone_it_syncs_and_answers_nothing(
    where: str, request: pytest.FixtureRequest
) -> None:
    actor = request.getfixturevalue(where)
    made = Controller([actor], WeightTransferConfig(backend="shm"))
    ray.get(actor.sleep.remote(2), timeout=30)
    ray.get(actor.wake_up.remote(["weights"]), timeout=30)
    made.sync_weights(build(KIND, 63))
    with pytest.raises(TransferTimeout):
        ask(actor, timeout_s=1.0)
    ray.get(actor.wake_up.remote(["kv_cache"]), timeout=30)
    assert ask(actor)
    made.shutdown()


@pytest.mark.parametrize("where", ["worker", "other_process"])
def test_a_request_made_in_a_pause_is_the_next_versions(
    where: str, request: pytest.FixtureRequest
) -> None:
    actor = request.getfixturevalue(where)
    made = Controller([actor], WeightTransferConfig(backend="shm"))
    made.sync_weights(build(KIND, 64))
    ray.get(actor.pause.remote("keep"), timeout=30)
    held = actor.generate.remote([[1, 2, 3]], max_new_tokens=4)
    time.sleep(0.3)
    version = made.sync_weights(build(KIND, 65)).version
    [completion] = ray.get(held, timeout=30)
    assert (completion.weight_version, completion.finished_version) == (version, version)
    made.shutdown()


def test_a_short_request_does_not_wait_for_a_long_one(worker: Any, controller: Any) -> None:
    controller.sync_weights(build(KIND, 66))
    long = worker.generate.remote([[1, 2, 3]] * 2, max_new_tokens=120)
    time.sleep(0.1)
    for _ in range(3):
        ray.get(worker.generate.remote([[4, 5]], max_new_tokens=1), timeout=30)
    assert not ray.wait([long], timeout=0)[0]
    ray.get(long, timeout=60)


def test_of_prompts_of_which_one_is_too_long_none_runs(worker: Any, controller: Any) -> None:
    controller.sync_weights(build(KIND, 67))
    with pytest.raises(Exception, match="500 input tokens"):
        ray.get(worker.generate.remote([[1, 2], [1] * 500], max_new_tokens=50), timeout=30)

    def left(self: Any) -> tuple[bool, int]:
        return self._vllm._engine.has_unfinished_requests(), len(self._vllm._outputs)

    assert ray.get(worker.__ray_call__.remote(left), timeout=30) == (False, 0)


def test_shutdown_ends_what_runs(spawn: Callable[..., Any]) -> None:
    actor = spawn(KIND, 0)
    running = actor.generate.remote([[1, 2, 3]] * 8, max_new_tokens=120)
    time.sleep(0.1)
    actor.shutdown.remote()
    with pytest.raises(StateError, match="shut down"):
        ray.get(running, timeout=20)
    with pytest.raises(StateError, match="shut down"):
        ask(actor)
    ray.kill(actor)


def test_a_killed_vllm_does_not_hold_the_others_up(
    worker: Any, spawn: Callable[..., Any], fresh: Callable[..., Any], tmp_path: Path
) -> None:
    other = spawn(KIND, 0, options={"max_restarts": 1, "max_task_retries": 0})
    controller = Controller([worker, other], WeightTransferConfig(backend="shm", sync_timeout_s=60))
    controller.sync_weights(build(KIND, 70))
    ask(other)
    pid = int(ray.get(other.apply.remote(lambda model: os.getpid()), timeout=20))
    offer = weights(71)
    alive = [pid]

    class Killing(MappingSource):
        def __iter__(self) -> Any:
            for index, item in enumerate(offer.items()):
                if index == 5 and alive:  # not again in the retry
                    os.kill(alive.pop(), signal.SIGKILL)
                yield item

    with pytest.raises(PartialUpdate) as caught:
        controller.sync_weights(Killing(offer))
    rows = caught.value.report.workers
    assert (rows[0].state, rows[1].state) == ("READY", "LOST")
    expected = fresh(save(build(KIND, 71), tmp_path / "71"))
    assert ask(worker) == expected
    # rebuilt by Ray from its first checkpoint: serves nothing before the next sync
    deadline = time.monotonic() + 100
    while True:
        try:
            assert ray.get(other.state.remote(), timeout=20) == "CONNECTING"
            break
        except ray.exceptions.RayError:
            assert time.monotonic() < deadline
            time.sleep(0.5)
    with pytest.raises(StateError, match="restarted"):
        ask(other)
    model = build(KIND, 72)
    deadline = time.monotonic() + 60
    while True:
        try:
            report = controller.sync_weights(model)
            break
        except PartialUpdate:
            assert time.monotonic() < deadline
    assert [row.state for row in report.workers] == ["READY", "READY"]
    assert ask(other) == ask(worker) == fresh(save(model, tmp_path / "72"))
    controller.shutdown()


def test_one_that_joins_is_given_the_version_without_the_trainer(
    worker: Any, spawn: Callable[..., Any]
) -> None:
    """Packed weights cannot be copied from a peer, so it waits, and says why; a keeper can give them."""
    newcomer = spawn(KIND, 0)
    plain = Controller([worker], WeightTransferConfig(backend="shm"))
    plain.sync_weights(build(KIND, 80))
    [rank] = plain.add_workers([newcomer])
    row = next(row for row in plain.status().workers if row.rank == rank)
    assert row.state == "CONNECTING"
    assert row.error
    plain.shutdown()
    keeping = Controller([worker], WeightTransferConfig(backend="shm", retain="host"))
    keeping.sync_weights(build(KIND, 81))
    [rank] = keeping.add_workers([newcomer])
    deadline = time.monotonic() + 60
    while next(row for row in keeping.status().workers if row.rank == rank).state != "READY":
        assert time.monotonic() < deadline, keeping.status()
        time.sleep(0.2)
    assert ray.get(newcomer.weight_version.remote(), timeout=20) == keeping.status().version
    assert ask(newcomer) == ask(worker)
    keeping.shutdown()
    ray.kill(newcomer)
