"""TorchRL's weight sync over Ray, if TorchRL is installed (`pip install rayxfer[torchrl]`)."""

from __future__ import annotations

import time
from typing import Any

import ray

from benchmarks.contenders import Contender, Spec, Stage, Unavailable
from benchmarks.peers import PeerWorker, peer_workers
from benchmarks.weights import Model

_MODEL_ID = "policy"


def _connect(worker: PeerWorker, scheme: Any, index: int) -> None:
    """The receiving half, as TorchRL's own collectors do it."""
    scheme.init_on_receiver(model_id=_MODEL_ID, model=worker.model, worker_idx=index)
    worker.kept["torchrl"] = scheme
    scheme.connect(worker_idx=index)


class TorchRLRay(Contender):
    """`RayWeightSyncScheme.send()` from this process to actors that `receive()`.

    Documentation: docs.pytorch.org/rl, TorchRL 0.14, "Weight Synchronization", and the scheme's
    reference page. Best setting: its defaults (`strategy="tensordict"`, `backend="gloo"`), with
    the TensorDict of the weights made once: every tensor is sent to every worker, then applied.
    """

    imports = ("tensordict", "torchrl.weight_update")

    def __init__(self, stage: Stage, spec: Spec) -> None:
        super().__init__(stage, spec)
        try:
            from tensordict import TensorDict
            from torchrl.weight_update import RayWeightSyncScheme
        except Exception as error:  # its compiled parts fail in ways of their own
            raise Unavailable(f"torchrl cannot be imported ({error})") from error
        self.workers = peer_workers(stage, spec.workers)
        self._model = Model(stage.weights)
        self._weights = TensorDict.from_module(self._model).data
        self._scheme = RayWeightSyncScheme()
        receiving = [
            worker.call.remote(_connect, self._scheme, index)
            for index, worker in enumerate(self.workers)
        ]
        self._scheme.init_on_sender(
            model_id=_MODEL_ID,
            remote_collectors=self.workers,
            num_workers=len(self.workers),
            model=self._model,
        )
        self._scheme.connect()
        ray.get(receiving)

    def run(self) -> float:
        start = time.perf_counter()
        self._scheme.send(self._weights)
        return time.perf_counter() - start

    def close(self) -> None:
        self._scheme.shutdown()
