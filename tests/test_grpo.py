"""The GRPO recipe: its pure parts, short real runs, the reward that it must reach, job submission."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from actors import Completion
from recipes import grpo
from recipes.grpo import Batch, Group, Rollouts, group_advantages, grpo_loss, split_stale
from recipes.report import History, save_curve, table

ROOT = Path(__file__).parent.parent
KEYS = ["reward_first", "reward_last", "steps", "seconds", "max_staleness", "engine", "backend"]


# ---- advantages ---------------------------------------------------------------------------------


def test_advantages_are_relative_to_the_group() -> None:
    rewards = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.25, 0.25, 0.25, 0.75]])
    expected = torch.tensor([[-1.0, 1.0, -1.0, 1.0], [-1 / math.sqrt(3)] * 3 + [3 / math.sqrt(3)]])
    torch.testing.assert_close(group_advantages(rewards), expected)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 1.0])
def test_a_group_of_equal_rewards_has_no_advantages(value: float) -> None:
    rewards = torch.tensor([[value] * 5, [0.0, 0.0, 0.0, 0.0, 1.0]])
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == [0.0] * 5
    assert advantages[1, 4] == pytest.approx(2.0)


def test_a_group_of_one_has_no_advantage() -> None:
    assert group_advantages(torch.tensor([[0.7]])).tolist() == [[0.0]]


# ---- loss ---------------------------------------------------------------------------------------


def test_the_clipped_loss_by_hand() -> None:
    """Ratios 1.5, 0.5 with advantage 1, then 1.5, 0.5 with advantage -2; clip range 0.2."""
    ratio = torch.tensor([[1.5, 0.5], [1.5, 0.5]])
    behaviour = torch.full((2, 2), -2.0)
    logprobs = (behaviour + ratio.log()).requires_grad_()
    loss, clipped = grpo_loss(
        logprobs, behaviour, torch.tensor([1.0, -2.0]), torch.ones(2, 2), clip_range=0.2
    )
    # sample 1: min(1.5, 1.2) = 1.2 and min(0.5, 0.8) = 0.5; sample 2: min(-3, -2.4) = -3 and
    # min(-1, -1.6) = -1.6
    assert loss.item() == pytest.approx(-((1.2 + 0.5) / 2 + (-3.0 - 1.6) / 2) / 2)
    assert clipped == 0.5
    loss.backward()
    assert logprobs.grad is not None
    # d(ratio * advantage)/d(logprob) = ratio * advantage, over 2 tokens and 2 samples; 0 where clipped
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -0.125], [0.75, 0.0]]))


def test_padding_counts_for_nothing_and_each_sample_weighs_the_same() -> None:
    behaviour = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 0.0, 0.0]])
    logprobs = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, 9.0, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    loss, clipped = grpo_loss(
        logprobs, behaviour, torch.tensor([1.0, 3.0]), mask, clip_range=0.2, kl_coef=0.0
    )
    assert float(loss) == pytest.approx(-(1.0 + 3.0) / 2)
    assert clipped == 0.0


def test_the_kl_penalty_by_hand() -> None:
    logprobs, reference = torch.tensor([[-1.0]]), torch.tensor([[-1.5]])
    arguments: dict[str, Any] = {"clip_range": 0.2, "kl_coef": 0.1}
    one = torch.ones(1, 1)
    loss, _ = grpo_loss(
        logprobs, logprobs, torch.tensor([0.0]), one, reference=reference, **arguments
    )
    assert float(loss) == pytest.approx(0.1 * (math.exp(-0.5) + 0.5 - 1))
    with pytest.raises(ValueError, match=r"kl_coef=0\.1 needs the reference"):
        grpo_loss(logprobs, logprobs, torch.tensor([0.0]), one, **arguments)


# ---- the task -----------------------------------------------------------------------------------


def test_the_reward_is_the_share_of_tokens_in_the_first_tokens_colour() -> None:
    assert grpo.reward([11, 4, 5], [3, 19, 27, 4]) == 0.75
    assert grpo.reward([11, 4, 5], [4, 5]) == 0.0
    assert grpo.reward([11, 4, 5], []) == 0.0


# ---- staleness ----------------------------------------------------------------------------------


def completion(version: int, finished: int | None = None, length: int = 2) -> Completion:
    return Completion(
        [1] * length, [-1.0] * length, version, version if finished is None else finished
    )


def group(*versions: int) -> Group:
    return Group([1, 2, 3], [completion(v) for v in versions])


@pytest.mark.parametrize(("bound", "usable", "stale"), [(0, [5], [4, 3]), (1, [5, 4], [3])])
def test_groups_beyond_the_bound_are_stale(bound: int, usable: list[int], stale: list[int]) -> None:
    groups = [group(5, 5), group(4, 5), group(5, 3)]
    parts = split_stale(groups, 5, bound)
    assert [[g.weight_version for g in part] for part in parts] == [usable, stale]


def arguments(*more: str) -> Any:
    return grpo.parse(["--groups", "4", "--group-size", "2", "--max-new-tokens", "2", *more])


class FakeRay:
    """Answers in the order that the test says, at the versions that it says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.version: dict[str, int] = {}
        self.order: list[str] = []
        self.sent: list[str] = []
        monkeypatch.setattr(grpo.ray, "wait", self.wait)
        monkeypatch.setattr(grpo.ray, "get", self.get)

    def worker(self, name: str) -> Any:
        fake = self

        class Remote:
            def remote(self, prompts: list[list[int]], **_: Any) -> tuple[str, int, int]:
                fake.sent.append(name)
                return (name, fake.version[name], len(prompts))

        return type("Worker", (), {"generate": Remote()})()

    def wait(self, refs: list[Any], num_returns: int) -> tuple[list[Any], list[Any]]:
        name = self.order.pop(0)
        done = next(ref for ref in refs if ref[0] == name)
        return [done], [ref for ref in refs if ref is not done]

    def get(self, ref: tuple[str, int, int]) -> list[Completion]:
        return [completion(ref[1]) for _ in range(ref[2])]


