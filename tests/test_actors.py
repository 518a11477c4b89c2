"""The ready-made actors on real Ray: generation around syncs, training, placement."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch
from torch import nn

from actors import Completion, InferenceActor, Placement, TrainerActor
from actors.placement import this_node
from rayxfer import (
    ConfigError,
    Controller,
    ModuleSource,
    StateError,
    TransferError,
    TransferTimeout,
)
from rayxfer.client import spawn
from tests.fleet import Plain, Source, close_shared, held, joined
from tests.helpers import assert_same_bytes, poison

STEP_S = 0.02


@pytest.fixture(scope="module", autouse=True)
def _ends(ray_session: None) -> Iterator[None]:
    yield
    close_shared()


# ---- a real language model ----------------------------------------------------------------------


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,  # so that greedy tokens differ between seeds
    )
    return LlamaForCausalLM(config).eval()


PROMPTS = [[5, 17, 23, 42], [7, 8], [60, 61, 62, 63], [90]]


def greedy(model: nn.Module, prompt: list[int], count: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def server(ray_session: None) -> Iterator[Any]:
    actor = InferenceActor.options(num_cpus=0).remote(llama)
    ray.get(actor.ping.remote())
    yield actor
    ray.kill(actor)


def ask(actor: Any, prompts: list[list[int]], count: int = 8, **kwargs: Any) -> list[Completion]:
    return ray.get(actor.generate.remote(prompts, max_new_tokens=count, **kwargs), timeout=60)


def test_greedy_generation_is_that_of_the_model(server: Any) -> None:
    """Before any controller, at version 0; and after a sync, of the model that was sent."""
    for completion, prompt in zip(ask(server, PROMPTS, 12), PROMPTS, strict=True):
        assert completion.token_ids == greedy(llama(), prompt, 12)
        assert (completion.weight_version, completion.finished_version) == (0, 0)
    with joined([server], "shm", pause_mode="keep", bucket_size_bytes=1) as controller:
        for seed in (1, 2):
            ray.get(server.apply.remote(poison))
            model = llama(seed)
            report = controller.sync_weights(model)
            assert_same_bytes(held(model), ray.get(server.apply.remote(held)))
            for completion, prompt in zip(ask(server, PROMPTS, 12), PROMPTS, strict=True):
                assert completion.token_ids == greedy(model, prompt, 12)
                assert completion.weight_version == report.version
                logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
                scores = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), dim=-1)
                expected = scores.gather(1, torch.tensor(completion.token_ids).unsqueeze(1))
                torch.testing.assert_close(
                    torch.tensor(completion.logprobs), expected.squeeze(1), atol=1e-4, rtol=1e-4
                )


def test_sampling_is_reproducible_whatever_the_batch(server: Any) -> None:
    first = ask(server, PROMPTS, temperature=1.0, seed=11)
    assert [c.token_ids for c in first] == [
        c.token_ids for c in ask(server, PROMPTS, temperature=1.0, seed=11)
    ]
    assert [c.token_ids for c in first] != [
        c.token_ids for c in ask(server, PROMPTS, temperature=1.0, seed=12)
    ]
    (alone,) = ask(server, PROMPTS[:1], temperature=1.0, seed=11)
    assert alone.token_ids == first[0].token_ids
    other = ask(server, [[1, 2, 3, 4], PROMPTS[1], [9], PROMPTS[3]], temperature=1.0, seed=11)
    assert [other[1].token_ids, other[3].token_ids] == [first[1].token_ids, first[3].token_ids]
    twins = ask(server, [PROMPTS[0]] * 4, count=16, temperature=1.0, seed=3)
    assert len({tuple(c.token_ids) for c in twins}) > 1  # a group is no copy of one sample
    hot = ask(server, [PROMPTS[0]], temperature=5.0)
    assert len(hot[0].token_ids) == 8


def test_what_a_completion_holds(server: Any) -> None:
    (whole,) = ask(server, [PROMPTS[0]], 10)
    assert isinstance(whole, Completion)
    assert len(whole.token_ids) == len(whole.logprobs) == 10
    assert all(isinstance(token, int) for token in whole.token_ids)
    assert all(value <= 0 for value in whole.logprobs)
    assert whole.finish_reason == "length"
    end = whole.token_ids[4]
    (short,) = ask(server, [PROMPTS[0]], 10, eos_token_id=end)
    assert short.finish_reason == "stop"
    assert short.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]


def test_bad_requests_are_refused(server: Any) -> None:
    for prompts, kwargs in (
        ([], {}),
        ([[]], {}),
        (PROMPTS, {"count": 0}),
        (PROMPTS, {"temperature": -1.0}),
    ):
        with pytest.raises(ConfigError):
            ask(server, prompts, **kwargs)
    with pytest.raises(ConfigError, match="sleep"):
        ray.get(server.pause.remote("sleep"))


def test_pause_and_resume_by_hand(server: Any) -> None:
    ray.get(server.pause.remote("keep"))
    request = server.generate.remote([PROMPTS[0]], max_new_tokens=2)
    with pytest.raises(TransferTimeout):
        ask(server, [PROMPTS[0]], timeout_s=0.3)
    assert ray.wait([request], timeout=0.2)[0] == []
    ray.get(server.resume.remote())
    assert len(ray.get(request, timeout=30)[0].token_ids) == 2


def test_a_model_must_be_a_module() -> None:
    actor = InferenceActor.options(num_cpus=0).remote(lambda: {"weight": 1})
    with pytest.raises(Exception, match=r"nn\.Module"):
        ray.get(actor.ping.remote())


# ---- requests around an update ------------------------------------------------------------------


class Slow(nn.Module):
    """Each forward takes a while, and says which weights it read."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16)
        nn.init.constant_(self.head.weight, 0.0)
        nn.init.constant_(self.head.bias, 0.0)
        self.head.bias.data[int(value)] = 5.0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S)
        return self.head(self.embedding(ids))


