"""`check_engine` over every CPU engine, over one from the contract alone, and over broken ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from rayxfer import (
    ConfigError,
    Controller,
    TransferError,
    UnknownBackend,
    WeightTransferConfig,
    WeightTransferEngineFactory,
)
from rayxfer.testing import EngineCheckError, check_engine
from tests.conformance import four_method_engine as engines
from tests.conformance.four_method_engine import FourMethodEngine
from tests.fleet import Net, assert_exact, controller_of, held_by, net, plain_workers, poison_all
from tests.helpers import POISON, raw_bytes


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> type[WeightTransferEngineFactory]:
    """Registrations that end with the test."""
    for table in ("_lazy", "_direct"):
        monkeypatch.setattr(
            WeightTransferEngineFactory, table, dict(getattr(WeightTransferEngineFactory, table))
        )
    return WeightTransferEngineFactory


def settings(directory: Path) -> dict[str, object]:
    return {
        "init_info": {"directory": str(directory), "timeout_s": 3.0},
        "update_info": {"greeting": "hello"},
        "stall_timeout_s": 3.0,
    }


def test_gloo_conforms() -> None:
    report = check_engine("gloo")
    assert report.engine == "gloo"
    assert len(report.passed) >= 10


def test_shm_conforms() -> None:
    assert not check_engine("shm", workers=3).failed


def test_object_store_conforms(ray_session: None) -> None:
    assert not check_engine("object_store").failed


def test_an_engine_of_four_methods_conforms_by_name(
    registry: type[WeightTransferEngineFactory], tmp_path: Path
) -> None:
    registry.register_engine("four", "tests.conformance.four_method_engine", "FourMethodEngine")
    config = WeightTransferConfig(**settings(tmp_path))
    assert check_engine("four", config=config).engine == "four"


def test_an_engine_of_four_methods_conforms_as_a_class(tmp_path: Path) -> None:
    before = WeightTransferEngineFactory.registered()
    config = WeightTransferConfig(**settings(tmp_path))
    assert not check_engine(FourMethodEngine, config=config, workers=1).failed
    assert WeightTransferEngineFactory.registered() == before


def test_no_engine_and_no_name() -> None:
    with pytest.raises(UnknownBackend, match="gloo"):
        check_engine("no such engine")
    with pytest.raises(ConfigError, match="no subclass"):
        check_engine(dict)  # type: ignore[arg-type]


BROKEN = [
    (engines.Drops, "layers.1.weight"),
    (engines.Flips, "layers.1.weight"),
    (engines.Duplicates, "twice"),
    (engines.Retypes, "bfloat16"),
    (engines.Swaps, "digest"),
]


@pytest.mark.parametrize(
    ("engine", "says"), BROKEN, ids=lambda value: getattr(value, "__name__", "")
)
def test_check_engine_finds_a_broken_engine(
    engine: type[FourMethodEngine], says: str, tmp_path: Path
) -> None:
    config = WeightTransferConfig(**settings(tmp_path))
    with pytest.raises(EngineCheckError, match=says) as caught:
        check_engine(engine, config=config, only="many_rounds")
    assert list(caught.value.report.failed) == ["many_rounds"]


def test_check_engine_finds_one_that_hands_the_whole_model_over_at_once(tmp_path: Path) -> None:
    config = WeightTransferConfig(**settings(tmp_path))
    with pytest.raises(EngineCheckError, match="whole model"):
        check_engine(engines.AllAtOnce, config=config, only="belong_to_the_loader")


# ---- the same on real Ray -----------------------------------------------------------------------


@pytest.fixture(params=["by import string", "by value"])
def four(
    request: pytest.FixtureRequest, registry: type[WeightTransferEngineFactory], ray_session: None
) -> str:
    class Local(FourMethodEngine):
        """Exists in this function only: it has to travel by value."""

    name = f"four {request.param}"
    if request.param == "by import string":
        registry.register_engine(name, FourMethodEngine.__module__, "FourMethodEngine")
    else:
        registry.register_engine(name, Local)
    return name


def test_an_engine_of_four_methods_works_under_controller(four: str, tmp_path: Path) -> None:
    """Registered in the driver only; two rounds, a failed one between them, then a smaller fleet."""
    workers = plain_workers(2, net)
    with controller_of(workers, backend=four, **settings(tmp_path)) as controller:
        report = controller.sync_weights(Net(1))
        assert [row.backend for row in report.workers] == [four, four]
        assert [row.verified for row in report.workers] == ["loaded", "loaded"]
        assert_exact(Net(1), workers)
        model = Net(2)
        with pytest.raises(TransferError, match="gone"):
            controller.sync_weights(_Gone(model))
        poison_all(workers)
        assert controller.sync_weights(model).version == 2
        assert_exact(model, workers)
        controller.remove_workers([0])
        poison_all(workers[1:])
        assert controller.sync_weights(Net(3)).version == 3
        assert_exact(Net(3), workers[1:])
        assert_exact(model, workers[:1])


class _Gone(torch.nn.Module):
    """Offers what another module has, but cannot be read to the end."""

    def __new__(cls, model: torch.nn.Module) -> object:
        from tests.fleet import Source, source_of

        whole = source_of(model)

        def pairs() -> Iterator[tuple[str, torch.Tensor]]:
            for index, item in enumerate(whole):
                if index == 3:
                    raise OSError("the file is gone")
                yield item

        return Source(whole.metadata(), pairs)


def test_broken_engines_are_refused_in_a_sync(
    registry: type[WeightTransferEngineFactory], ray_session: None, tmp_path: Path
) -> None:
    """One controller, one worker per fault: each is named and serves nothing; the sound one goes on."""
    faults = [engines.Drops, engines.Flips, engines.Duplicates, engines.Retypes]
    workers = plain_workers(5, net)
    names = [FourMethodEngine, *faults]
    for engine in names:
        directory = tmp_path / engine.__name__
        directory.mkdir()
        registry.register_engine(engine.__name__, _in_directory(engine, directory))
    config = WeightTransferConfig(
        backend=[engine.__name__ for engine in names],
        on_worker_failure="continue",
        **{**settings(tmp_path)},
    )
    controller = Controller(workers, config)
    try:
        report = controller.sync_weights(Net(1))
        assert report.version == 1
        assert report.workers[0].error is None
        assert_exact(Net(1), workers[:1])
        for row, engine in zip(report.workers[1:], faults, strict=True):
            assert row.error is not None, engine
            assert row.state == "TORN", engine
            assert row.version == 0, engine
            assert "layers.1.weight" in str(row.error), engine
            assert row.error.worker == row.rank, engine
        assert ray.get([w.state.remote() for w in workers[1:]]) == ["TORN"] * len(faults)
    finally:
        controller.shutdown()


def _in_directory(engine: type[FourMethodEngine], directory: Path) -> type[FourMethodEngine]:
    """The engine with a directory of its own, so that several channels do not meet."""

    class Apart(engine):  # type: ignore[misc,valid-type]
        def init_transfer_engine(self, init_info: engines.FourMethodInitInfo) -> None:
            super().init_transfer_engine(
                engines.FourMethodInitInfo(str(directory), init_info.timeout_s)
            )

        @staticmethod
        def trainer_send_weights(iterator, trainer_args) -> None:  # type: ignore[no-untyped-def]
            engine.trainer_send_weights(iterator, {**trainer_args, "directory": str(directory)})

    return Apart


def test_a_version_that_no_worker_took_is_not_published(
    registry: type[WeightTransferEngineFactory],
    ray_session: None,
    tmp_path: Path,
) -> None:
    registry.register_engine("broken", engines.Flips)
    workers = plain_workers(2, net)
    with controller_of(workers, backend="broken", **settings(tmp_path)) as controller:
        with pytest.raises(TransferError, match=r"layers\.1\.weight") as caught:
            controller.sync_weights(Net(1))
        assert caught.value.name == "layers.1.weight"
        assert caught.value.worker in (0, 1)
        assert controller.status().version == 0
        assert ray.get(workers[0].weight_version.remote()) == 0


def test_receivers_were_poisoned(ray_session: None) -> None:
    """The tests above would not see a transfer that does nothing, were it not for this."""
    (worker,) = plain_workers(1, net)
    for name, tensor in held_by(worker).items():
        assert set(raw_bytes(tensor)) == {POISON}, name
