"""GPUs by UUID: what a mask shows, what NVML says, and how large a bucket may be."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rayxfer.gpus import Gpu, canonical_uuid, gpus, link_between, uuid_of, visible_uuids
from rayxfer.topology import Facts, bucket_size, choose_backend

A, B, C = "8932f937-d72c-4106-c12f-20bd9faed9f6", "89aa0000-1111-2222-3333-444455556666", "cc"
MIG_1, MIG_2 = "c7384736-a75d-5afc-978f-d2f1294409fd", "d0000000-a75d-5afc-978f-d2f1294409fd"


def gpu(uuid: str, index: int, mig_of: str = "") -> Gpu:
    return Gpu(uuid, "X", index, 80 << 30, 70 << 30, "", mig_of)


BOX = [gpu(A, 0), gpu(B, 1), gpu(C, 2)]
SPLIT = [gpu(A, 0), gpu(MIG_1, 0, A), gpu(MIG_2, 0, A), gpu(B, 1)]

MASKS: dict[str, tuple[list[Gpu], dict[str, str], list[str]]] = {
    "unset": (BOX, {}, [A, B, C]),
    "noset of Ray": (BOX, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, [A, B, C]),
    "one index, as Ray sets": (BOX, {"CUDA_VISIBLE_DEVICES": "2"}, [C]),
    "indices in their own order": (BOX, {"CUDA_VISIBLE_DEVICES": "2,0"}, [C, A]),
    "spaces": (BOX, {"CUDA_VISIBLE_DEVICES": " 1 , 2 "}, [B, C]),
    "uuids": (BOX, {"CUDA_VISIBLE_DEVICES": f"GPU-{B},GPU-{A}"}, [B, A]),
    "beginnings of uuids": (BOX, {"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-cc"}, [A, C]),
    "an ambiguous beginning ends the list": (BOX, {"CUDA_VISIBLE_DEVICES": "2,GPU-89,0"}, [C]),
    "mixed": (BOX, {"CUDA_VISIBLE_DEVICES": f"1,GPU-{A}"}, [B, A]),
    "empty": (BOX, {"CUDA_VISIBLE_DEVICES": ""}, []),
    "-1 ends the list": (BOX, {"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [A]),
    "no such index ends the list": (BOX, {"CUDA_VISIBLE_DEVICES": "1,7,0"}, [B]),
    "a word": (BOX, {"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
    "twice": (BOX, {"CUDA_VISIBLE_DEVICES": "0,0"}, []),
    "twice, in two spellings": (BOX, {"CUDA_VISIBLE_DEVICES": f"0,GPU-{A}"}, []),
    "MIG, unset": (SPLIT, {}, [MIG_1, B]),
    "MIG by name": (SPLIT, {"CUDA_VISIBLE_DEVICES": f"MIG-{MIG_2}"}, [MIG_2]),
    "MIG of no such name": (SPLIT, {"CUDA_VISIBLE_DEVICES": "MIG-ffff"}, []),
    "MIG by the index of its GPU": (SPLIT, {"CUDA_VISIBLE_DEVICES": "0"}, [MIG_1]),
    "no GPU at all": ([], {}, []),
    "no GPU, but a mask": ([], {"CUDA_VISIBLE_DEVICES": "0"}, []),
}


@pytest.mark.parametrize(("present", "environ", "seen"), MASKS.values(), ids=MASKS)
def test_what_a_mask_shows(present: list[Gpu], environ: dict[str, str], seen: list[str]) -> None:
    assert visible_uuids(environ, present) == seen


def test_every_spelling_of_a_uuid_is_one() -> None:
    for text in (A, f"GPU-{A}", f" gpu-{A.upper()} "):
        assert canonical_uuid(text) == A
    assert canonical_uuid(f"MIG-{MIG_1}") == MIG_1
    assert uuid_of(f"cuda:GPU-{A}") == uuid_of(f"cuda:{A}") == A
    assert uuid_of("cpu") == uuid_of("meta") == uuid_of("") == ""


# --- NVML -----------------------------------------------------------------------------------


class NVMLError(Exception):
    pass


class Nvml:
    """What of pynvml we use, for two GPUs, the first in MIG mode."""

    NVMLError = NVMLError
    NVML_P2P_CAPS_INDEX_READ, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK = 0, 2, 0
    NVML_NVLINK_MAX_LINKS = 4

    def __init__(self, *, nvlink: bool = True, p2p: bool = True) -> None:
        self.nvlink, self.p2p = nvlink, p2p

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return [A, B][index]

    def nvmlDeviceGetUUID(self, handle: str) -> Any:
        return f"MIG-{handle}" if handle == MIG_1 else f"GPU-{handle}".encode()

    def nvmlDeviceGetName(self, handle: str) -> Any:
        return b"NVIDIA X"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=80 << 30, free=60 << 30)

    def nvmlDeviceGetPciInfo(self, handle: str) -> Any:
        if handle == MIG_1:
            raise NVMLError("not supported")
        return SimpleNamespace(busId=b"0000:01:00.0")

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        if handle == B:
            raise NVMLError("not supported")
        return 3

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, place: int) -> Any:
        if place != 1:
            raise NVMLError("not found")
        return MIG_1

    def nvmlDeviceGetP2PStatus(self, a: str, b: str, what: int) -> int:
        good = self.nvlink if what == self.NVML_P2P_CAPS_INDEX_NVLINK else self.p2p
        return 0 if good else 1

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link == 3:
            raise NVMLError("no such link")
        return int(link != 1)


def test_what_nvml_says() -> None:
    found = gpus(Nvml())
    assert [(g.uuid, g.index, g.mig_of) for g in found] == [(A, 0, ""), (MIG_1, 0, A), (B, 1, "")]
    assert {g.name for g in found} == {"NVIDIA X"}
    assert (found[0].total_bytes, found[0].free_bytes) == (80 << 30, 60 << 30)
    assert [g.pci for g in found] == ["0000:01:00.0", "", "0000:01:00.0"]


def test_how_gpus_reach_each_other() -> None:
    assert link_between(A, B, Nvml()) == "NVLink x2"
    assert link_between(A, B, Nvml(nvlink=False)) == "PCIe, peer to peer"
    assert link_between(A, B, Nvml(nvlink=False, p2p=False)) == "PCIe, through the host"
    assert link_between(A, "of-another-machine", Nvml()) == ""
    assert link_between(A, B, None) == link_between("", B, Nvml()) == ""


def test_without_a_driver_the_answer_is_quick_empty_and_quiet() -> None:
    code = (
        "from rayxfer.gpus import gpus, link_between; print(gpus(), repr(link_between('a', 'b')))"
    )
    start = time.monotonic()
    assert gpus(None) == []
    assert time.monotonic() - start < 0.1
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    if done.stdout == "[] ''\n":
        assert done.stderr == ""


# --- auto and buckets -----------------------------------------------------------------------

HERE = Facts(1, "boot", "node", "10.0.0.1", 1, 0, device=f"cuda:{A}")


def there(**changes: Any) -> Facts:
    return dataclasses.replace(HERE, **changes)


def test_auto_matches_gpus_by_uuid_however_it_is_spelt() -> None:
    assert choose_backend(HERE, there(device=f"cuda:GPU-{A}", pid=2)).backend == "ipc"
    assert choose_backend(HERE, there(device=f"cuda:{B}")).backend == "nccl"


def test_auto_leaves_to_gloo_what_the_others_cannot_reach() -> None:
    refused = choose_backend(HERE, there(), ipc_refused="another PID namespace")
    assert refused.backend == "gloo"
    assert "another PID namespace" in refused.reason
    assert choose_backend(HERE, there(num_ranks=2)).backend == "gloo"
    second = choose_backend(HERE, there(device=f"cuda:{B}"), taken={B})
    assert second.backend == "gloo"
    assert B in second.reason


def test_the_bucket_follows_the_least_free_memory() -> None:
    """At most a sixteenth of it, at least 1 MiB, never above the engine's own."""
    big, small = there(free_bytes=64 << 30), there(free_bytes=1 << 30)
    assert bucket_size(256 << 20, [big]) == 256 << 20
    assert bucket_size(256 << 20, [big, small]) == 64 << 20
    assert bucket_size(256 << 20, [there(free_bytes=1 << 20)]) == 1 << 20
    assert bucket_size(4 << 20, [there(), there(device="cpu")]) == 4 << 20
    assert bucket_size(100, [there(free_bytes=5)]) == 100
