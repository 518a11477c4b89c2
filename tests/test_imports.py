"""What `import rayxfer` costs, and how a script ends: in fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

import rayxfer


def run(code: str) -> Any:
    """What the code prints last, as JSON, from a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


MODULES = """
    import json, sys
    {imports}
    print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Modules that are loaded after `import torch`, and after `import rayxfer`."""
    return {
        name: set(run(MODULES.format(imports=f"import {name}"))) for name in ("torch", "rayxfer")
    }


def top_level(modules: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules}


def test_it_loads_no_third_party_package_that_torch_does_not(loaded: dict[str, set[str]]) -> None:
    extra = top_level(loaded["rayxfer"]) - top_level(loaded["torch"]) - sys.stdlib_module_names
    assert extra == {"rayxfer"}


@pytest.mark.parametrize(
    "name", ["ray", "vllm", "transformers", "xxhash", "cloudpickle", "safetensors", "actors"]
)
def test_it_does_not_load(name: str, loaded: dict[str, set[str]]) -> None:
    assert name not in top_level(loaded["rayxfer"])


def test_it_loads_no_engine_and_no_control_plane(loaded: dict[str, set[str]]) -> None:
    own = {name for name in loaded["rayxfer"] if name.startswith("rayxfer.")}
    assert not {name for name in own if name.startswith(("rayxfer.engines", "rayxfer.testing"))}
    assert not own & {"rayxfer.controller", "rayxfer.coordinator", "rayxfer.worker"}


def test_the_controller_actor_does_without_torch() -> None:
    assert "torch" not in run(MODULES.format(imports="import rayxfer.controller_actor"))


def test_it_loads_no_part_of_torch_that_torch_leaves_out(loaded: dict[str, set[str]]) -> None:
    extra = {name for name in loaded["rayxfer"] - loaded["torch"] if name.startswith("torch.")}
    assert extra == set()


def test_every_public_name_is_there() -> None:
    assert sorted(rayxfer.__all__) == dir(rayxfer)
    for name in rayxfer.__all__:
        assert getattr(rayxfer, name).__name__ == name
    with pytest.raises(AttributeError, match="module 'rayxfer' has no attribute 'Controler'"):
        rayxfer.Controler  # noqa: B018


WITHOUT_RAY = """
    import importlib.abc, json, sys

    class NoRay(importlib.abc.MetaPathFinder):
        tried = []
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] in ("ray", "vllm"):
                self.tried.append(name)
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, NoRay())

    import torch
    import rayxfer
    from rayxfer import MappingSource, ModuleSource, WeightTransferConfig
    from rayxfer.binding import Binding
    from rayxfer.session import WorkerSession
    from rayxfer.testing import LocalController, poison, raw_bytes

    def model(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))

    found = {}
    session = WorkerSession(Binding(model(9)))
    found["snapshot"] = session.handle("snapshot", {})["state"]
    for backend in ("gloo", "shm", "auto"):
        trainer, workers = model(0), [model(1), model(2)]
        for worker in workers:
            poison(worker)
        with LocalController(workers, WeightTransferConfig(backend=backend)) as controller:
            report = controller.sync_weights(trainer)
        expected = {k: raw_bytes(v) for k, v in trainer.state_dict().items()}
        same = [{k: raw_bytes(v) for k, v in w.state_dict().items()} == expected for w in workers]
        rows = [(row.backend, row.verified, str(row.state)) for row in report.workers]
        found[backend] = [report.version, rows, same]
    found["tried"] = list(NoRay.tried)
    try:
        rayxfer.Controller
    except ImportError as error:
        found["controller"] = str(error)
    print(json.dumps(found))
"""


def test_without_ray_whole_rounds_work() -> None:
    found = run(WITHOUT_RAY)
    assert found["snapshot"] == "READY"
    for backend in ("gloo", "shm", "auto"):
        used = "shm" if backend == "auto" else backend
        assert found[backend] == [1, [[used, "loaded", "READY"]] * 2, [True, True]]
    assert found["tried"] == []  # nobody even asked for it
    assert "ray" in found["controller"]


ENDS = """
    import torch
    from rayxfer import WeightTransferConfig
    from rayxfer.testing import LocalController

    controller = LocalController([torch.nn.Linear(3, 3)], WeightTransferConfig(backend="{backend}"))
    controller.sync_weights(torch.nn.Linear(3, 3))
    controller.shutdown()
    print("null")
"""


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_script_that_shuts_down_and_ends_ends_well(backend: str) -> None:
    run(ENDS.format(backend=backend))
