"""`ipc`: workers on the sender's own GPU read its memory themselves.

Two forms, chosen per bucket. *Direct*: the worker opens the memory in which the trainer's own tensors
lie (exported once, for as long as it lives) and copies each byte once, from there into its
parameters. *Staged*, for sources that make tensors on the fly, or memory that cannot be exported: two
buffers, exported once per session, into which the sender packs.

What is said goes through the ring of `shm` (see `handles.py`): a frame is published when a bucket is
ready, and released when the worker's copies of it are done, so the ring's two slots are what keeps
buffers and source tensors until every worker has acknowledged. Readiness is an event between the
processes where the system has those. GPUs are matched by UUID, never by index.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rayxfer.base import LoadWeights, SessionPlan, WeightTransferEngine, WeightTransferInitInfo
from rayxfer.daemons import daemon
from rayxfer.engines.collective import (
    Layouts,
    TensorsUpdateInfo,
    merged_init_info,
)
from rayxfer.engines.device import (
    Device,
    Mark,
    Ready,
    check_cuda,
    expandable_segments,
    wait_mark,
)
from rayxfer.engines.handles import FRAME_BYTES, Exports, Frame, Imports
from rayxfer.engines.ipc_round import SLOTS, Channel, Reader, Writer, free_staging
from rayxfer.engines.ring import RingReader, RingWriter
from rayxfer.errors import BackendUnavailable, ConfigError, StateError, TransferError
from rayxfer.gpus import uuid_of
from rayxfer.packing import Layout
from rayxfer.topology import Facts, same_host, start_time

__all__ = ["IPCEngine", "IPCInitInfo"]

logger = logging.getLogger(__name__)

_STUCK_S = 5.0
_FORMS = ("auto", "direct", "staged")


@dataclass
class IPCInitInfo(WeightTransferInitInfo):
    """Where the sender's ring is, and how it shares memory.

    Attributes:
        device: UUID of the GPU.
        pid, fd, inode, file_bytes, nonce: the ring; see `ShmInitInfo`.
        bucket_size_bytes: the sender's wire unit, and the size of each staging buffer.
        events: handles of the sender's two events, in hex; empty where events cannot be shared.
        form: "auto", "direct" (refuse what cannot be) or "staged". A setting of the user's.
        keep_open: False: workers close the trainer's memory at the end of each round, so that a
            trainer that frees it in between (offloading, say) really does. A setting of the user's.
    """

    device: str
    pid: int
    fd: int
    inode: int
    file_bytes: int
    nonce: str
    bucket_size_bytes: int
    events: list[str]
    form: str = "auto"
    keep_open: bool = True


class IPCEngine(WeightTransferEngine[IPCInitInfo, TensorsUpdateInfo]):
    """CUDA IPC. See the module's text."""

    init_info_cls = IPCInitInfo
    update_info_cls = TensorsUpdateInfo
    copies_before_next = True
    default_bucket_size_bytes = 256 << 20

    _ring: RingReader | None = None
    _info: IPCInitInfo
    _layouts: Layouts
    _device: Device
    _imports: Imports
    _events: list[Ready]
    _sender: tuple[int, str]

    _looks_every_s = 1.0

    def __init__(self, config: Any = None, parallel_config: Any = None) -> None:
        super().__init__(config, parallel_config)
        self._aborted = threading.Event()
        self._layout: Layout | None = None
        self._using = threading.Lock()
        self._left = threading.Event()

    # ---- the device's calls: a double replaces these -------------------------------------------

    @classmethod
    def check_available(cls) -> None:
        check_cuda("ipc")

    @classmethod
    def _device_of(cls, uuid: str) -> Device:
        from rayxfer.engines.cuda import cuda_device

        return cuda_device(uuid)

    @classmethod
    def _uuid_of(cls, facts: Facts) -> str:
        return uuid_of(facts.device)

    @classmethod
    def _bad_setting(cls) -> str | None:
        return expandable_segments()

    # ---- the worker ----------------------------------------------------------------------------

    def init_transfer_engine(self, init_info: IPCInitInfo) -> None:
        """Open the sender's ring and events.

        Raises:
            BackendUnavailable: no CUDA here, or the sender's ring or events cannot be opened.
            ConfigError: the GPU is not visible here, naming those that are.
        """
        self.check_available()
        self._info = init_info
        self._device = self._device_of(init_info.device)
        self._imports = Imports(self._device)
        self._layouts = Layouts(init_info.bucket_size_bytes)
        try:
            self._events = [self._device.open_ready(bytes.fromhex(one)) for one in init_info.events]
            self._ring = RingReader.of(init_info, self.parallel_config.rank)
        except (TransferError, BackendUnavailable) as error:  # now, so that "auto" goes another way
            raise BackendUnavailable(
                f"backend 'ipc' does not work between these processes: {error.message}", cause=error
            ) from error
        self._sender = (init_info.pid, start_time(init_info.pid))
        threading.Thread(target=self._watch, name="rayxfer-ipc-watch", daemon=True).start()

    def _watch(self) -> None:
        """A dead trainer's memory stays taken as long as anybody has it open: let go of it then."""
        while not self._left.wait(self._looks_every_s):
            if not self._sender_lives():
                with self._using:
                    self._close_handles()
                return

    def _sender_lives(self) -> bool:
        pid, started = self._sender
        try:
            return start_time(pid) == started
        except OSError:  # out of descriptors, say: that is about us, not about it
            return True

    def _close_handles(self) -> None:
        with self._device.use():
            self._device.settle()  # copies of a round that was broken off
        self._imports.close_all()

    def receive_weights(self, update_info: TensorsUpdateInfo, load_weights: LoadWeights) -> None:
        """Receive one round; returns when every copy on the device is done.

        Raises:
            TransferError: the round was aborted, or memory could not be opened. What was handed to
                `load_weights` until then stays with the loader.
        """
        ring = self._ring
        if ring is None:
            self.check_available()
            raise StateError("ipc: receive_weights before init_transfer_engine")
        layout = self._layouts.get(update_info)
        if layout is not self._layout:
            self._imports.forget_views()
            self._layout = layout
        size = self._info.bucket_size_bytes
        reader = Reader(self._device, self._imports, self._events, layout, load_weights, size)
        with self._using, self._device.use():
            try:
                self._receive(ring, reader)
                if not self._info.keep_open:
                    self._imports.close_all()
            finally:
                if self._left.is_set():  # shut down meanwhile, without waiting for a stuck loader
                    self._close_handles()

    def _receive(self, ring: RingReader, reader: Reader) -> None:
        running: deque[Mark] = deque()
        self._device.settle()  # whatever stream of this process still reads the old weights
        while running or not reader.complete:
            more = not reader.complete and len(running) < SLOTS
            if more and (not running or ring.published(len(running))):
                slot = ring.slot(len(running))
                reader.take(Frame.decode(slot.numpy().data))
                running.append(self._device.mark())
            else:
                wait_mark(running[0], self._aborted, "ipc")
                running.popleft()
                ring.release()

    def abort(self) -> None:
        self._aborted.set()
        if self._ring is not None:
            self._ring.abort()

    def shutdown(self) -> None:
        """Close every handle and leave the ring. Safe to call twice.

        Under a loader that never returns, handles stay open until it does, or the process ends.
        """
        ring, self._ring = self._ring, None
        if ring is None:
            return
        self._left.set()
        self.abort()
        ring.abort()
        if self._using.acquire(timeout=_STUCK_S):
            try:
                self._close_handles()
            finally:
                self._using.release()
                ring.leave()

    # ---- the sender ----------------------------------------------------------------------------

    @staticmethod
    def trainer_send_weights(
        iterator: Iterator[tuple[str, torch.Tensor]], trainer_args: dict[str, Any]
    ) -> None:
        """Offer one round; returns once every worker has copied all of it.

        `trainer_args["stable"]`: whether yielded tensors keep memory and values until then; without it
        everything is staged.
        """
        channel: Channel | None = trainer_args.get("channel")
        if channel is None:
            raise StateError("ipc: trainer_send_weights before the channel was opened")
        layout = channel.layouts.get(trainer_args["update_info"])
        stable = bool(trainer_args.get("stable", False))
        if channel.form == "direct" and not stable:
            raise ConfigError(
                "ipc: form='direct' needs a source whose tensors stay (`stable`); this one makes "
                "them on the fly: leave the form at 'auto'"
            )
        with channel.device.use(), torch.no_grad():
            Writer(channel, iterator, layout, direct=stable and channel.form != "staged").run()

    @classmethod
    def trainer_open(cls, plan: SessionPlan) -> tuple[Channel, list[dict[str, Any]]]:
        """Raises BackendUnavailable or ConfigError for a fleet or a setting that cannot work."""
        cls.check_available()
        uuid = cls._common_gpu(plan)
        form, keep_open = cls._settings(plan)
        device = cls._device_of(uuid)
        ring = RingWriter(
            slot_bytes=FRAME_BYTES, slots=SLOTS, readers=len(plan.workers), nonce=plan.token
        )
        try:
            with device.use():
                events = [device.ready() for _ in range(SLOTS)]
            shared = all(event.handle for event in events)
            own = {
                "device": uuid,
                **ring.describe(),
                "bucket_size_bytes": plan.bucket_size_bytes,
                "events": [event.handle.hex() for event in events] if shared else [],
            }
            info = merged_init_info(own, plan.config.init_info)
        except BaseException:
            ring.close()
            raise
        exports = Exports(device, keep_open=keep_open)
        layouts = Layouts(plan.bucket_size_bytes)
        channel = Channel(plan, device, ring, events, exports, form, layouts)
        return channel, [dict(info) for _ in plan.workers]

    @classmethod
    def _common_gpu(cls, plan: SessionPlan) -> str:
        uuids = [cls._uuid_of(worker) for worker in plan.workers]
        for rank, (worker, uuid) in enumerate(zip(plan.workers, uuids, strict=True)):
            if not uuid:
                raise ConfigError(
                    f"backend 'ipc': receiver {rank} has its weights on {worker.device!r}, not on a GPU"
                )
            if worker.num_ranks > 1:
                raise ConfigError(
                    f"backend 'ipc': receiver {rank} belongs to a worker of {worker.num_ranks} ranks, "
                    "each on a GPU of its own; one session reaches one GPU"
                )
            if not same_host(plan.sender, worker):
                raise BackendUnavailable(
                    f"backend 'ipc': receiver {rank} is on {worker.hostname}, the sender on "
                    f"{plan.sender.hostname} (or of another user)"
                )
            if uuid != uuids[0]:
                raise ConfigError(
                    f"backend 'ipc': receivers 0 and {rank} are on two GPUs ({uuids[0]}, {uuid}), and a "
                    "session reaches one: use 'auto', or one trainer rank per GPU"
                )
        return uuids[0]

    @classmethod
    def _settings(cls, plan: SessionPlan) -> tuple[str, bool]:
        form = plan.config.init_info.get("form", "auto")
        keep_open = plan.config.init_info.get("keep_open", True)
        if form not in _FORMS or not isinstance(keep_open, bool):
            raise ConfigError(
                f"ipc: form={form!r}, keep_open={keep_open!r}: expected one of {', '.join(_FORMS)}, "
                "and a bool"
            )
        setting = cls._bad_setting()
        if setting is not None and form != "staged":
            text = f"ipc: {setting} in the trainer's environment makes memory that CUDA IPC cannot share"
            if form == "direct":
                raise ConfigError(f"{text}: unset it, or set init_info={{'form': 'staged'}}")
            logger.warning("%s, so tensors in it are staged: one copy more per byte", text)
        return form, keep_open

    @classmethod
    def trainer_abort(cls, channel: Channel) -> None:
        channel.ring.abort()

    @classmethod
    def trainer_close(cls, channel: Channel) -> None:
        if channel.closed:
            return
        channel.closed = True
        channel.ring.close()
        if channel.staging:
            daemon(lambda: free_staging(channel), "rayxfer-ipc-close")
        channel.held = []