def slow_load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
    time.sleep(0.3 * len(weights))
    for name, tensor in weights:
        model.get_parameter(name).data.copy_(tensor)
    return {name for name, _ in weights}


@pytest.fixture(scope="module")
def slow(ray_session: None) -> Iterator[Any]:
    """Three tensors, 0.3 s each to load."""
    actor = InferenceActor.options(num_cpus=0).remote(Slow, load_weights=slow_load)
    ray.get(actor.ping.remote())
    yield actor
    ray.kill(actor)


@contextmanager
def under(actor: Any, pause_mode: str) -> Iterator[tuple[Controller, int]]:
    """A controller with this pause mode, and the version that the actor serves (tokens: all 1)."""
    with joined([actor], "shm", pause_mode=pause_mode, bucket_size_bytes=1) as controller:
        yield controller, controller.sync_weights(Slow(1)).version


def test_keep_freezes_requests_and_goes_on(slow: Any) -> None:
    """miles#2589, rllm#622: four in flight, none lost, labelled with the version they began at."""
    with under(slow, "keep") as (controller, old):
        running = [slow.generate.remote([[i]], max_new_tokens=60) for i in range(4)]
        time.sleep(15 * STEP_S)
        new = controller.sync_weights(Slow(2)).version
        for (completion,) in ray.get(running, timeout=60):
            assert completion.finish_reason == "length"
            assert len(completion.token_ids) == 60
            assert (completion.weight_version, completion.finished_version) == (old, new)
            switch = completion.token_ids.index(2)
            assert switch > 0
            assert completion.token_ids == [1] * switch + [2] * (60 - switch)


def test_wait_lets_requests_end_first(slow: Any) -> None:
    with under(slow, "wait") as (controller, old):
        running = [slow.generate.remote([[i]], max_new_tokens=40) for i in range(4)]
        time.sleep(10 * STEP_S)
        sync = spawn(lambda: controller.sync_weights(Slow(3)), "sync")
        for (completion,) in ray.get(running, timeout=60):
            assert completion.token_ids == [1] * 40
            assert (completion.weight_version, completion.finished_version) == (old, old)
        new = sync.result(timeout=60).version
        (after,) = ask(slow, [[1]], 3)
        assert (after.token_ids, after.weight_version) == ([3, 3, 3], new)


