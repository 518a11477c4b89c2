from __future__ import annotations

import importlib.metadata
import pickle
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from rayxfer import (
    ConfigError,
    ParallelConfig,
    UnknownBackend,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferEngineFactory,
)
from rayxfer import factory as factory_module
from rayxfer.factory import EngineEntry
from rayxfer.testing import LocalController
from tests.helpers import assert_same_bytes, poison
from tests.test_base import MyEngine

BUILT_IN = {
    "nccl": "NCCLEngine",
    "ipc": "IPCEngine",
    "gloo": "GlooEngine",
    "shm": "ShmEngine",
    "object_store": "ObjectStoreEngine",
}

Factory = type[WeightTransferEngineFactory]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Factory:
    """The registry as it is after import, whatever is registered here."""
    for table in ("_lazy", "_direct"):
        monkeypatch.setattr(
            WeightTransferEngineFactory, table, dict(getattr(WeightTransferEngineFactory, table))
        )
    return WeightTransferEngineFactory


class Registered(MyEngine):
    def hello(self) -> str:
        return "by name"


def local_engine(word: str) -> type[MyEngine]:
    class Local(MyEngine):
        def hello(self) -> str:
            return word

    return Local


# --- registration ---------------------------------------------------------------------------


def test_built_in_engines_are_registered_by_import_string(factory: Factory) -> None:
    assert set(factory.built_in) == set(BUILT_IN) <= set(factory.registered())
    for name, class_name in BUILT_IN.items():
        engine_cls = factory.get_engine_class(name)
        assert issubclass(engine_cls, WeightTransferEngine)
        assert (engine_cls.__module__, engine_cls.__name__) == (
            f"rayxfer.engines.{name}",
            class_name,
        )
        assert factory.entry(name) == EngineEntry(name, f"rayxfer.engines.{name}", class_name)


