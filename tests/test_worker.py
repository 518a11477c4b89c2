"""A worker's side on real Ray: anyone's actor, anyone's loader, hooks, and answers meanwhile."""

from __future__ import annotations

import copy
import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import ray
import torch
from torch import nn

from actors import InferenceActor
from rayxfer import (
    ConfigError,
    Controller,
    FuseRule,
    ModuleSource,
    StateError,
    WorkerLost,
    WorkerMixin,
)
from rayxfer.client import spawn
from tests.fleet import (
    CPU_BACKENDS,
    Net,
    Plain,
    assert_exact,
    close_shared,
    gated,
    held,
    held_by,
    joined,
    net,
    plain_workers,
    poison_all,
    run_on,
)
from tests.helpers import assert_same_bytes, poison, raw_bytes

BUCKET_BYTES = 1500


@pytest.fixture(scope="module", autouse=True)
def _ends(ray_session: None) -> Iterator[None]:
    yield
    close_shared()


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_plain_class_is_a_worker_over(backend: str) -> None:
    """No concurrency groups; several buckets; more than one round; state as it should be."""
    workers = plain_workers(2, net)
    assert ray.get(workers[0].state.remote()) == "READY"
    assert ray.get(workers[0].weight_version.remote()) == 0
    with joined(workers, backend, bucket_size_bytes=BUCKET_BYTES) as controller:
        for seed in (1, 2):
            poison_all(workers)
            report = controller.sync_weights(Net(seed))
            assert [(row.backend, row.verified, row.complete) for row in report.workers] == [
                (backend, "loaded", True)
            ] * 2
            assert_exact(Net(seed), workers)
            tied = run_on(workers, lambda w: w.model.head.weight is w.model.embedding.weight)
            assert tied == [True, True]
        assert ray.get([w.weight_version.remote() for w in workers]) == [report.version] * 2


def test_an_unbound_or_unconnected_worker_refuses_an_update_at_once() -> None:
    """vime#87."""
    (worker,) = plain_workers(1, net)
    start = time.monotonic()
    for op, message in (
        ("update", {"round_id": 1, "version": 1, "controller_id": "x"}),
        ("finish", {"round_id": 1, "version": 1, "controller_id": "x"}),
        ("commit", {"round_id": 1, "version": 1, "controller_id": "x"}),
        ("format", {}),
    ):
        with pytest.raises(StateError):
            ray.get(worker.rayxfer_call.remote(op, message))
    assert time.monotonic() - start < 4.0
    assert ray.get(worker.state.remote()) == "READY"


# ---- answers during a sync ----------------------------------------------------------------------