def test_a_bound_of_zero_asks_only_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeRay(monkeypatch)
    fake.version = {"a": 1, "b": 1}
    rollouts = Rollouts([fake.worker("a"), fake.worker("b")], arguments())
    for step in range(3):
        fake.order = ["b", "a"]
        fake.version = {"a": step + 1, "b": step + 1}
        groups = rollouts.collect(step + 1)
        assert [g.weight_version for g in groups] == [step + 1] * 4
        assert len(fake.sent) == 2 * (step + 1)
    assert (rollouts.received, rollouts.dropped) == (12, 0)


def test_a_slow_workers_groups_are_dropped_counted_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(monkeypatch)
    workers = [fake.worker("a"), fake.worker("b")]
    rollouts = Rollouts(workers, arguments("--max-staleness-steps", "1"))
    fake.version = {"a": 1, "b": 1}
    fake.order = ["a", "a"]  # b is slow: a alone fills the first two batches
    assert [g.weight_version for g in rollouts.collect(1)] == [1] * 4
    fake.version = {"a": 2, "b": 2}
    fake.order = ["a", "a"]
    assert [g.weight_version for g in rollouts.collect(2)] == [1, 1, 2, 2]
    fake.version = {"a": 3, "b": 3}
    fake.order = ["b", "a", "b"]  # b's request is of version 1 by now
    assert [g.weight_version for g in rollouts.collect(3, last=True)] == [2, 2, 3, 3]
    assert (rollouts.received, rollouts.dropped) == (14, 2)


def test_too_stale_groups_never_reach_a_batch_even_from_the_surplus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeRay(monkeypatch)
    fake.version = {"a": 9}
    rollouts = Rollouts([fake.worker("a")], arguments("--workers", "1"))
    rollouts._ready = [group(8), group(9)]
    fake.order = ["a"]
    assert [g.weight_version for g in rollouts.collect(9)] == [9] * 4
    assert rollouts.dropped == 1


# ---- the check of behaviour log-probabilities ---------------------------------------------------


