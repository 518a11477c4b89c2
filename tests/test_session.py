"""The worker's side alone: order of messages, and messages that mean harm."""

from __future__ import annotations

import os
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from rayxfer import ConfigError, ContractError, RayxferError, StateError, WeightTransferConfig
from rayxfer.binding import Binding
from rayxfer.factory import WeightTransferEngineFactory
from rayxfer.metadata import ParamMeta, metadata_digest, metadata_to_wire
from rayxfer.session import WorkerSession
from rayxfer.testing import poison, raw_bytes

OWNER = {"name": "c", "controller_id": "id", "epoch": 1, "version": 0, "roster": [], "rank": 0}


def session() -> WorkerSession:
    model = torch.nn.Linear(4, 4)
    poison(model)
    made = WorkerSession(Binding(model))
    made.handle("attach", {"owner": OWNER})
    return made


def ids(**more: Any) -> dict[str, Any]:
    return {"controller_id": "id", "round_id": 1, "attempt": 1, "version": 1, "base": 0, **more}


def connected() -> WorkerSession:
    """Over object_store's engine, whose connect needs no sender: it only has to be open."""
    made = session()
    import dataclasses

    class Idle(WeightTransferEngineFactory.get_engine_class("object_store")):  # type: ignore[misc]
        @classmethod
        def check_available(cls) -> None:
            """Here it is never asked to carry anything."""

    WeightTransferEngineFactory._direct["idle"] = Idle
    try:
        entry = dataclasses.asdict(WeightTransferEngineFactory.entry("idle"))
    finally:
        del WeightTransferEngineFactory._direct["idle"]
    answer = made.handle(
        "connect",
        {
            **ids(),
            "session_id": "s",
            "entry": entry,
            "config": dataclasses.asdict(WeightTransferConfig(backend="idle")),
            "init_info": {"bucket_size_bytes": 1024},
            "parallel_config": {"rank": 0, "world_size": 1},
            "wait_s": 5.0,
        },
    )
    assert answer["done"], answer
    assert "error" not in answer, answer
    return made


def prepare(wire: Any, digest: str | None = None, **more: Any) -> dict[str, Any]:
    return ids(
        session_id="s",
        metadata=wire,
        metadata_digest=digest or "0" * 32,
        partial=False,
        update_info={},
        **more,
    )


def good_wire() -> tuple[dict[str, Any], str]:
    metadata = [
        ParamMeta("weight", torch.float32, (4, 4)),
        ParamMeta("bias", torch.float32, (4,)),
    ]
    return metadata_to_wire(metadata), metadata_digest(metadata)


@pytest.mark.parametrize("op", ["update", "finish", "commit"])
def test_update_before_anything_is_a_state_error(op: str) -> None:
    made = session()
    start = time.monotonic()
    with pytest.raises(StateError, match="round 1 is not open"):
        made.handle(op, ids())
    assert time.monotonic() - start < 1.0


def test_unknown_operation_and_stranger() -> None:
    made = session()
    with pytest.raises(StateError, match="unknown operation"):
        made.handle("__class__", {})
    with pytest.raises(StateError, match="belongs to controller 'c'"):
        made.handle("update", {**ids(), "controller_id": "somebody else"})
    with pytest.raises(StateError, match="a worker has one controller"):
        made.handle("attach", {"owner": {**OWNER, "controller_id": "other"}})


def test_a_round_seen_is_over() -> None:
    """A message of an earlier round, or of an earlier attempt, changes nothing."""
    made = connected()
    wire, digest = good_wire()
    assert "problems" not in made.handle("prepare", prepare(wire, digest))
    made.handle("abort", ids())
    for round_id, attempt in ((1, 1), (0, 9)):
        answer = {**prepare(wire, digest), "round_id": round_id, "attempt": attempt}
        # aborted: the channel is closed, so the first thing it needs is a new one
        assert made.handle("prepare", answer) == {"need": "connect"}
    with pytest.raises(StateError):
        made.handle("update", ids())