def test_abort_ends_requests_at_once(slow: Any) -> None:
    with under(slow, "abort") as (controller, old):
        running = [slow.generate.remote([[i]], max_new_tokens=1000) for i in range(4)]
        time.sleep(10 * STEP_S)
        new = controller.sync_weights(Slow(4)).version
        for (completion,) in ray.get(running, timeout=10):
            assert completion.finish_reason == "abort"
            assert 0 < len(completion.token_ids) < 1000
            assert set(completion.token_ids) == {1}
            assert (completion.weight_version, completion.finished_version) == (old, old)
        (after,) = ask(slow, [[1]], 3)
        assert (after.token_ids, after.weight_version) == ([4, 4, 4], new)


def test_a_request_during_an_update_is_held_for_the_new_version(slow: Any) -> None:
    """verl#7511; its own deadline is the only one it has."""
    with under(slow, "keep") as (controller, old):
        sync = spawn(lambda: controller.sync_weights(Slow(5)), "sync")
        deadline = time.monotonic() + 30
        while ray.get(slow.state.remote()) != "UPDATING" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert ray.get(slow.weight_version.remote()) == old
        request = slow.generate.remote([[1]], max_new_tokens=3)
        start = time.monotonic()
        with pytest.raises(TransferTimeout):
            ask(slow, [[1]], 3, timeout_s=0.3)
        assert time.monotonic() - start < 2.0
        assert not sync.done()
        looked = slow.apply.remote(lambda model: model.head.bias.argmax().item())
        new = sync.result(timeout=60).version
        (completion,) = ray.get(request, timeout=30)
        assert completion.token_ids == [5, 5, 5]
        assert (completion.weight_version, completion.finished_version) == (new, new)
        assert ray.get(looked, timeout=30) == 5  # apply waited as well


def test_apply_runs_in_the_actor(slow: Any) -> None:
    def double(model: nn.Module) -> tuple[int, str]:
        with torch.no_grad():
            model.embedding.weight.fill_(2.0)
        return model.embedding.weight.numel(), type(model).__name__

    assert ray.get(slow.apply.remote(double)) == (128, "Slow")
    assert ray.get(slow.apply.remote(held))["embedding.weight"].unique().tolist() == [2.0]
    with pytest.raises(ZeroDivisionError):
        ray.get(slow.apply.remote(lambda model: 1 / 0))


def test_a_torn_worker_holds_requests_until_it_is_repaired(slow: Any) -> None:
    tensors = held(Slow(6))

    def pairs() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embedding.weight", tensors["embedding.weight"]
        time.sleep(1.0)  # long enough for it to be loaded
        raise OSError("the disk is gone")

    with under(slow, "keep") as (controller, old):
        with pytest.raises(TransferError, match="the disk is gone"):
            controller.sync_weights(Source(ModuleSource(Slow(6)).metadata(), pairs))
        assert ray.get(slow.state.remote()) == "TORN"
        assert controller.status().workers[0].state == "TORN"
        ray.get(slow.resume.remote())  # a person cannot make it serve
        request = slow.generate.remote([[1]], max_new_tokens=2)
        assert ray.wait([request], timeout=0.5)[0] == []
        new = controller.sync_weights(Slow(6)).version
        assert new == old + 1
        (completion,) = ray.get(request, timeout=30)
        assert (completion.token_ids, completion.weight_version) == ([6, 6], new)


def test_shutdown_ends_requests() -> None:
    actor = InferenceActor.options(num_cpus=0).remote(Slow)
    running = actor.generate.remote([[1]], max_new_tokens=1000)
    time.sleep(1.0)
    ray.get(actor.shutdown.remote())
    with pytest.raises(StateError, match="shut down"):
        ray.get(running, timeout=10)
    with pytest.raises(StateError, match="shut down"):
        ask(actor, [[1]], 1)
    assert ray.get(actor.ping.remote()) is True
    ray.kill(actor)


