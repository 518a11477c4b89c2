from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import pytest

from rayxfer import ConfigError, ParallelConfig, WeightTransferConfig


def test_defaults() -> None:
    found = dataclasses.asdict(WeightTransferConfig())
    expected = {
        "backend": "auto",
        "init_info": {},
        "update_info": {},
        "trainer_args": {},
        "bucket_size_bytes": None,
        "connect_timeout_s": 60.0,
        "stall_timeout_s": 30.0,
        "sync_timeout_s": 600.0,
        "verify": "digest",
        "load_mode": "in_place",
        "pause_mode": "keep",
        "cache_policy": "reset",
        "on_worker_failure": "raise",
    }
    assert {field: found[field] for field in expected} == expected


def test_it_is_keyword_only_and_frozen() -> None:
    with pytest.raises(TypeError, match="positional"):
        WeightTransferConfig("gloo")  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        WeightTransferConfig().backend = "gloo"  # type: ignore[misc]


GOOD: list[tuple[str, Any]] = [
    ("backend", "my_backend"),
    ("bucket_size_bytes", 1),
    ("bucket_size_bytes", 1 << 40),
    ("connect_timeout_s", 1e-9),
    ("stall_timeout_s", 3),
    ("verify", "off"),
    ("load_mode", "staged"),
    ("load_mode", "mapped"),
    ("pause_mode", "wait"),
    ("pause_mode", "abort"),
    ("cache_policy", "keep"),
    ("on_worker_failure", "continue"),
]


@pytest.mark.parametrize(("field", "value"), GOOD, ids=lambda x: str(x))
def test_good_values_are_kept(field: str, value: Any) -> None:
    config = WeightTransferConfig(**{field: value})
    assert getattr(config, field) == value
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config) == config
    assert WeightTransferConfig(**dataclasses.asdict(config)) == config


BAD: list[tuple[str, Any]] = [
    ("backend", ""),
    ("backend", []),
    ("backend", b""),
    ("backend", b"gloo"),
    ("backend", ["gloo", ""]),
    ("backend", ["gloo", 3]),
    ("backend", {"gloo"}),
    ("backend", None),
    ("init_info", None),
    ("init_info", [("a", 1)]),
    ("init_info", {1: 2}),
    ("update_info", "names"),
    ("trainer_args", {("a",): 1}),
    ("bucket_size_bytes", 0),
    ("bucket_size_bytes", -1),
    ("bucket_size_bytes", True),
    ("bucket_size_bytes", 1.0),
    ("bucket_size_bytes", "1"),
    ("connect_timeout_s", 0),
    ("connect_timeout_s", -1.0),
    ("stall_timeout_s", math.inf),
    ("stall_timeout_s", math.nan),
    ("stall_timeout_s", 10**400),
    ("sync_timeout_s", True),
    ("sync_timeout_s", "10"),
    ("sync_timeout_s", None),
    ("verify", "crc"),
    ("verify", None),
    ("verify", ["digest"]),
    ("load_mode", "inplace"),
    ("pause_mode", ""),
    ("cache_policy", True),
    ("on_worker_failure", "ignore"),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=lambda x: str(x)[:20])
def test_bad_values_are_refused_with_field_value_and_rule(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}=") as caught:
        WeightTransferConfig(**{field: value})
    assert isinstance(caught.value, ValueError)
    assert "expected" in str(caught.value)
    assert repr(value) in str(caught.value) or not value


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(TypeError, match="bucket_size"):
        WeightTransferConfig(bucket_size=3)  # type: ignore[call-arg]


def test_mappings_are_copied() -> None:
    given = {"port": 1}
    config = WeightTransferConfig(init_info=given, update_info=given, trainer_args=given)
    given["port"] = 2
    assert config.init_info == config.update_info == config.trainer_args == {"port": 1}


def test_one_backend_for_all() -> None:
    config = WeightTransferConfig(backend="gloo")
    assert config.backends == ("gloo",)
    assert [config.backend_of(rank) for rank in range(3)] == ["gloo"] * 3


@pytest.mark.parametrize("kind", [list, tuple])
def test_one_backend_per_worker(kind: type) -> None:
    config = WeightTransferConfig(backend=kind(["shm", "gloo", "shm"]))
    assert config.backend == ("shm", "gloo", "shm")
    assert config.backends == ("shm", "gloo")
    assert [config.backend_of(rank) for rank in range(3)] == ["shm", "gloo", "shm"]


def test_parallel_config_has_vllms_fields() -> None:
    assert dataclasses.asdict(ParallelConfig()) == {
        "rank": 0,
        "world_size": 1,
        "data_parallel_index": 0,
    }
