"""vLLM's layer-wise reload, driven so that a failed one leaves nothing behind.

vLLM (0.32) moves every layer to the meta device, collects what arrives for it, and once a layer is
complete builds it, repacks it and copies it into the live tensors. Its state is global, per layer, and
survives an update that failed half-way: the next one then takes up layers that are half collected, or wraps
loaders that are wrapped already. So: `reset` puts every layer back, before each start and after each failure.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

__all__ = ["Reload"]


class Reload:
    """The reload of one model. Calls may come from any one thread at a time.

    Args:
        model: vLLM's model, loaded by vLLM.
        model_config, vllm_config: vLLM's.
        device: where the model is.
    """

    def __init__(
        self, model: torch.nn.Module, model_config: Any, vllm_config: Any, device: torch.device
    ) -> None:
        self.model = model
        self._model_config, self._vllm_config = model_config, vllm_config
        self._device = device
        self.active = False

    def start(self) -> None:
        """Make ready for a pass over the weights, whatever the last one left."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.reset()
        self.active = True
        with self.context():
            initialize_layerwise_reload(self.model)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> set[str] | None:
        """Hand over some tensors, which vLLM may keep until their layer is complete."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check

        with self.context(), disable_mtp_completeness_check():
            returned = self.model.load_weights(iter(weights))  # type: ignore[operator]
        return None if returned is None else {str(name) for name in returned}

    def finish(self) -> None:
        """All weights were handed over: process what is left, wait for the device."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with self.context():
            finalize_layerwise_reload(self.model, self._model_config)
            if self._device.type != "cpu":
                torch.accelerator.synchronize()
        self.active = False

    def reset(self) -> None:
        """Back to kernel tensors and vLLM's own loaders, wherever a reload had got to.

        Layers that were not complete hold their old weights again (biases excepted: vLLM writes them
        as they arrive); complete ones hold the new.
        """
        from vllm.model_executor.model_loader.reload import layerwise

        if hasattr(self.model, "_original_do_torchao_reload"):
            self.model._do_torchao_reload = self.model._original_do_torchao_reload
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                loader = getattr(tensor, "weight_loader", None)
                if getattr(loader, "__name__", "") == "online_process_loader":
                    tensor.weight_loader = layerwise._get_original_loader(tensor)  # type: ignore[union-attr]
        layerwise.LOADING_LAYERS.clear()
        self.active = False

    @contextmanager
    def context(self) -> Iterator[None]:
        """vLLM's idea of the current configuration, and this thread on the model's device."""
        from vllm.config import set_current_vllm_config

        on_device = nullcontext() if self._device.type == "cpu" else torch.device(self._device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread, and this is not vLLM's own
        with set_current_vllm_config(self._vllm_config), on_device:
            yield
