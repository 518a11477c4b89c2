"""Who is where: the facts that decide which engine reaches a worker, and why.

Pure apart from `local_facts`, which reads this process's own surroundings. What NVML knows of GPUs
is in `gpus.py`.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Collection, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from rayxfer.errors import ConfigError
from rayxfer.gpus import uuid_of

if TYPE_CHECKING:
    import torch

__all__ = ["Choice", "Facts", "bucket_size", "choose_backend", "local_facts"]

NCCL_SETTINGS = (
    "NCCL_CUMEM_ENABLE",
    "NCCL_NET",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
)

PROTOCOL_VERSION = 1
"""Sender and worker must speak the same; compared at connect."""


@dataclass(frozen=True)
class Facts:
    """Where one process lives. Plain data; travels in control messages.

    Attributes:
        protocol: `PROTOCOL_VERSION` of that process.
        boot_id: the kernel's boot id: equal on one machine, also across containers.
        hostname: as the kernel says it.
        address: an address under which other nodes reach this one.
        pid: in the process's own PID namespace.
        uid: user id.
        device: "cpu", or "cuda:<GPU UUID>" where the weights live.
        num_ranks: transport ranks behind this worker (1 for a plain one).
        torch_version: bare torch version.
        nccl_settings: the environment variables that both ends of an NCCL channel must share.
        pid_namespace, started: with boot_id and pid, what tells this process from any other.
        free_bytes: device memory that was free when the facts were taken; 0: no GPU, or not known.
    """

    protocol: int
    boot_id: str
    hostname: str
    address: str
    pid: int
    uid: int
    device: str = "cpu"
    num_ranks: int = 1
    torch_version: str = ""
    pid_namespace: str = ""
    started: str = ""
    nccl_settings: tuple[tuple[str, str], ...] = ()
    free_bytes: int = 0

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Facts:
        """The reverse of `to_wire`. Fields that a later version may add are dropped.

        Raises:
            ConfigError: a field that has no default is missing.
        """
        names = {f.name for f in fields(cls)}
        known = {k: v for k, v in wire.items() if k in names}
        for field in fields(cls):
            if field.name not in known and field.default is MISSING:
                raise ConfigError(
                    f"the worker's facts lack {field.name!r}: install the same rayxfer on both sides"
                )
        pairs = known.get("nccl_settings", ())  # lists, where it travelled as JSON
        return cls(**{**known, "nccl_settings": tuple((key, value) for key, value in pairs)})


@dataclass(frozen=True)
class Choice:
    """A backend for one worker, with the reason, so that a report can say it."""

    backend: str
    reason: str


@functools.cache
def _boot_id() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"host-{socket.gethostname()}"


def routable_address() -> str:
    """An IP address of this node that other nodes can reach.

    Ray's choice where this process is connected to Ray; else the source address of the default
    route; else loopback. Never looks up the hostname, which may resolve to 127.0.1.1.
    """
    ray = sys.modules.get("ray")
    if ray is not None and getattr(ray, "is_initialized", lambda: False)():
        return str(ray.util.get_node_ip_address())
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # no packet leaves: UDP connect only picks a route
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"


def device_name(device: torch.device) -> str:
    """ "cpu", or "cuda:<UUID>": the UUID is the same under every CUDA_VISIBLE_DEVICES."""
    if device.type != "cuda":
        return device.type
    import torch

    return f"cuda:{torch.cuda.get_device_properties(device).uuid}"


def local_facts(device: torch.device | None = None, *, num_ranks: int = 1) -> Facts:
    """The facts about this process; `device` is where its weights live (default CPU)."""
    import torch  # here, since the controller actor reads others' facts and does without torch

    return Facts(
        protocol=PROTOCOL_VERSION,
        boot_id=_boot_id(),
        hostname=socket.gethostname(),
        address=routable_address(),
        pid=os.getpid(),
        uid=os.getuid(),
        device="cpu" if device is None else device_name(device),
        num_ranks=num_ranks,
        torch_version=str(torch.__version__).split("+")[0],
        pid_namespace=_read_link("/proc/self/ns/pid"),
        started=start_time(os.getpid()),
        nccl_settings=tuple((k, os.environ[k]) for k in NCCL_SETTINGS if k in os.environ),
        free_bytes=0 if device is None else free_memory(device),
    )


def free_memory(device: torch.device) -> int:
    """Free bytes of a GPU, as CUDA tells them (NVML may not, of a MIG instance); 0 for others."""
    if device.type != "cuda":
        return 0
    import torch

    try:
        return int(torch.cuda.mem_get_info(device)[0])
    except RuntimeError:  # a GPU that is out of order is found by those who use it
        return 0


def process_gone(process: Facts | None) -> bool:
    """True only if that process certainly is no more: it ran here, and cannot be found.

    Ray says so as well, but for a restartable actor only after about two seconds.
    """
    if process is None or process.boot_id != _boot_id() or not process.started:
        return False
    namespace = _read_link("/proc/self/ns/pid")
    if not namespace or process.pid_namespace != namespace or process.uid != os.getuid():
        return False  # not to be seen from here, or maybe hidden: /proc can hide other users'
    try:
        return start_time(process.pid) != process.started
    except OSError:  # out of descriptors, say: that is about us, not about it
        return False


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def start_time(pid: int) -> str:
    """The kernel's start time of a process; "" if there is none, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            rest = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if rest[0] in "ZX" else rest[19]