# ---- training -----------------------------------------------------------------------------------


def test_a_trainer_trains_and_sends_its_own_weights(server: Any) -> None:
    trainer = TrainerActor.options(num_cpus=0).remote(llama)
    try:
        with joined([server], "shm", pause_mode="keep", bucket_size_bytes=1) as controller:
            ids = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
            batch = {"input_ids": ids, "labels": ids}
            versions, losses, seen = [], [], []
            for _ in range(3):
                losses.append(ray.get(trainer.train_step.remote(batch)))
                report = ray.get(trainer.sync_weights.remote(controller))
                versions.append(report.version)
                theirs = ray.get(trainer.apply.remote(held))
                assert_same_bytes(theirs, ray.get(server.apply.remote(held)))
                seen.append(theirs["lm_head.weight"])
            assert versions == [versions[0], versions[0] + 1, versions[0] + 2]
            assert losses[2] < losses[0]
            assert not torch.equal(seen[0], seen[1])
            explicit = ray.get(trainer.sync_weights.remote(controller, version=versions[-1] + 10))
            assert explicit.version == controller.status().version == versions[-1] + 10
    finally:
        ray.kill(trainer)


def test_a_trainer_with_its_own_step_and_optimizer() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: float, *, scale: float) -> str:
        loss = (model.weight * x * scale).sum()
        loss.backward()
        optimizer.step()
        return type(optimizer).__name__

    trainer = TrainerActor.options(num_cpus=0).remote(
        lambda: nn.Linear(2, 2, bias=False),
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        train_step=step,
    )
    try:
        before = ray.get(trainer.apply.remote(held))["weight"]
        assert ray.get(trainer.train_step.remote(2.0, scale=3.0)) == "SGD"
        after = ray.get(trainer.apply.remote(held))["weight"]
        assert torch.equal(after, before - 0.5 * 6.0)
        assert ray.get(trainer.ping.remote()) is True
    finally:
        ray.kill(trainer)


# ---- placement ----------------------------------------------------------------------------------


def free_cpus(expected: float | None = None) -> float:
    """What Ray says is free; it learns of changes a little later, so wait for what is expected."""
    deadline = time.monotonic() + 20
    while True:
        free: float = ray.available_resources().get("CPU", 0.0)
        if expected is None or free == expected or time.monotonic() > deadline:
            return free
        time.sleep(0.1)


def test_a_placement_reserves_room_and_gives_it_back() -> None:
    free = free_cpus()
    with Placement(2, worker={"CPU": 1}, trainer={"CPU": 2}, timeout_s=30) as place:
        assert place.trainer()["num_cpus"] == 2
        assert place.worker(0)["num_cpus"] == 1
        with pytest.raises(ConfigError, match="worker 2"):
            place.worker(2)
        worker = ray.remote(Plain).options(**place.worker(1)).remote()
        ray.get(worker.bind.remote(Slow), timeout=60)
        with joined([worker], "auto", pause_mode="keep", bucket_size_bytes=1) as controller:
            (row,) = controller.sync_weights(Slow(7)).workers
            assert row.backend == "shm"
            assert "same host" in row.reason
        assert free_cpus(free - 4) == free - 4
    place.remove()
    assert free_cpus(free) == free


def test_a_placement_without_room_reserves_nothing() -> None:
    free = free_cpus()
    with pytest.raises(TransferTimeout, match="no room"):
        Placement(3, worker={"CPU": 100}, timeout_s=1)
    with pytest.raises(ConfigError, match="at least one"):
        Placement(0)
    assert free_cpus(free) == free


def test_this_node() -> None:
    @ray.remote
    def where() -> str:
        return ray.get_runtime_context().get_node_id()

    here = ray.get_runtime_context().get_node_id()
    assert ray.get(where.options(num_cpus=0, **this_node()).remote()) == here
