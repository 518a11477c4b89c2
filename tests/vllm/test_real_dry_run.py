"""Dry runs of loaders of unusual habits. vLLM's reload metadata, no engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

from rayxfer.metadata import ParamMeta
from rayxfer.vllm.dry_run import DryRun, dry_run

Weights = Iterable[tuple[str, torch.Tensor]]
SHAPES = {"weight": (4, 4), "scale": (3,), "steps": (4,)}


class Model(torch.nn.Module):
    """A loader that writes buffers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("steps", torch.full((4,), 7.0))

    def load_weights(self, weights: Weights) -> set[str]:
        known = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        written = set()
        for name, tensor in weights:
            known[name].data.copy_(tensor)
            written.add(name)
        return written


class Looking(Model):
    """A loader that looks at the values."""

    def load_weights(self, weights: Weights) -> set[str]:
        def looked() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in weights:
                if name == "scale" and tensor.max().item() < 0:
                    raise ValueError("a negative scale")
                yield name, tensor

        return super().load_weights(looked())


@pytest.fixture
def dry() -> object:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    def run(model: Model, names: Iterable[str]) -> DryRun:
        record_metadata_for_reloading(model)
        offer = [ParamMeta(name, torch.float32, SHAPES[name]) for name in names]
        return dry_run(model, offer, tied_head=False)

    return run


def test_a_loader_that_writes_buffers_is_known(dry: object) -> None:
    assert callable(dry)
    model = Model()
    assert dry(model, SHAPES).known
    assert torch.equal(model.steps, torch.full((4,), 7.0))
    assert dry(model, SHAPES).missing == {}
    assert dry(model, ["weight", "steps"]).missing == {"scale": (0, 3)}


def test_a_loader_that_looks_at_values_is_unknown_and_not_refused(dry: object) -> None:
    assert callable(dry)
    found = dry(Looking(), SHAPES)
    assert (found.known, found.problems) == (False, [])