def slow_load(module: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
    """0.15 s per tensor."""
    targets = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    with torch.no_grad():
        for name, tensor in weights:
            time.sleep(0.15)
            targets[name].copy_(tensor)
    return {name for name, _ in weights}


def test_an_inference_actor_answers_while_it_loads() -> None:
    actor = InferenceActor.options(num_cpus=0).remote(net, load_weights=slow_load)
    try:
        for backend in ("shm", "object_store"):
            with joined([actor], backend, bucket_size_bytes=BUCKET_BYTES) as controller:
                old = ray.get(actor.weight_version.remote())
                sync = spawn(lambda c=controller: c.sync_weights(Net(1)), "sync")
                slowest, seen = 0.0, set()
                while not sync.done():
                    start = time.monotonic()
                    answers = ray.get(
                        [actor.ping.remote(), actor.state.remote(), actor.weight_version.remote()]
                    )
                    slowest = max(slowest, time.monotonic() - start)
                    seen.add(tuple(answers[1:]))
                    time.sleep(0.05)
                new = sync.result().version
                assert slowest < 1.0
                assert ("UPDATING", old) in seen
                states = {(state, v) for state in ("READY", "UPDATING") for v in (old, new)}
                assert seen <= states
                assert_same_bytes(held(Net(1)), ray.get(actor.apply.remote(held)))
                ray.get(actor.apply.remote(poison))
    finally:
        ray.kill(actor)


# ---- loaders ------------------------------------------------------------------------------------


class Split(nn.Module):
    """A checkpoint's layout: q, k and v apart."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.q_proj = nn.Linear(16, 16)
        self.k_proj = nn.Linear(16, 8)
        self.v_proj = nn.Linear(16, 8)
        self.out = nn.Linear(16, 16)


class Fused(nn.Module):
    """A server's layout: one qkv; loads a checkpoint's names itself, as vLLM's models do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(16, 32)
        self.out = nn.Linear(16, 16)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        places = {"q_proj": slice(0, 16), "k_proj": slice(16, 24), "v_proj": slice(24, 32)}
        written = set()
        for name, tensor in weights:
            layer, _, kind = name.partition(".")
            target = f"qkv_proj.{kind}" if layer in places else name
            parameter = self.get_parameter(target)
            where = places.get(layer, slice(None))
            parameter.data[where].copy_(tensor)
            written.add(target)
        return written


class FusedByRule(Fused):
    load_weights = None  # type: ignore[assignment]


def fused(model: Split) -> dict[str, torch.Tensor]:
    parts = [model.q_proj, model.k_proj, model.v_proj]
    return {
        "qkv_proj.weight": torch.cat([p.weight for p in parts]).detach(),
        "qkv_proj.bias": torch.cat([p.bias for p in parts]).detach(),
        "out.weight": model.out.weight.detach(),
        "out.bias": model.out.bias.detach(),
    }


QKV = [
    FuseRule(f"qkv_proj.{kind}", tuple(f"{part}_proj.{kind}" for part in "qkv"))
    for kind in ("weight", "bias")
]


@pytest.mark.parametrize("bucket_size_bytes", [1, 4096, 1 << 20])
def test_qkv_is_fused_at_every_bucket_size(bucket_size_bytes: int) -> None:
    """By the model's own load_weights, and by rule; over two backends at once."""
    own = plain_workers(1, Fused)
    ruled = plain_workers(1, FusedByRule, lambda worker: {"fuse": QKV}, first=1)
    workers = [*own, *ruled]
    with joined(workers, ["gloo", "shm"], bucket_size_bytes=bucket_size_bytes) as controller:
        for seed in (1, 2, 3):
            poison_all(workers)
            report = controller.sync_weights(Split(seed))
            assert [row.complete for row in report.workers] == [True, True]
            assert [row.verified for row in report.workers] == ["delivered", "loaded"]
            assert_exact(fused(Split(seed)), workers)


def keep_and_spoil(worker: Plain) -> dict[str, Any]:
    """A loader that copies, keeps every tensor it was given, and writes over it."""

    def load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        for name, tensor in weights:
            digest = hashlib.sha256(raw_bytes(tensor)).hexdigest()
            worker.log.append((name, str(tensor.dtype), tuple(tensor.shape), digest))
            targets[name].data.copy_(tensor)
            tensor.view(-1).view(torch.uint8).bitwise_not_()
            worker.kept[name] = tensor
        return {name for name, _ in weights}

    return {"load_weights": load}


@pytest.mark.parametrize("backend", [*CPU_BACKENDS, "mixed"])
def test_a_loader_may_keep_and_change_what_it_is_given(backend: str) -> None:
    """SkyRL#2250, slime#1673: nobody else sees it, and every backend hands over the same."""
    workers = plain_workers(2, net, keep_and_spoil)
    backends = ["shm", "object_store"] if backend == "mixed" else backend
    model = Net(5)
    before = held(model)
    offered = [
        (name, str(t.dtype), tuple(t.shape), hashlib.sha256(raw_bytes(t)).hexdigest())
        for name, t in ModuleSource(model)
    ]
    with joined(workers, backends, bucket_size_bytes=BUCKET_BYTES) as controller:
        for _ in range(2):
            poison_all(workers)
            run_on(workers, lambda worker: worker.log.clear())
            report = controller.sync_weights(model)
            assert [row.verified for row in report.workers] == ["delivered"] * 2
            assert_exact(before, workers)
            assert_same_bytes(before, held(model))
            assert run_on(workers, lambda worker: worker.log) == [offered, offered]
        for kept in run_on(workers, lambda worker: worker.kept):
            undone = {
                name: t.view(-1).view(torch.uint8).bitwise_not().view(t.dtype).view(t.shape)
                for name, t in kept.items()
            }
            assert_same_bytes({name: before[name] for name in undone}, undone)


def test_a_loader_that_leaves_a_parameter_out_is_refused() -> None:
    def lazy(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        slow = [(name, t) for name, t in weights if name != "layers.2.bias"]
        for name, tensor in slow:
            model.get_parameter(name).data.copy_(tensor) if "scale" not in name else None
        return {name for name, _ in slow}

    workers = plain_workers(1, net, lambda worker: {"load_weights": lazy})
    with joined(workers, "shm", bucket_size_bytes=BUCKET_BYTES) as controller:
        version = controller.status().version
        with pytest.raises(Exception, match=r"layers\.2\.bias"):
            controller.sync_weights(Net(1))
        assert controller.status().version == version
        assert ray.get(workers[0].state.remote()) == "TORN"


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.policy = net()


RULES: dict[str, Any] = {
    "prefix": {"": "policy"},
    "function": lambda name: f"policy.{name}",
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_rename_rules_of_the_worker(rule: Any) -> None:
    workers = plain_workers(2, Renamed, lambda worker: {"rename": rule})
    with joined(workers, ["shm", "object_store"], bucket_size_bytes=BUCKET_BYTES) as controller:
        controller.sync_weights(Net(4))
        expected = {f"policy.{name}": tensor for name, tensor in held(Net(4)).items()}
        assert_exact(expected, workers)


def test_a_kernel_format_is_copied_as_it_is() -> None:
    """is_checkpoint_format=False: no loader, no renaming, no fusing, no start or finish hook."""

    def hooks(worker: Plain) -> dict[str, Any]:
        def never(*args: Any) -> None:
            worker.log.append("called")

        return {
            "load_weights": never,
            "start_update": never,
            "finish_update": never,
            "rename": {"": "nowhere"},
        }

    workers = plain_workers(2, Fused, hooks)
    kernel = fused(Split(3))
    raw = {"is_checkpoint_format": False}
    with joined(workers, ["shm", "gloo"], update_info=raw) as controller:
        report = controller.sync_weights(kernel)
        assert [row.verified for row in report.workers] == ["loaded", "loaded"]
        assert_exact(kernel, workers)
        assert run_on(workers, lambda worker: worker.log) == [[], []]
        with pytest.raises(Exception, match="q_proj"):
            controller.sync_weights(Split(3))


# ---- hooks --------------------------------------------------------------------------------------


def logging_hooks(worker: Plain) -> dict[str, Any]:
    def load(model: nn.Module, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        targets = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
        for name, tensor in weights:
            targets[name].data.copy_(tensor)
        if worker.log[-1:] != ["load"]:
            worker.log.append("load")
        return {name for name, _ in weights}

    def log(what: str) -> Callable[..., None]:
        return lambda *args: worker.log.append(" ".join([what, *args]))

    return {
        "load_weights": load,
        "pause": log("pause"),
        "start_update": log("start"),
        "finish_update": log("finish"),
        "reset_cache": log("reset"),
        "resume": log("resume"),
    }


@pytest.mark.parametrize("bucket_size_bytes", [1, BUCKET_BYTES, 1 << 20])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_hooks_run_once_and_in_order(backend: str, bucket_size_bytes: int) -> None:
    """vllm#9744, verl#7327: whatever the number of buckets, and of a partial update as well."""
    workers = plain_workers(1, net, logging_hooks)
    model = Net(1)
    six = {name: t for name, t in held(model).items() if name.startswith("layers")}
    assert len(six) == 6
    with joined(workers, backend, bucket_size_bytes=bucket_size_bytes) as controller:
        for offer, partial in ((model, False), (model, False), (six, True)):
            run_on(workers, lambda worker: worker.log.clear())
            controller.sync_weights(offer, partial=partial)
            (log,) = run_on(workers, lambda worker: worker.log)
            assert log == ["pause keep", "start", "load", "finish", "reset", "resume"]
        assert_exact(model, workers)


def test_the_cache_hook_obeys_the_policy_and_may_refuse_twice() -> None:
    """sglang#12099: a flush that is refused is asked for again."""

    def hooks(worker: Plain) -> dict[str, Any]:
        def reset() -> bool:
            worker.log.append("reset")
            return len(worker.log) > 2

        return {"reset_cache": reset}

    workers = plain_workers(1, net, hooks)
    with joined(workers, "shm", cache_policy="keep", pause_mode="wait") as controller:
        controller.sync_weights(Net(1))
        assert run_on(workers, lambda worker: worker.log) == [[]]
    with joined(workers, "shm", bucket_size_bytes=BUCKET_BYTES) as controller:
        report = controller.sync_weights(Net(2))
        assert report.workers[0].error is None
        assert run_on(workers, lambda worker: worker.log) == [["reset"] * 3]


def test_a_failed_round_resumes_without_a_cache_reset() -> None:
    workers = plain_workers(1, net, logging_hooks)
    with joined(workers, "shm", bucket_size_bytes=BUCKET_BYTES) as controller:
        controller.sync_weights(Net(1))
        run_on(workers, lambda worker: worker.log.clear())
        missing = held(Net(2))
        del missing["layers.0.bias"]
        with pytest.raises(Exception, match=r"layers\.0\.bias"):
            controller.sync_weights(missing)  # preflight: not even paused
        assert run_on(workers, lambda worker: worker.log) == [[]]
        assert_exact(Net(1), workers)


# ---- models that are replaced -------------------------------------------------------------------


def test_a_worker_that_replaces_its_model_by_a_copy() -> None:
    """pytorch/rl#3587: the live model is the one that is written."""

    def replace(worker: Plain) -> None:
        worker.old = worker.model  # type: ignore[attr-defined]
        worker.model = copy.deepcopy(worker.model)
        poison(worker.model)

    workers = plain_workers(2, net)
    with joined(workers, ["shm", "gloo"], bucket_size_bytes=BUCKET_BYTES) as controller:
        controller.sync_weights(Net(1))
        for seed in (2, 3):
            run_on(workers, replace)
            controller.sync_weights(Net(seed))
            assert_exact(Net(seed), workers)
            for old in run_on(workers, lambda worker: held(worker.old)):  # type: ignore[attr-defined]
                assert_same_bytes(held(Net(seed - 1)), old)


class Replacing(nn.Module):
    """Its loader makes new Parameters each time (vllm#17915)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.b = nn.Linear(8, 4)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            layer, _, kind = name.partition(".")
            setattr(getattr(self, layer), kind, nn.Parameter(tensor))
        return {name for name, _ in weights}


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_loader_that_replaces_parameters(backend: str) -> None:
    workers = plain_workers(1, Replacing)
    with joined(workers, backend, bucket_size_bytes=BUCKET_BYTES) as controller:
        for seed in (1, 2, 3):
            torch.manual_seed(seed)
            model = Replacing()
            expected = held(model)
            controller.sync_weights(model)
            for parameter in model.parameters():
                parameter.data.fill_(7)  # the trainer's next step
            assert_exact(expected, workers)


class Repacking(nn.Module):
    """Holds its weight transposed and scaled once loading is done (vllm#42821)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.packed: torch.Tensor | None = None

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> set[str]:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
        return {name for name, _ in weights}

    def repack(self) -> None:
        self.packed = (self.linear.weight.detach() * 2).t().contiguous()
        self.linear.weight.data.fill_(float("nan"))  # gone, as in a kernel's format

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.packed is not None
        return (x @ self.packed) / 2 + self.linear.bias


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_a_model_that_repacks_at_the_end_computes_the_same_each_time(backend: str) -> None:
    workers = plain_workers(1, Repacking, lambda w: {"finish_update": lambda: w.model.repack()})
    torch.manual_seed(0)
    x = torch.randn(3, 16)
    model = Repacking()
    with joined(workers, backend, bucket_size_bytes=BUCKET_BYTES) as controller:
        for _ in range(3):
            controller.sync_weights(model)
            (got,) = run_on(workers, lambda worker: worker.model(x).detach())
            local = copy.deepcopy(model)
            local.repack()
            assert raw_bytes(got) == raw_bytes(local(x))


def test_non_persistent_buffers_are_never_touched() -> None:
    def build() -> nn.Module:
        model = net()
        model.register_buffer("scratch", torch.full((4,), 3.0), persistent=False)
        return model

    workers = plain_workers(1, build)
    model = build()
    model.scratch.fill_(9)
    with joined(workers, "gloo", bucket_size_bytes=BUCKET_BYTES) as controller:
        report = controller.sync_weights(model)
        assert report.num_bytes == sum(m.num_bytes for m in ModuleSource(model).metadata())
        assert run_on(workers, lambda worker: worker.model.scratch.tolist()) == [[3.0] * 4]
        assert set(held_by(workers[0])) == set(held(model))


def test_a_plain_worker_answers_between_slices_of_a_long_sync() -> None:
    """One thread, and still no call is held up for more than a second or two."""
    workers = plain_workers(1, net)
    entered, go_on = threading.Event(), threading.Event()
    with joined(workers, "shm", bucket_size_bytes=BUCKET_BYTES) as controller:
        sync = spawn(lambda: controller.sync_weights(gated(Net(1), entered, go_on)), "sync")
        try:
            assert entered.wait(30)
            for _ in range(3):
                start = time.monotonic()
                assert ray.get(workers[0].ping.remote()) is True
                assert time.monotonic() - start < 2.0
        finally:
            go_on.set()
        sync.result(timeout=60)
        assert_exact(Net(1), workers)


@pytest.mark.parametrize("model", [{"weight": 1}, torch.nn.Linear(1, 1).state_dict(), 3, None])
def test_what_is_no_model_cannot_be_bound(model: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected an nn\.Module"):
        WorkerMixin().rayxfer_bind(model)


@ray.remote(num_cpus=0)
class Stillborn(WorkerMixin):
    def __init__(self) -> None:
        raise ZeroDivisionError("no model today")


def test_what_a_constructor_raised_is_in_the_message(ray_session: None) -> None:
    with pytest.raises(WorkerLost, match=r"worker 0.*ZeroDivisionError: no model today") as caught:
        Controller([Stillborn.remote()])
    assert "\x1b" not in str(caught.value)
