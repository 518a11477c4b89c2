"""rayxfer inside vLLM: its worker processes take part in rounds, any rayxfer engine moves the bytes.

- `plugin`: registers backend "rayxfer" with vLLM (entry point `vllm.general_plugins`), and the one
  method that control messages arrive by.
- `engine`: vLLM's weight-transfer API of the installed version over any rayxfer engine; `compat` knows
  the versions.
- `session`: a worker's side of a round around vLLM's model; `reload` drives vLLM's layer-wise reload and
  leaves nothing behind when it fails; `dry_run` asks vLLM's own loaders about an offer without a byte.
- `relay`: from outside, one or several of those sessions, and vLLM's pause, resume and cache, as one
  worker. `wire` is how messages cross a process.
- `server`: `VLLMServer`, a separate `vllm serve` as a worker, over HTTP.

Source: vLLM 0.32 (`vllm.distributed.weight_transfer`, `vllm.model_executor.model_loader.reload`).
Nothing here imports vLLM before it is used, and nothing imports Ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayxfer.vllm.server import VLLMServer

__all__ = ["VLLMServer"]


def __getattr__(name: str) -> Any:
    if name == "VLLMServer":
        from rayxfer.vllm.server import VLLMServer

        return VLLMServer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