class Touches:
    """Unpickling it would make a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


HOSTILE: list[tuple[str, Any]] = [
    ("no dict", b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    ("nothing", None),
    ("bytes as names", {"names": b"abc", "dtype_names": [], "shapes": []}),
    ("number of names", {"names": 10**9, "dtype_names": 10**9, "shapes": 10**9}),
    ("unequal", {"names": ["a"] * 3, "dtype_names": ["float32"], "shapes": []}),
    ("path", {"names": ["../../etc/passwd"], "dtype_names": ["../float32"], "shapes": [[1]]}),
    ("attribute", {"names": ["a"], "dtype_names": ["__class__"], "shapes": [[1]]}),
    ("function", {"names": ["a"], "dtype_names": ["load"], "shapes": [[1]]}),
    ("negative", {"names": ["a"], "dtype_names": ["float32"], "shapes": [[-1]]}),
    ("overflow", {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1 << 40, 1 << 40]]}),
    ("huge", {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1 << 62]]}),
    ("bool size", {"names": ["a"], "dtype_names": ["float32"], "shapes": [[True]]}),
    ("float size", {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1.5]]}),
    ("text shape", {"names": ["a"], "dtype_names": ["float32"], "shapes": ["44"]}),
    ("number name", {"names": [7], "dtype_names": ["float32"], "shapes": [[1]]}),
    ("twice", {"names": ["a", "a"], "dtype_names": ["float32"] * 2, "shapes": [[1], [1]]}),
    ("many", {"names": ["x"] * 10**6, "dtype_names": ["float32"] * 10**6, "shapes": [[]] * 10**6}),
]


@pytest.mark.parametrize(("label", "wire"), HOSTILE, ids=[label for label, _ in HOSTILE])
def test_hostile_metadata_is_refused_cheaply(label: str, wire: Any) -> None:
    made = connected()
    model = made._binding.live_model()
    before = {name: raw_bytes(t) for name, t in model.state_dict().items()}
    tracemalloc.start()
    start = time.monotonic()
    with pytest.raises(RayxferError):
        made.handle("prepare", prepare(wire))
    spent = time.monotonic() - start
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert spent < 5.0
    assert peak < 64 << 20
    assert before == {name: raw_bytes(t) for name, t in model.state_dict().items()}
    assert made.state == "READY"


def test_tensors_that_nobody_has_room_for_are_a_shape_mismatch() -> None:
    """2**40 elements are a legal claim: preflight compares, and allocates nothing."""
    made = connected()
    metadata = [ParamMeta("weight", torch.float32, (1 << 40,))]
    message = prepare(metadata_to_wire(metadata), metadata_digest(metadata))
    answer = made.handle("prepare", message)
    assert any("shape mismatch at 'weight'" in text for text in answer["problems"])


def test_metadata_that_does_not_match_its_digest() -> None:
    wire, _ = good_wire()
    with pytest.raises(ContractError, match="does not match its digest"):
        connected().handle("prepare", prepare(wire, "f" * 32))


@pytest.mark.parametrize(
    "message",
    [{}, {"round_id": "one"}, {"round_id": 1}, {"round_id": None, "attempt": []}],
)
def test_messages_with_missing_or_senseless_fields(message: dict[str, Any]) -> None:
    made = connected()
    for op in ("prepare", "update", "finish", "commit", "abort"):
        if op == "abort" and message.get("round_id") == 1:
            continue
        with pytest.raises((ContractError, StateError)):
            made.handle(op, {"controller_id": "id", "session_id": "s", **message})
    assert made.state == "READY"


def test_objects_do_not_get_into_a_request(tmp_path: Path) -> None:
    for field in ("init_info", "update_info"):
        with pytest.raises(ConfigError, match="plain data"):
            WeightTransferConfig(**{field: {"labels": [Touches(tmp_path / "gone")]}})
    assert not (tmp_path / "gone").exists()


def test_unknown_fields_of_update_info_are_named() -> None:
    wire, digest = good_wire()
    message = prepare(wire, digest)
    message["update_info"] = {"surprise": 1}
    with pytest.raises(ConfigError, match="unknown field 'surprise'"):
        connected().handle("prepare", message)
