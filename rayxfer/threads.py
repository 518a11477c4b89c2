"""What a new thread has to take over from the one that starts it, where torch runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["gpu_of_this_thread"]


def gpu_of_this_thread() -> Callable[[], None]:
    """A function that gives another thread this one's current GPU and stream.

    Both are per thread, and a new one begins on GPU 0 and its default stream: on another GPU than the
    model, or not after what the caller has queued. Nothing happens where CUDA was not started.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return lambda: None
    device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

    def take_over() -> None:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(stream)

    return take_over