def test_collate_pads_and_marks_what_the_current_version_made() -> None:
    groups = [
        Group([1, 2, 3], [completion(4), completion(3, 4, length=3)]),
        Group([9, 8, 7], [completion(4, length=1), completion(4, 5)]),
    ]
    batch = grpo.collate(groups, 4)
    assert batch.ids.tolist()[2] == [9, 8, 7, 1, 0, 0]
    assert batch.mask.tolist() == [[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert batch.rewards.tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert batch.current.tolist() == [1.0, 0.0, 1.0, 0.0]


def sampled_by(model: torch.nn.Module) -> Batch:
    ids = torch.randint(0, grpo.VOCAB, (4, 3 + 5), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        behaviour = grpo.token_logprobs(model, ids)
    ones = torch.ones(4, 5)
    return Batch(ids, ones, behaviour, torch.zeros(2, 2), current=torch.ones(4))


def test_rollouts_by_other_weights_are_noticed() -> None:
    ours, theirs = grpo.model_builder(0)(), grpo.model_builder(1)()
    batch = sampled_by(ours)
    assert grpo.check_behaviour(grpo.token_logprobs(ours, batch.ids), batch) < 1e-5
    with pytest.raises(RuntimeError, match="do not serve the trainer's weights"):
        grpo.check_behaviour(grpo.token_logprobs(theirs, batch.ids), batch)
    behaviour = batch.behaviour.clone()
    behaviour[2, 3] = math.nan
    spoilt = Batch(batch.ids, batch.mask, behaviour, batch.rewards, batch.current)
    with pytest.raises(RuntimeError, match="differ"):
        grpo.check_behaviour(grpo.token_logprobs(ours, batch.ids), spoilt)


# ---- settings and reports -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--groups", "15"], "cannot be shared evenly by 2 workers"),
        (["--steps", "0"], "--steps 0: at least 1"),
        (["--max-new-tokens", "62"], "at most 61"),
        (["--max-staleness-steps", "2"], "invalid choice"),
    ],
)
def test_wrong_settings_are_refused(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        grpo.parse(argv)
    assert message in capsys.readouterr().err


def test_the_table_adds_up() -> None:
    history = History(rewards=[0.1] * 10, phases={"start": 2.0, "train": 5.0})
    rows = [line.split() for line in table(history, 10.0).splitlines()]
    assert rows[1:] == [
        ["start", "2.00", "20%"],
        ["train", "5.00", "500.0", "50%"],
        ["other", "3.00", "30%"],
        ["all", "10.00"],
    ]


def test_no_matplotlib_no_curve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = save_curve([0.1, 0.2], tmp_path / "curve.png", title="t", chance=0.1)
    assert "pip install matplotlib" in said
    assert not list(tmp_path.iterdir())


# ---- real runs ----------------------------------------------------------------------------------


@pytest.fixture
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("staleness", "backend"), [(0, "auto"), (1, "gloo")])
@pytest.mark.usefixtures("ray_session", "_one_torch_thread")
def test_a_short_run(
    staleness: int, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = 4
    argv = ["--steps", str(steps), "--groups", "4", "--group-size", "4", "--max-new-tokens", "4"]
    argv += ["--backend", backend, "--max-staleness-steps", str(staleness)]
    argv += ["--kl-coef", "0.01", "--updates", "2", "--plot", str(tmp_path / "out" / "curve.png")]
    history = grpo.main(argv)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(summary) == KEYS
    assert (summary["steps"], summary["engine"], summary["backend"]) == (steps, "hf", backend)
    assert summary["max_staleness"] == max(history.staleness) <= staleness
    assert summary["reward_first"] == pytest.approx(history.rewards[0], abs=1e-4)
    assert summary["reward_last"] == pytest.approx(sum(history.rewards) / steps, abs=1e-4)
    assert history.versions == list(range(2, steps + 2))  # 1 is the sync before the first step
    assert history.groups >= 4 * steps
    assert 0 < history.mismatch < 1e-4
    if staleness:
        assert history.staleness[0] == 0
        assert 1 in history.staleness
    else:
        assert history.dropped == 0
    if find_spec("matplotlib"):
        assert (tmp_path / "out" / "curve.png").stat().st_size > 0


@pytest.mark.usefixtures("ray_session", "_one_torch_thread")
def test_a_sync_that_moves_nothing_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rayxfer import Controller

    class Idle:
        version = 0

    monkeypatch.setattr(Controller, "sync_weights", lambda self, model: Idle())
    with pytest.raises(RuntimeError, match="do not serve the trainer's weights"):
        grpo.main(["--steps", "2", "--plot", str(tmp_path / "curve.png")])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("engine", "staleness"), [("hf", 1), ("vllm", 0)])
def test_the_reward_is_learned(engine: str, staleness: int, tmp_path: Path) -> None:
    """Default arguments, as a user starts it."""
    if engine == "vllm" and not find_spec("vllm"):
        pytest.skip("vLLM is not installed")
    argv = ["--engine", engine]
    argv += ["--max-staleness-steps", str(staleness), "--plot", str(tmp_path / "curve.png")]
    done = subprocess.run(
        [sys.executable, "-m", "recipes.grpo", *argv],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["reward_first"] < 0.25
    assert summary["reward_last"] > 0.8
    assert summary["max_staleness"] <= staleness
    assert summary["engine"] == engine
    assert summary["seconds"] < 240


# ---- job submission -----------------------------------------------------------------------------


def test_the_rayjob_is_what_kuberay_reads() -> None:
    job = yaml.safe_load((ROOT / "recipes" / "kuberay-rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) == {
        *("entrypoint", "submissionMode", "backoffLimit", "activeDeadlineSeconds"),
        *("shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "runtimeEnvYAML"),
        "rayClusterSpec",
    }
    entrypoint = spec["entrypoint"].split()
    assert entrypoint[:3] == ["python", "-m", "recipes.grpo"]
    grpo.parse(entrypoint[3:])
    assert "working_dir" in yaml.safe_load(spec["runtimeEnvYAML"])
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for one in groups:
        (container,) = one["template"]["spec"]["containers"]
        assert container["image"].split(":")[1].startswith(cluster["rayVersion"])
        assert "rayStartParams" in one
    for one in cluster["workerGroupSpecs"]:
        assert one["minReplicas"] <= one["replicas"] <= one["maxReplicas"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def of_the_cluster(folder: str) -> list[psutil.Process]:
    """Every process that was started with this cluster's own folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(folder in part for part in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """`ray start --head` with a token, in an environment of its own: (dashboard address, environment).

    It knows nothing of this checkout: another working directory, no PYTHONPATH.
    """
    folder = tempfile.mkdtemp(prefix="rxj-")  # short: Ray puts Unix sockets in it
    token = Path(folder, "token")
    token.write_text("0123456789abcdef" * 4)
    token.chmod(0o600)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RAY_ADDRESS")}
    env |= {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}",
    }
    gcs, dashboard, agent, client = free_ports(4)
    ray_start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
    ray_start += [f"--port={gcs}", f"--dashboard-port={dashboard}"]
    ray_start += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    ray_start += ["--num-cpus=2", f"--object-store-memory={200 << 20}", f"--temp-dir={folder}/ray"]
    head = subprocess.Popen(
        [*ray_start, "--disable-usage-stats"],
        cwd=folder,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://127.0.0.1:{dashboard}", env
    finally:
        mine = [psutil.Process(head.pid), *psutil.Process(head.pid).children(recursive=True)]
        for process in mine + of_the_cluster(folder):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        head.wait()
        psutil.wait_procs(mine, timeout=10)
        left = of_the_cluster(folder)
        shutil.rmtree(folder, ignore_errors=True)
        assert left == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_submission_runs_with_nothing_of_ours_installed(
    cluster: tuple[str, dict[str, str]],
) -> None:
    address, env = cluster
    ray_job = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit", "--address", address]
    command = [*ray_job, "--working-dir", ".", "--", "python", "-m", "recipes.grpo", "--steps", "5"]
    deadline = time.monotonic() + 60
    while True:
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100
        )
        said = done.stdout + done.stderr
        if "Failed to connect" not in said or time.monotonic() > deadline:
            break
        time.sleep(1)  # the dashboard is not up yet
    assert done.returncode == 0, said[-3000:]
    line = next(line for line in said.splitlines() if line.startswith('{"reward_first"'))
    assert json.loads(line)["steps"] == 5
    assert re.search(r"Job 'raysubmit_\w+' succeeded", said)
