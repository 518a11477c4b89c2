"""Work that several threads share, and what a new thread has to take over from the one that starts it."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

__all__ = ["cores", "gpu_of_this_thread", "spread"]


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def spread(
    function: Callable[[Any], Any],
    todo: Sequence[Any],
    threads: int,
    pool: ThreadPoolExecutor | None = None,
) -> list[Any]:
    """`function` of each, by so many threads, of which this is one and the others are the pool's (None: of
    one that ends with this): whoever is done takes the next. Returns, or raises what the function raised,
    when none of them is at it any more."""
    left = deque(enumerate(todo))
    out: list[Any] = [None] * len(todo)

    def work() -> None:
        while True:
            try:
                index, one = left.popleft()
            except IndexError:
                return
            try:
                out[index] = function(one)
            except BaseException:
                left.clear()
                raise

    helpers = min(threads, len(todo)) - 1
    futures: list[Future[None]] = []
    with contextlib.ExitStack() as own:
        if helpers > 0:
            pool = pool or own.enter_context(
                ThreadPoolExecutor(helpers, thread_name_prefix="rayxfer-memory")
            )
            futures = [pool.submit(work) for _ in range(helpers)]
        try:
            work()
        finally:
            wait(futures)
    for future in futures:
        future.result(timeout=0)
    return out


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
