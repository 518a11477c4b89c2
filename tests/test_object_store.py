"""`object_store`: what is put, from where, and that a round makes no buffers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rayxfer import WeightTransferConfig
from rayxfer.engines import object_store
from rayxfer.testing.local import LocalController
from tests.helpers import assert_same_bytes, poison

BUCKET_BYTES = 64 << 10


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.ParameterList(torch.randn(3000) for _ in range(20))
        self.large = torch.nn.Parameter(torch.randn(1 << 16))
        self.none = torch.nn.Parameter(torch.empty(0, 3))
        self.turned = torch.nn.Parameter(torch.randn(300, 200).t())


@pytest.mark.parametrize("verify", ["digest", "off"])
def test_small_tensors_share_one_buffer_and_large_ones_are_put_where_they_lie(
    ray_session: None, monkeypatch: pytest.MonkeyPatch, verify: Any
) -> None:
    put = object_store._put
    seen: list[tuple[int, int]] = []

    def recorded(flat: torch.Tensor) -> Any:
        seen.append((flat.data_ptr(), flat.numel()))
        return put(flat)

    monkeypatch.setattr(object_store, "_put", recorded)
    model, receiver = Model(), Model()
    config = WeightTransferConfig(
        backend="object_store", bucket_size_bytes=BUCKET_BYTES, verify=verify
    )
    with LocalController([receiver], config) as controller:
        for _ in range(3):
            poison(receiver)
            controller.sync_weights(model)
            assert_same_bytes(model.state_dict(), receiver.state_dict())
    small = {address for address, size in seen if size <= BUCKET_BYTES}
    assert len(small) == 1, "one buffer, round after round"
    assert seen.count((model.large.data_ptr(), model.large.nbytes)) == 3
    assert sum(size for _, size in seen if size > BUCKET_BYTES) == 3 * (
        model.large.nbytes + model.turned.nbytes
    )


def test_a_closed_channel_keeps_no_buffer(ray_session: None) -> None:
    model, receiver = Model(), Model()
    with LocalController([receiver], WeightTransferConfig(backend="object_store")) as controller:
        controller.sync_weights(model)
        (channel,) = controller._sender._channels
        assert channel.handle.scratch._buffers[0] is not None
    assert channel.handle.scratch._buffers == [None]