def test_lazy_registration_imports_when_first_used(
    factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lazily_imported.py").write_text(
        "from tests.test_base import MyEngine\nclass Late(MyEngine): pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    factory.register_engine("late", "lazily_imported", "Late")
    assert "late" in factory.registered()
    assert "lazily_imported" not in sys.modules
    try:
        engine_cls = factory.get_engine_class("late")
        assert engine_cls is sys.modules["lazily_imported"].Late
        assert factory.get_engine_class("late") is engine_cls
    finally:
        sys.modules.pop("lazily_imported", None)


def test_direct_registration(factory: Factory) -> None:
    factory.register_engine("mine", Registered)
    assert factory.get_engine_class("mine") is Registered
    assert factory.registered() == tuple(sorted([*factory._lazy, "mine"]))


def test_an_engine_is_made_from_the_config(factory: Factory) -> None:
    factory.register_engine("mine", Registered)
    config, place = WeightTransferConfig(backend="mine"), ParallelConfig(1, 2)
    engine = factory.create_engine(config, place)
    assert type(engine) is Registered
    assert engine.config is config
    assert engine.parallel_config is place
    assert factory.create_engine(config=config).parallel_config == ParallelConfig()
    with pytest.raises(ConfigError, match="an engine is made from one name"):
        factory.create_engine(WeightTransferConfig(backend=["mine", "gloo"]))


def test_names_are_unique(factory: Factory) -> None:
    factory.register_engine("direct", Registered)
    factory.register_engine("lazy", "tests.test_factory", "Registered")
    for name in ("direct", "lazy", "gloo"):
        for arguments in ((Registered,), ("tests.test_factory", "Registered")):
            with pytest.raises(ConfigError, match=f"'{name}' is already registered") as caught:
                factory.register_engine(name, *arguments)
            assert isinstance(caught.value, ValueError)
    assert factory.get_engine_class("direct") is Registered


@pytest.mark.parametrize("name", ["", "auto", None, 3, b"gloo"])
def test_a_name_is_a_string_that_is_not_taken(factory: Factory, name: Any) -> None:
    with pytest.raises(ConfigError, match="expected a non-empty string other than 'auto'"):
        factory.register_engine(name, Registered)


@pytest.mark.parametrize("class_name", [None, ""])
def test_a_module_path_needs_a_class_name(factory: Factory, class_name: str | None) -> None:
    with pytest.raises(ConfigError, match=r"'mine': class_name is required .*'my\.module'"):
        factory.register_engine("mine", "my.module", class_name)
    assert "mine" not in factory.registered()


@pytest.mark.parametrize("path", ["", ".", ".relative", "a..b", "a.", "my/module.py", "my-module"])
def test_a_module_path_is_one(factory: Factory, path: str) -> None:
    with pytest.raises(ConfigError, match="is no absolute module path"):
        factory.register_engine("mine", path, "Engine")
    assert "mine" not in factory.registered()


@pytest.mark.parametrize("given", [dict, Registered(), lambda: Registered, None, 3])
def test_only_engine_classes_are_taken(factory: Factory, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"'mine': .* is no subclass of WeightTransferEngine"):
        factory.register_engine("mine", given)
    assert "mine" not in factory.registered()


# --- unknown --------------------------------------------------------------------------------


def test_an_unknown_backend_lists_what_is_registered(factory: Factory) -> None:
    factory.register_engine("mine", Registered)
    expected = "unknown backend 'glooo': registered are gloo, ipc, mine, nccl, object_store, shm"
    for call in (
        lambda: factory.get_engine_class("glooo"),
        lambda: factory.entry("glooo"),
        lambda: factory.create_engine(WeightTransferConfig(backend="glooo")),
    ):
        with pytest.raises(UnknownBackend) as caught:
            call()
        assert str(caught.value) == expected
        assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("module", "class_name", "message"),
    [
        ("no_such_module_here", "Engine", "No module named 'no_such_module_here'"),
        ("rayxfer.engines.no_such", "Engine", r"No module named 'rayxfer\.engines\.no_such'"),
        ("rayxfer.engines.gloo", "NoSuch", "has no attribute 'NoSuch'"),
    ],
)
def test_a_lazy_engine_that_is_not_there(
    factory: Factory, module: str, class_name: str, message: str
) -> None:
    factory.register_engine("mine", module, class_name)
    with pytest.raises(UnknownBackend, match=message) as caught:
        factory.get_engine_class("mine")
    assert f"'mine' is registered as {module}:{class_name}" in str(caught.value)
    assert isinstance(caught.value.cause, (ImportError, AttributeError))


def test_a_lazy_name_that_is_no_engine(factory: Factory) -> None:
    factory.register_engine("mine", "collections", "OrderedDict")
    with pytest.raises(ConfigError, match="OrderedDict'> is no subclass of WeightTransferEngine"):
        factory.get_engine_class("mine")


# --- entry points ---------------------------------------------------------------------------


def test_entry_points_are_found_by_name(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    group = factory_module.ENTRY_POINT_GROUP
    assert group == "rayxfer.engines"
    points = importlib.metadata.EntryPoints(
        [
            importlib.metadata.EntryPoint("installed", "tests.test_factory:Registered", group),
            importlib.metadata.EntryPoint(
                "spaced", "tests.test_factory : Registered [extra]", group
            ),
            importlib.metadata.EntryPoint("half", "tests.test_factory", group),
            importlib.metadata.EntryPoint("gloo", "tests.test_factory:Registered", group),
            importlib.metadata.EntryPoint("other", "tests.test_factory:Registered", "other.group"),
        ]
    )
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: points.select(**kw))
    assert factory.registered() == tuple(sorted([*BUILT_IN, "installed", "spaced", "half"]))
    for name in ("installed", "spaced"):
        assert factory.get_engine_class(name) is Registered
        assert factory.entry(name) == EngineEntry(name, "tests.test_factory", "Registered")
    # what was registered in this process is not replaced by what is installed
    assert factory.get_engine_class("gloo").__name__ == "GlooEngine"
    with pytest.raises(UnknownBackend, match=r"'half' is registered as tests\.test_factory:"):
        factory.get_engine_class("half")
    with pytest.raises(UnknownBackend, match="unknown backend 'other'"):
        factory.get_engine_class("other")


