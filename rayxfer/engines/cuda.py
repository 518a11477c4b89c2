"""What the CUDA engines share."""

from __future__ import annotations

from typing import NoReturn

import torch

from rayxfer.errors import BackendUnavailable

__all__ = ["require_cuda"]


def require_cuda(backend: str) -> NoReturn:
    """Raise `BackendUnavailable` with the reason that this process cannot run a CUDA engine."""
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) was built without CUDA"
    elif not torch.cuda.is_available():
        reason = "no CUDA device is visible to this process"
    else:
        reason = "this version of rayxfer does not move weights between GPUs yet; gloo carries them"
    raise BackendUnavailable(f"backend {backend!r} needs CUDA: {reason}")
