"""`object_store`: buckets through Ray's object store, to workers anywhere in the cluster, no set-up.

The sender puts one bucket, tells all workers with their next update call, and puts the one after
next only when all have consumed it: two in flight, whatever the model's size. Ray is imported only
when a round runs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import (
    LoadWeights,
    SessionPlan,
    WeightTransferEngine,
    WeightTransferInitInfo,
)
from rayxfer.copying import is_memory
from rayxfer.engines.collective import (
    Layouts,
    TensorsUpdateInfo,
    deliver_alone,
    expect_end,
    merged_init_info,
    next_tensor,
)
from rayxfer.errors import BackendUnavailable, StateError, TransferError
from rayxfer.packing import unpack, write_piece

__all__ = ["ObjectStoreEngine", "ObjectStoreInitInfo"]

_IN_FLIGHT = 2
_SLICE_S = 0.2


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """`bucket_size_bytes`: the sender's wire unit. Nothing else is needed."""

    bucket_size_bytes: int


class _Inbox:
    """Payloads of one round, put in order; each remembers whether it was consumed."""

    def __init__(self) -> None:
        self.arrived: queue.Queue[tuple[Any, threading.Event]] = queue.Queue()
        self._waiting: dict[int, tuple[Any, threading.Event]] = {}
        self._next = 0
        self._lock = threading.Lock()

    def add(self, sequence: int, payload: Any) -> threading.Event:
        consumed = threading.Event()
        with self._lock:
            self._waiting[sequence] = (payload, consumed)
            while self._next in self._waiting:
                self.arrived.put(self._waiting.pop(self._next))
                self._next += 1
        return consumed


class ObjectStoreEngine(WeightTransferEngine[ObjectStoreInitInfo, TensorsUpdateInfo]):
    """Buckets as objects. See the module's text."""

    init_info_cls = ObjectStoreInitInfo
    update_info_cls = TensorsUpdateInfo
    copies_before_next = True
    uses_push = True
    default_bucket_size_bytes = 32 << 20

    _info: ObjectStoreInitInfo | None = None
    _layouts: Layouts

    def __init__(self, config: Any = None, parallel_config: Any = None) -> None:
        super().__init__(config, parallel_config)
        self._inbox = _Inbox()
        self._aborted = threading.Event()

    @classmethod
    def check_available(cls) -> None:
        try:
            import ray
        except ImportError as error:
            raise BackendUnavailable(
                "object_store needs Ray: pip install ray", cause=error
            ) from error
        if not ray.is_initialized():
            raise BackendUnavailable("object_store needs a running Ray: call ray.init() first")

    def init_transfer_engine(self, init_info: ObjectStoreInitInfo) -> None:
        """Raises BackendUnavailable without a running Ray."""
        self.check_available()
        self._info = init_info
        self._layouts = Layouts(init_info.bucket_size_bytes)

    def on_push(self, sequence: int, payload: Any) -> threading.Event:
        return self._inbox.add(sequence, payload)

    def receive_weights(self, update_info: TensorsUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive one round. Raises TransferError when an object is lost or the round is aborted."""
        if self._info is None:
            raise StateError("object_store: receive_weights before init_transfer_engine")
        inbox = self._inbox
        layout = self._layouts.get(update_info)
        for bucket in layout.plan.buckets:
            payload, consumed = self._next(inbox)
            array = self._get(payload[0])
            buffer = None
            if bucket.num_bytes:
                buffer = _readonly_tensor(array)
            if getattr(load_weights, "copies_only", False) or buffer is None:
                deliver_alone(layout, bucket, buffer, load_weights, landed=False)
            else:
                views = unpack(bucket, layout.metadata, buffer)
                load_weights([(name, view.clone()) for name, view in views])
                del views
            del payload, array, buffer
            consumed.set()
        self._inbox = _Inbox()

    def _next(self, inbox: _Inbox) -> tuple[Any, threading.Event]:
        while not self._aborted.is_set():
            try:
                return inbox.arrived.get(timeout=_SLICE_S)
            except queue.Empty:
                continue
        raise TransferError("the object_store channel was aborted", phase="update")

    def _get(self, ref: Any) -> Any:
        import ray

        while not self._aborted.is_set():
            try:
                return ray.get(ref, timeout=_SLICE_S)
            except ray.exceptions.GetTimeoutError:
                continue
        raise TransferError("the object_store channel was aborted", phase="update")

    def abort(self) -> None:
        self._aborted.set()

    def shutdown(self) -> None:
        """Drop every reference. Safe to call twice."""
        self._aborted.set()
        self._inbox = _Inbox()

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Put one round bucket by bucket; at most two are in flight."""
        import numpy
        import ray

        layouts: Layouts = trainer_args["channel"]
        push = trainer_args["push"]
        layout = layouts.get(trainer_args["update_info"])
        metadata, buckets = layout.metadata, layout.plan.buckets
        take = getattr(iterator, "take", None)
        for bucket in buckets:
            # ray.put copies, so one scratch buffer would do; but a fresh one is not zeroed and lets
            # the put of this bucket overlap nothing of the next.
            array = numpy.empty(bucket.num_bytes, dtype=numpy.uint8)
            scratch = torch.from_numpy(array)
            for piece in bucket.pieces:
                tensor = next_tensor(iterator, metadata[piece.tensor])
                if take is not None and piece.num_bytes and is_memory(tensor):
                    take(array.ctypes.data + piece.offset_bytes, tensor.data_ptr(), tensor.nbytes)
                else:
                    write_piece(piece, tensor, scratch)
            last = bucket.index == len(buckets) - 1
            if last:
                expect_end(iterator)
            push.wait(bucket.index - _IN_FLIGHT)
            push.send(bucket.index, [ray.put(array)], last=last)
        if not buckets:
            expect_end(iterator)
        push.wait(len(buckets) - 1)

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[Layouts, list[dict[str, Any]]]:
        cls.check_available()
        own = {"bucket_size_bytes": plan.bucket_size_bytes}
        info = merged_init_info(own, plan.config.init_info)
        return Layouts(plan.bucket_size_bytes), [dict(info) for _ in plan.workers]


def _readonly_tensor(array: Any) -> torch.Tensor:
    """A tensor over a read-only numpy array, without torch's warning. It must not be written to."""
    import ctypes

    size = array.nbytes
    address = array.ctypes.data
    # from_address shares the memory; the array is kept alive by the caller's frame
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
