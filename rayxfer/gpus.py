"""The GPUs of this machine, as NVML and the environment tell them; nothing here touches CUDA.

NVML sees every GPU whatever CUDA_VISIBLE_DEVICES hides, so its indices are not CUDA's: a GPU is
known by its UUID everywhere. Where there is no driver every question has a quick and empty answer.
The only module that imports pynvml, and only when asked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Gpu",
    "canonical_uuid",
    "gpus",
    "link_between",
    "uuid_of",
    "visible_uuids",
]


@dataclass(frozen=True)
class Gpu:
    """One GPU, or one MIG instance of one.

    Attributes:
        uuid: canonical (see `canonical_uuid`).
        name: as NVML says it.
        index: NVML's index, in the order of PCI buses; of a MIG instance its GPU's.
        total_bytes, free_bytes: device memory, now.
        pci: bus id.
        mig_of: of a MIG instance, its GPU's UUID; else "".
    """

    uuid: str
    name: str
    index: int
    total_bytes: int
    free_bytes: int
    pci: str = ""
    mig_of: str = ""


def canonical_uuid(text: str) -> str:
    """One spelling for all: torch says "8932f937-…", NVML "GPU-8932f937-…" or "MIG-…"."""
    lower = text.strip().lower()
    for prefix in ("gpu-", "mig-"):
        lower = lower.removeprefix(prefix)
    return lower


def uuid_of(device: str) -> str:
    """The UUID in a `Facts.device` ("cuda:<UUID>"), canonical; "" for any other device."""
    kind, _, uuid = device.partition(":")
    return canonical_uuid(uuid) if kind == "cuda" else ""


def visible_uuids(environ: Mapping[str, str], present: Sequence[Gpu]) -> list[str]:
    """The UUIDs that a process with this environment sees, in CUDA's order.

    Follows CUDA's own reading of CUDA_VISIBLE_DEVICES: unset shows every GPU (of one in MIG mode, its
    first instance); entries are indices, UUIDs or the unambiguous beginning of one, or MIG names; the
    list ends at the first entry that fits nothing; a GPU that is named twice voids all. Ray sets
    indices, or leaves the variable alone under RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES; both
    need no rule of their own. Indices are NVML's (CUDA_DEVICE_ORDER=PCI_BUS_ID): where GPUs of
    different speed are mixed and CUDA_DEVICE_ORDER is not set, CUDA's own indices may differ.
    """
    whole = sorted((gpu for gpu in present if not gpu.mig_of), key=lambda gpu: gpu.index)
    instances = [gpu for gpu in present if gpu.mig_of]
    mask = environ.get("CUDA_VISIBLE_DEVICES")
    if mask is None:
        return [_first_instance(gpu, instances) for gpu in whole]
    found: list[str] = []
    for entry in mask.split(","):
        uuid = _entry(entry.strip(), whole, instances)
        if uuid is None:
            break
        if uuid in found:
            return []
        found.append(uuid)
    return found


def _entry(entry: str, whole: Sequence[Gpu], instances: Sequence[Gpu]) -> str | None:
    if entry.isdecimal():
        index = int(entry)
        gpu = next((one for one in whole if one.index == index), None)
        return None if gpu is None else _first_instance(gpu, instances)
    kind = entry[:4].lower()
    if kind == "gpu-":
        fits = [gpu for gpu in whole if gpu.uuid.startswith(canonical_uuid(entry))]
        return _first_instance(fits[0], instances) if len(fits) == 1 else None
    if kind == "mig-":
        fits = [gpu for gpu in instances if gpu.uuid.startswith(canonical_uuid(entry))]
        return fits[0].uuid if len(fits) == 1 else None
    return None


def _first_instance(gpu: Gpu, instances: Sequence[Gpu]) -> str:
    """Of a GPU in MIG mode CUDA shows one instance only."""
    return next((one.uuid for one in instances if one.mig_of == gpu.uuid), gpu.uuid)


# ---- NVML -----------------------------------------------------------------------------------------


@functools.cache
def _nvml() -> Any:
    """pynvml, initialised; None where there is no driver. Asked for once."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver, no permission: no GPU for us
        return None
    return pynvml


def gpus(nvml: Any = ...) -> list[Gpu]:
    """Every GPU and MIG instance of the machine, masked or not; empty without a driver."""
    nvml = _nvml() if nvml is ... else nvml
    if nvml is None:
        return []
    found: list[Gpu] = []
    with contextlib.suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            whole = _gpu(nvml, handle, index, "")
            found.append(whole)
            found += [
                _gpu(nvml, instance, index, whole.uuid) for instance in _instances(nvml, handle)
            ]
    return found


def _gpu(nvml: Any, handle: Any, index: int, mig_of: str) -> Gpu:
    total = free = 0
    with contextlib.suppress(nvml.NVMLError):  # not told of every instance
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        total, free = int(memory.total), int(memory.free)
    pci = ""
    with contextlib.suppress(nvml.NVMLError):
        pci = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
    uuid = canonical_uuid(_text(nvml.nvmlDeviceGetUUID(handle)))
    return Gpu(uuid, _text(nvml.nvmlDeviceGetName(handle)), index, total, free, pci, mig_of)


def _instances(nvml: Any, handle: Any) -> Iterator[Any]:
    try:
        count = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return
    for place in range(count):
        with contextlib.suppress(nvml.NVMLError):  # a place that no instance has
            yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def link_between(a: str, b: str, nvml: Any = ...) -> str:
    """How two GPUs of this machine reach each other, in words: "NVLink x18", "PCIe, peer to peer",
    "PCIe, through the host"; "" where that is not known (another machine, no driver, MIG)."""
    nvml = _nvml() if nvml is ... else nvml
    if nvml is None or not a or not b:
        return ""
    handles: dict[str, Any] = {}
    with contextlib.suppress(nvml.NVMLError):
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            handles[canonical_uuid(_text(nvml.nvmlDeviceGetUUID(handle)))] = handle
    if a not in handles or b not in handles:
        return ""
    links = 0
    if _p2p(nvml, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_NVLINK):
        for link in range(nvml.NVML_NVLINK_MAX_LINKS):
            with contextlib.suppress(nvml.NVMLError):
                links += bool(nvml.nvmlDeviceGetNvLinkState(handles[a], link))
        return f"NVLink x{links}" if links else "NVLink"
    if _p2p(nvml, handles[a], handles[b], nvml.NVML_P2P_CAPS_INDEX_READ):
        return "PCIe, peer to peer"
    return "PCIe, through the host"


def _p2p(nvml: Any, a: Any, b: Any, what: int) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetP2PStatus(a, b, what) == nvml.NVML_P2P_STATUS_OK)
    except nvml.NVMLError:
        return False
