from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field
from typing import Any

import pytest
import torch

from rayxfer import (
    BackendUnavailable,
    ConfigError,
    ParallelConfig,
    ParamMeta,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from rayxfer.base import LoadWeights, SessionPlan
from rayxfer.topology import local_facts


@dataclass
class MyInitInfo(WeightTransferInitInfo):
    endpoint: str
    port: int
    retries: int = 3
    tags: list[str] = field(default_factory=list)
    opened: bool = field(default=False, init=False)


@dataclass
class MyUpdateInfo(WeightTransferUpdateInfo):
    names: list[str]
    shapes: list[list[int]]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.shapes):
            raise ValueError(f"names has {len(self.names)} entries, shapes {len(self.shapes)}")


class MyEngine(WeightTransferEngine[MyInitInfo, MyUpdateInfo]):
    init_info_cls = MyInitInfo
    update_info_cls = MyUpdateInfo

    def init_transfer_engine(self, init_info: MyInitInfo) -> None: ...

    def receive_weights(self, update_info: MyUpdateInfo, load_weights: LoadWeights) -> None: ...

    def shutdown(self) -> None: ...

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None: ...


# --- the contract ---------------------------------------------------------------------------

FOUR = ["init_transfer_engine", "receive_weights", "shutdown", "trainer_send_weights"]


def test_exactly_four_methods_are_abstract() -> None:
    assert sorted(WeightTransferEngine.__abstractmethods__) == FOUR
    with pytest.raises(TypeError, match="abstract"):
        WeightTransferEngine()  # type: ignore[abstract]


@pytest.mark.parametrize("missing", FOUR)
def test_every_one_of_them_is_needed(missing: str) -> None:
    body = {name: vars(MyEngine)[name] for name in FOUR if name != missing}
    incomplete = type("Incomplete", (WeightTransferEngine,), body)
    with pytest.raises(TypeError, match=missing):
        incomplete()


def test_signatures_are_those_of_vllm() -> None:
    parameters = {
        name: list(inspect.signature(getattr(WeightTransferEngine, name)).parameters)
        for name in (*FOUR, "parse_init_info", "parse_update_info", "__init__")
    }
    assert parameters == {
        "init_transfer_engine": ["self", "init_info"],
        "receive_weights": ["self", "update_info", "load_weights"],
        "shutdown": ["self"],
        "trainer_send_weights": ["iterator", "trainer_args"],
        "parse_init_info": ["self", "init_dict"],
        "parse_update_info": ["self", "update_dict"],
        "__init__": ["self", "config", "parallel_config"],
    }
    assert isinstance(vars(WeightTransferEngine)["trainer_send_weights"], staticmethod)


def test_the_constructor_takes_config_and_place_with_defaults() -> None:
    engine = MyEngine()
    assert engine.config == WeightTransferConfig()
    assert engine.parallel_config == ParallelConfig(rank=0, world_size=1, data_parallel_index=0)
    config, place = WeightTransferConfig(backend="mine"), ParallelConfig(2, 4, 1)
    engine = MyEngine(config, place)
    assert engine.config is config
    assert engine.parallel_config is place
    assert MyEngine(config=config, parallel_config=place).parallel_config.rank == 2


# --- infos and requests ---------------------------------------------------------------------


def test_required_fields_follow_a_flag_that_is_keyword_only() -> None:
    info = MyUpdateInfo(["a"], [[1]])
    assert (info.names, info.shapes, info.is_checkpoint_format) == (["a"], [[1]], True)
    assert not MyUpdateInfo(["a"], [[1]], is_checkpoint_format=False).is_checkpoint_format
    with pytest.raises(TypeError, match="positional"):
        MyUpdateInfo(["a"], [[1]], False)  # type: ignore[misc]
    with pytest.raises(TypeError, match="names"):
        MyUpdateInfo()  # type: ignore[call-arg]
    assert dataclasses.asdict(MyInitInfo("host", 1)) == {
        "endpoint": "host",
        "port": 1,
        "retries": 3,
        "tags": [],
        "opened": False,
    }


def test_requests_carry_plain_dicts() -> None:
    assert WeightTransferInitRequest({"a": 1}).init_info == {"a": 1}
    assert WeightTransferInitRequest(init_info={"a": 1}) == WeightTransferInitRequest({"a": 1})
    assert WeightTransferUpdateRequest(update_info={"b": 2}).update_info == {"b": 2}
    first, second = WeightTransferInitRequest(), WeightTransferInitRequest()
    first.init_info["x"] = 1
    assert second.init_info == {}


def test_dicts_become_the_engine_s_dataclasses() -> None:
    engine = MyEngine()
    assert engine.parse_init_info({"endpoint": "host", "port": 9}) == MyInitInfo("host", 9)
    assert engine.parse_init_info(
        {"endpoint": "host", "port": 9, "retries": 0, "tags": ["a"]}
    ) == MyInitInfo("host", 9, 0, ["a"])
    found = engine.parse_update_info({"names": ["a"], "shapes": [[2]]})
    assert found == MyUpdateInfo(["a"], [[2]])
    found = engine.parse_update_info({"names": [], "shapes": [], "is_checkpoint_format": False})
    assert found == MyUpdateInfo([], [], is_checkpoint_format=False)