# --- shipping -------------------------------------------------------------------------------


def shipped(entry: EngineEntry) -> type[WeightTransferEngine[Any, Any]]:
    return pickle.loads(pickle.dumps(entry)).load()


def test_a_class_of_a_module_goes_by_name(factory: Factory) -> None:
    factory.register_engine("mine", Registered)
    entry = factory.entry("mine")
    assert (entry.module, entry.class_name) == ("tests.test_factory", "Registered")
    assert shipped(entry) is Registered


def test_a_lazy_entry_is_an_import_string_and_nothing_else(factory: Factory) -> None:
    factory.register_engine("mine", "tests.test_factory", "Registered")
    assert factory.entry("mine") == EngineEntry("mine", "tests.test_factory", "Registered", None)


def test_a_local_class_goes_by_value(factory: Factory) -> None:
    engine_cls = local_engine("by value")
    factory.register_engine("mine", engine_cls)
    entry = factory.entry("mine")
    assert entry.class_name == ""
    found = shipped(entry)
    assert issubclass(found, MyEngine)
    assert found().hello() == "by value"  # type: ignore[attr-defined]
    assert found().parse_init_info({"endpoint": "h", "port": 1}).port == 1


def test_a_class_that_its_module_no_longer_names_goes_by_value(factory: Factory) -> None:
    """The worker would find another class under that name."""
    other = type(
        "Registered", (MyEngine,), {"__module__": __name__, "hello": lambda self: "the other"}
    )
    assert (other.__module__, other.__qualname__) == ("tests.test_factory", "Registered")
    factory.register_engine("mine", other)
    assert shipped(factory.entry("mine"))().hello() == "the other"  # type: ignore[attr-defined]


