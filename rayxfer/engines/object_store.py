"""`object_store`: buckets through Ray's object store, to workers anywhere in the cluster, no set-up.

The sender puts one bucket, tells all workers with their next update call, and puts the one after
next only when all have consumed it: two in flight, whatever the model's size. Ray is imported only
when a round runs.

Ray's store frees what nobody refers to any more in batches, up to a second later (2.60; nothing that a
program can call makes it sooner), and until then the next bucket gets other memory. Of 256 MiB a
round's host held 1.2 to 2.7 times that; 0.4 to 0.5 with RAY_free_objects_batch_size=1 in the environment
of `ray start` (or of the process whose `ray.init` starts Ray).
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
from rayxfer.engines.collective import (
    Layouts,
    Staging,
    TensorsUpdateInfo,
    deliver_alone,
    expect_end,
    fill,
    land,
    merged_init_info,
    next_tensor,
)
from rayxfer.errors import BackendUnavailable, StateError, TransferError
from rayxfer.packing import Bucket, Layout, as_bytes, plain, unpack

__all__ = ["ObjectStoreEngine", "ObjectStoreInitInfo"]

_IN_FLIGHT = 2
_SLICE_S = 0.2


@dataclass
class ObjectStoreInitInfo(WeightTransferInitInfo):
    """`bucket_size_bytes`: the sender's wire unit. Nothing else is needed."""

    bucket_size_bytes: int


@dataclass
class _Channel:
    """The sender's end.

    Attributes:
        scratch: where a bucket of small tensors is put together.
    """

    layouts: Layouts
    scratch: Staging


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
            _hand_over(layout, bucket, buffer, load_weights)
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
        channel: _Channel = trainer_args["channel"]
        push = trainer_args["push"]
        layout = channel.layouts.get(trainer_args["update_info"])
        buckets = layout.plan.buckets
        for bucket in buckets:
            if bucket.alone:
                push.wait(bucket.index - _IN_FLIGHT)
                ref = _put_alone(layout, bucket, iterator)
            else:
                # ray.put copies, so one buffer serves all, and is free again when it returns
                scratch = channel.scratch.get(0, layout.shared_bytes)[: bucket.num_bytes]
                fill(layout, bucket, iterator, scratch)
                push.wait(bucket.index - _IN_FLIGHT)
                ref = _put(scratch)
            last = bucket.index == len(buckets) - 1
            if last:
                expect_end(iterator)
            push.send(bucket.index, [ref], last=last)
            del ref
        if not buckets:
            expect_end(iterator)
        push.wait(len(buckets) - 1)

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[_Channel, list[dict[str, Any]]]:
        cls.check_available()
        own = {"bucket_size_bytes": plan.bucket_size_bytes}
        info = merged_init_info(own, plan.config.init_info)
        channel = _Channel(Layouts(plan.bucket_size_bytes), Staging(torch.device("cpu"), 1))
        return channel, [dict(info) for _ in plan.workers]

    @classmethod
    def trainer_close(cls, channel: _Channel) -> None:
        channel.layouts.clear()
        channel.scratch = Staging(torch.device("cpu"), 1)


def _hand_over(
    layout: Layout, bucket: Bucket, buffer: torch.Tensor | None, load_weights: LoadWeights
) -> None:
    """A bucket in memory that must not be written to and is soon gone: nothing of it is kept."""
    offsets = layout.packed[bucket.index].offsets
    if buffer is not None and land(layout, bucket, buffer.data_ptr(), offsets, load_weights):
        return
    if buffer is None or getattr(load_weights, "copies_only", False):
        deliver_alone(layout, bucket, buffer, load_weights, landed=False)
        return
    views = unpack(bucket, layout.metadata, buffer)
    load_weights([(name, view.clone()) for name, view in views])


def _put(flat: torch.Tensor) -> Any:
    """A reference to a copy of these bytes (flat uint8, on the CPU)."""
    import ray

    return ray.put(flat.numpy())


def _put_alone(layout: Layout, bucket: Bucket, iterator: Iterator[tuple[str, torch.Tensor]]) -> Any:
    """A tensor larger than a bucket is put from where it lies, before the next one is asked for."""
    ref = None
    for piece in bucket.pieces:
        tensor = next_tensor(iterator, layout.metadata[piece.tensor])
        if piece.num_bytes:
            ref = _put(as_bytes(plain(tensor)).cpu())
    return ref


def _readonly_tensor(array: Any) -> torch.Tensor:
    """A tensor over a read-only numpy array, without torch's warning. It must not be written to."""
    import ctypes

    size = array.nbytes
    address = array.ctypes.data
    # from_address shares the memory; the array is kept alive by the caller's frame
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