BAD_INIT: dict[str, tuple[Any, str]] = {
    "missing": (
        {"endpoint": "h"},
        "missing field 'port'; MyInitInfo has endpoint, port, retries, tags",
    ),
    "both missing": ({}, "missing field 'endpoint', missing field 'port'; MyInitInfo has"),
    "unknown": (
        {"endpoint": "h", "port": 1, "prot": 2},
        "unknown field 'prot'; MyInitInfo has endpoint, port, retries, tags",
    ),
    "unknown and missing": (
        {"endpoint": "h", "prot": 2},
        "unknown field 'prot', missing field 'port'; MyInitInfo has",
    ),
    "not for init": ({"endpoint": "h", "port": 1, "opened": True}, "unknown field 'opened'; "),
    "nothing": (None, "expected a dict with string keys, got NoneType"),
    "a list": ([("endpoint", "h")], "expected a dict with string keys, got list"),
    "other keys": ({1: 2}, "expected a dict with string keys, got dict"),
}


@pytest.mark.parametrize(("given", "message"), BAD_INIT.values(), ids=BAD_INIT)
def test_a_bad_init_info_names_engine_and_field(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MyEngine().parse_init_info(given)
    assert isinstance(caught.value, ValueError)
    assert str(caught.value).startswith(f"Invalid init_info for MyEngine: {message}")


BAD_UPDATE: dict[str, tuple[Any, str]] = {
    "missing": ({"names": []}, "missing field 'shapes'; MyUpdateInfo has"),
    "unknown": ({"names": [], "shapes": [], "dtypes": []}, "unknown field 'dtypes'; MyUpdateInfo"),
    "flag": (
        {"names": [], "shapes": [], "is_checkpoint_format": "no"},
        "field 'is_checkpoint_format' is 'no', not a bool",
    ),
    "flag a number": (
        {"names": [], "shapes": [], "is_checkpoint_format": 1},
        "field 'is_checkpoint_format' is 1, not a bool",
    ),
    "its own check": (
        {"names": ["a"], "shapes": []},
        "names has 1 entries, shapes 0",
    ),
    "its own check fails": ({"names": 3, "shapes": []}, "object of type 'int' has no len()"),
}


@pytest.mark.parametrize(("given", "message"), BAD_UPDATE.values(), ids=BAD_UPDATE)
def test_a_bad_update_info_names_engine_and_field(given: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MyEngine().parse_update_info(given)
    assert str(caught.value).startswith(f"Invalid update_info for MyEngine: {message}")


def test_an_empty_info_class_says_that_it_has_no_fields() -> None:
    class Bare(MyEngine):
        init_info_cls = WeightTransferInitInfo  # type: ignore[assignment]

    assert type(Bare().parse_init_info({})) is WeightTransferInitInfo
    with pytest.raises(
        ConfigError, match="unknown field 'a'; WeightTransferInitInfo has no fields"
    ):
        Bare().parse_init_info({"a": 1})


def test_an_info_class_need_not_be_a_dataclass() -> None:
    class Plain:
        def __init__(self, *, host: str) -> None:
            self.host = host

    class Other(MyEngine):
        init_info_cls = Plain  # type: ignore[assignment]

    assert Other().parse_init_info({"host": "h"}).host == "h"  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"Invalid init_info for Other: .*'port'"):
        Other().parse_init_info({"port": "h"})


def test_an_info_class_may_have_init_only_fields() -> None:
    @dataclass
    class WithSecret(WeightTransferInitInfo):
        host: str
        secret: InitVar[str]

        def __post_init__(self, secret: str) -> None:
            self.host += secret

    class Other(MyEngine):
        init_info_cls = WithSecret  # type: ignore[assignment]

    assert Other().parse_init_info({"host": "h", "secret": "s"}).host == "hs"  # type: ignore[attr-defined]


# --- optional hooks -------------------------------------------------------------------------


def test_every_optional_hook_has_a_default_that_works() -> None:
    facts = local_facts()
    config = WeightTransferConfig(init_info={"endpoint": "h", "port": 1})
    plan = SessionPlan("id", "00" * 16, config, 1 << 20, facts, (facts, facts), 5.0)
    assert MyEngine.check_available() is None
    channel, infos = MyEngine.trainer_open(plan)
    assert channel is None
    assert infos == [{"endpoint": "h", "port": 1}] * 2
    infos[0]["port"] = 2  # one worker's is nobody else's
    assert infos[1] == dict(config.init_info) == {"endpoint": "h", "port": 1}
    MyEngine.trainer_connect(channel, 1.0)
    MyEngine.trainer_abort(channel)
    MyEngine.trainer_close(channel)
    MyEngine.trainer_close(channel)
    assert MyEngine.round_update_info(channel, [ParamMeta("a", torch.int8, ())]) == {}
    engine = MyEngine()
    assert engine.abort() is None
    with pytest.raises(NotImplementedError, match="MyEngine takes no payloads"):
        engine.on_push(0, b"")


def test_safe_promises_are_the_default() -> None:
    assert (MyEngine.copies_before_next, MyEngine.uses_push) == (False, False)
    assert MyEngine.default_bucket_size_bytes == 16 << 20


def test_a_push_engine_answers_with_an_event() -> None:
    class Pushed(MyEngine):
        uses_push = True

        def on_push(self, sequence: int, payload: Any) -> threading.Event:
            done = threading.Event()
            done.set()
            return done

    assert Pushed().on_push(0, b"").is_set()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that hardware is missing")
@pytest.mark.parametrize("name", ["nccl", "ipc"])
def test_gpu_engines_name_what_is_missing(name: str) -> None:
    from rayxfer import WeightTransferEngineFactory

    with pytest.raises(BackendUnavailable, match=f"(?i){name}.*(GPU|CUDA)"):
        WeightTransferEngineFactory.get_engine_class(name).check_available()