def test_a_class_of_main_goes_by_value(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")
    code = "from tests.test_base import MyEngine\nclass Mine(MyEngine):\n    word = 'main'\n"
    exec(code, script.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", script)
    factory.register_engine("mine", script.Mine)
    entry = factory.entry("mine")
    assert (entry.module, entry.class_name) == ("<by value>", "")
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    assert shipped(entry).word == "main"  # type: ignore[attr-defined]


def test_rayxfer_s_own_classes_go_by_name_only(factory: Factory) -> None:
    engine_cls = factory.get_engine_class("shm")
    factory.register_engine("mine", engine_cls)
    assert factory.entry("mine") == EngineEntry("mine", "rayxfer.engines.shm", "ShmEngine", None)


LOCK = threading.Lock()


class Locked(MyEngine):
    def hello(self) -> str:
        with LOCK:
            return "locked"


def test_a_class_that_cannot_be_pickled_goes_by_name(factory: Factory) -> None:
    factory.register_engine("mine", Locked)
    entry = factory.entry("mine")
    assert entry == EngineEntry("mine", "tests.test_factory", "Locked", None)
    assert shipped(entry) is Locked


def test_a_class_that_can_go_neither_way_is_refused_here_and_not_at_the_worker(
    factory: Factory,
) -> None:
    lock = threading.Lock()

    class Local(MyEngine):
        def hello(self) -> object:
            return lock

    factory.register_engine("mine", Local)
    with pytest.raises(
        ConfigError, match=r"neither by name nor by value: TypeError: .*lock"
    ) as caught:
        factory.entry("mine")
    assert isinstance(caught.value.cause, TypeError)


def test_shipping_leaves_cloudpickle_as_it_was(factory: Factory) -> None:
    before = set(cloudpickle.list_registry_pickle_by_value())
    factory.register_engine("mine", Registered)
    factory.register_engine("locked", Locked)
    factory.entry("mine"), factory.entry("locked")
    assert set(cloudpickle.list_registry_pickle_by_value()) == before
    module = sys.modules["tests.test_factory"]
    cloudpickle.register_pickle_by_value(module)
    try:
        factory.entry("mine")
        assert "tests.test_factory" in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_a_value_that_cannot_be_rebuilt_is_an_unknown_backend() -> None:
    with pytest.raises(UnknownBackend, match="'mine' was shipped by value, and its class cannot"):
        EngineEntry("mine", "<by value>", "", b"not a pickle").load()


UNREACHABLE = """
    from rayxfer import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

    WORD = "from a module that only the driver reaches"

    def helper():
        return WORD

    class Engine(WeightTransferEngine):
        init_info_cls, update_info_cls = WeightTransferInitInfo, WeightTransferUpdateInfo
        def init_transfer_engine(self, init_info): ...
        def receive_weights(self, update_info, load_weights): ...
        def shutdown(self): ...
        @staticmethod
        def trainer_send_weights(iterator, trainer_args): ...
        def hello(self):
            return helper()
"""

WORKER = """
    import pickle, sys
    from rayxfer import UnknownBackend
    entries = pickle.load(sys.stdin.buffer)
    for entry in entries:
        try:
            print(entry.name, "->", entry.load()().hello())
        except UnknownBackend as error:
            print(entry.name, "->", error)
"""


def test_another_process_gets_the_class(
    factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose sys.path is not the driver's, and where nothing is registered."""
    path = tmp_path / "only"
    path.mkdir()
    (path / "unreachable_engine.py").write_text(textwrap.dedent(UNREACHABLE))
    monkeypatch.syspath_prepend(path)
    import unreachable_engine  # type: ignore[import-not-found]

    class Local(unreachable_engine.Engine):  # type: ignore[misc]
        def hello(self) -> str:
            return "local"

    factory.register_engine("class", unreachable_engine.Engine)
    factory.register_engine("string", "unreachable_engine", "Engine")
    factory.register_engine("based on it", Local)
    try:
        entries = [factory.entry(name) for name in ("class", "string", "based on it")]
    finally:
        sys.modules.pop("unreachable_engine", None)
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(WORKER)],
        input=pickle.dumps(entries),
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == [
        "class -> from a module that only the driver reaches",
        "string -> backend 'string' is registered as unreachable_engine:Engine, which cannot be "
        "imported here: No module named 'unreachable_engine'",
        "based on it -> backend 'based on it' was shipped by value, and its class cannot be rebuilt "
        "here: ModuleNotFoundError: No module named 'unreachable_engine'",
    ]


# --- an engine that was written for vLLM ----------------------------------------------------

FOR_VLLM = '''
    """Written as for vLLM: a directory is the transport."""
    import os
    import time
    from collections.abc import Callable, Iterator
    from dataclasses import dataclass
    from typing import Any

    import torch

    from vllm.config.parallel import ParallelConfig
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import (
        WeightTransferEngine,
        WeightTransferInitInfo,
        WeightTransferUpdateInfo,
    )
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


    @dataclass
    class DirInitInfo(WeightTransferInitInfo):
        directory: str


    @dataclass
    class DirUpdateInfo(WeightTransferUpdateInfo):
        names: list[str]
        dtype_names: list[str]
        shapes: list[list[int]]
        suffix: str

        def __post_init__(self) -> None:
            if len(self.dtype_names) != len(self.names):
                raise ValueError("`dtype_names` and `names` differ in length")


    class DirEngine(WeightTransferEngine[DirInitInfo, DirUpdateInfo]):
        init_info_cls = DirInitInfo
        update_info_cls = DirUpdateInfo

        def __init__(self, config: WeightTransferConfig, parallel_config: ParallelConfig) -> None:
            super().__init__(config, parallel_config)
            self.directory = None
            self.who = (
                self.config.backend,
                parallel_config.rank,
                parallel_config.world_size,
                parallel_config.data_parallel_index,
            )

        def init_transfer_engine(self, init_info: DirInitInfo) -> None:
            self.directory = init_info.directory
            with open(os.path.join(self.directory, f"worker-{self.who[1]}"), "w") as file:
                file.write(repr(self.who))

        def receive_weights(
            self,
            update_info: DirUpdateInfo,
            load_weights: Callable[[list[tuple[str, torch.Tensor]]], None],
        ) -> None:
            for i, (name, dtype_name, shape) in enumerate(
                zip(update_info.names, update_info.dtype_names, update_info.shapes)
            ):
                path = os.path.join(self.directory, f"{i}{update_info.suffix}")
                while not os.path.exists(path):
                    time.sleep(0.001)
                data = bytearray(open(path, "rb").read())
                dtype = getattr(torch, dtype_name)
                weight = torch.frombuffer(data, dtype=dtype).reshape(shape)
                load_weights([(name, weight)])

        def shutdown(self) -> None:
            self.directory = None

        @staticmethod
        def trainer_send_weights(
            iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
        ) -> None:
            for i, (name, tensor) in enumerate(iterator):
                path = os.path.join(trainer_args["directory"], str(i))
                with open(path, "wb") as file:
                    file.write(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
                os.rename(path, path + trainer_args["update_info"]["suffix"])


    WeightTransferEngineFactory.register_engine("directory", DirEngine)
    WeightTransferEngineFactory.register_engine("lazy directory", __name__, "DirEngine")
'''


@pytest.fixture
def ported(
    factory: Factory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """That module with its import lines changed, and nothing else."""
    source = textwrap.dedent(FOR_VLLM)
    lines = [
        line.replace("vllm.distributed.weight_transfer", "rayxfer")
        .replace("vllm.config.weight_transfer", "rayxfer")
        .replace("vllm.config.parallel", "rayxfer")
        if line.startswith("from vllm.")
        else line
        for line in source.splitlines(keepends=True)
    ]
    assert "vllm." not in "".join(lines)
    (tmp_path / "ported_engine.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    import ported_engine  # type: ignore[import-not-found]

    yield ported_engine
    sys.modules.pop("ported_engine", None)


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).to(torch.bfloat16))


def test_the_ported_engine_keeps_the_contract(factory: Factory, ported: types.ModuleType) -> None:
    assert factory.get_engine_class("directory") is ported.DirEngine
    assert factory.get_engine_class("lazy directory") is ported.DirEngine
    engine = factory.create_engine(
        config=WeightTransferConfig(backend="directory"), parallel_config=ParallelConfig(1, 3, 2)
    )
    assert engine.who == ("directory", 1, 3, 2)  # type: ignore[attr-defined]
    assert engine.parse_init_info({"directory": "d"}) == ported.DirInitInfo("d")
    with pytest.raises(ValueError, match="DirEngine: missing field 'directory'"):
        engine.parse_init_info({})
    plain = {"names": ["a"], "dtype_names": [], "shapes": [[1]], "suffix": ""}
    with pytest.raises(ValueError, match="DirEngine: `dtype_names` and `names` differ in length"):
        engine.parse_update_info(plain)


@pytest.mark.parametrize("backend", ["directory", "lazy directory"])
def test_the_ported_engine_works_in_a_whole_round(
    ported: types.ModuleType, tmp_path: Path, backend: str
) -> None:
    directory = tmp_path / "transport"
    directory.mkdir()
    workers = [make_model(1), make_model(2)]
    config = WeightTransferConfig(
        backend=backend,
        init_info={"directory": str(directory)},
        update_info={"suffix": ".bin"},
        stall_timeout_s=20.0,
    )
    trainer = make_model(0)
    expected = {name: tensor.clone() for name, tensor in trainer.state_dict().items()}
    for worker in workers:
        poison(worker)
    with LocalController(workers, config) as controller:
        report = controller.sync_weights(trainer)
    assert [row.backend for row in report.workers] == [backend] * 2
    assert [row.verified for row in report.workers] == ["loaded"] * 2
    for rank, worker in enumerate(workers):
        assert_same_bytes(worker.state_dict(), expected)
        assert (directory / f"worker-{rank}").read_text() == repr((backend, rank, 2, 0))
    assert_same_bytes(trainer.state_dict(), expected)