def same_host(a: Facts, b: Facts) -> bool:
    """One machine (one kernel): memory files can be shared, if /proc lets the one open the other's."""
    return a.boot_id == b.boot_id and a.hostname == b.hostname and a.uid == b.uid


def choose_backend(
    sender: Facts,
    worker: Facts,
    *,
    shm_refused: str | None = None,
    ipc_refused: str | None = None,
    taken: Collection[str] = (),
) -> Choice:
    """The rule behind `backend="auto"`, for one worker.

    Same GPU → ipc; same host on CPU → shm (unless opening the memory file was tried and refused:
    PID namespaces differ); both on GPUs → nccl; else gloo. ipc that was tried and refused, and workers
    that share a GPU NCCL has already (`taken`: it takes each once), are served by gloo.
    """
    here, there = uuid_of(sender.device), uuid_of(worker.device)
    if here and here == there:
        if worker.num_ranks > 1:
            return Choice(
                "gloo", f"a worker of {worker.num_ranks} ranks, the sender's GPU among them"
            )
        if ipc_refused is None:
            return Choice("ipc", f"same GPU as the sender ({worker.device})")
        return Choice("gloo", f"same GPU, but memory handles were refused: {ipc_refused}")
    if here and there:
        if there in taken:
            return Choice(
                "gloo", f"another worker is on {worker.device}, and NCCL takes a GPU once"
            )
        return Choice("nccl", f"sender on {sender.device}, worker on {worker.device}")
    if same_host(sender, worker) and worker.device == "cpu":
        if shm_refused is None:
            return Choice("shm", f"same host as the sender ({worker.hostname}), weights on the CPU")
        return Choice("gloo", f"same host, but shared memory was refused: {shm_refused}")
    return Choice("gloo", f"sender on host {sender.hostname}, worker on {worker.hostname}")


_FREE_SHARE = 16
_LEAST_BUCKET_BYTES = 1 << 20


def bucket_size(default_bytes: int, members: Sequence[Facts]) -> int:
    """The wire unit when the user sets none: the engine's own, but at most a sixteenth of the least
    device memory that any member (sender or worker) has free, and never below 1 MiB.

    A channel keeps two buckets on either side, so they take an eighth of what is free where it is
    tightest. Members without a GPU have no say. Free memory is as of when the facts were taken.
    """
    free = [one.free_bytes for one in members if one.free_bytes > 0]
    if not free:
        return default_bytes
    return min(default_bytes, max(_LEAST_BUCKET_BYTES, min(free) // _FREE_SHARE))


def check_protocol(sender: Facts, worker: Facts, rank: int) -> None:
    """Both sides must speak one protocol version.

    Raises:
        ConfigError: naming both values.
    """
    if sender.protocol != worker.protocol:
        raise ConfigError(
            f"worker {rank} speaks rayxfer protocol {worker.protocol}, this sender {sender.protocol}: "
            "install the same rayxfer on both"
        )


def check_agreement(sender: Facts, worker: Facts, rank: int, backend: str) -> None:
    """What sender and worker must have in common before they are connected.

    Raises:
        ConfigError: the protocol differs, or for nccl a setting that both ends must share; naming
            both values.
    """
    check_protocol(sender, worker, rank)
    if backend != "nccl" and not (backend == "auto" and worker.device.startswith("cuda")):
        return
    here, there = dict(sender.nccl_settings), dict(worker.nccl_settings)
    for key in sorted(here.keys() | there.keys()):
        if here.get(key) != there.get(key):
            raise ConfigError(
                f"{key} is {there.get(key, 'unset')!r} on worker {rank} and {here.get(key, 'unset')!r} "
                "on the sender: NCCL needs the same on both"
            )


def transport_rank(rank_offset: int, data_parallel_index: int, world_size: int, rank: int) -> int:
    """Where one worker of a vLLM deployment stands among the receivers of a channel.

    Args:
        rank_offset: of the deployment's first worker; see `rank_offsets`.
        data_parallel_index: its replica, from 0.
        world_size: workers of one replica: tensor times pipeline parallel size.
        rank: within its replica, as vLLM counts: pipeline stage times tensor parallel size, plus the
            place in its tensor parallel group.

    Raises:
        ConfigError: a negative place, or a rank that the replica does not have.
    """
    if min(rank_offset, data_parallel_index) < 0 or not 0 <= rank < world_size:
        raise ConfigError(
            f"rank {rank} of {world_size} in replica {data_parallel_index} at offset {rank_offset}: no "
            "such place"
        )
    return rank_offset + data_parallel_index * world_size + rank


def rank_offsets(num_ranks: list[int]) -> list[int]:
    """First transport rank of each worker: prefix sums, so ranks are exactly 0 … N-1."""
    offsets, total = [], 0
    for count in num_ranks:
        if count < 1:
            raise ConfigError(f"num_ranks={count}: a worker has at least one transport rank")
        offsets.append(total)
        total += count
    return offsets
