"""vLLM's layer-wise reload, driven so that a failed one leaves nothing behind.

vLLM (0.32) moves every layer to the meta device, collects what arrives for it, and once a layer is
complete builds it, repacks it and copies it into the live tensors. Its state is global, per layer, and
survives an update that failed half-way: the next one then takes up layers that are half collected, or
wraps loaders that are wrapped already. So: `reset` puts every layer back, before each start and after each
failure.

On a CPU vLLM also packs weights where a reload does not reach: experts are packed only the first time, and
an output head that is tied to the embedding keeps what was packed from the old one. Both would go on
answering with old weights. `start` and `finish` see to them.
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
        self._expert_kernels: dict[Any, Any] = {}
        self.active = False

    def start(self) -> None:
        """Make ready for a pass over the weights, whatever the last one left."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.reset()
        self.active = True
        with self.context():
            initialize_layerwise_reload(self.model)
        if self._device.type == "cpu":
            for layer in self.model.modules():
                method: Any = getattr(layer, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    # vLLM takes a layer that has its kernel for packed already
                    self._expert_kernels[method] = method.moe_kernel
                    method.moe_kernel = None

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
            self._restore_expert_kernels()
            if self._device.type == "cpu":
                self._repack_heads()
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
        self._restore_expert_kernels()
        self.active = False

    def _restore_expert_kernels(self) -> None:
        """Those of layers that were not processed, hence not made anew."""
        for method, kernel in self._expert_kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel
        self._expert_kernels = {}

    def _repack_heads(self) -> None:
        for layer in self.model.modules():
            weight = layer._parameters.get("weight")
            # a packed copy beside a weight that is kept: an embedding, or a head that may be tied to it
            if hasattr(layer, "cpu_linear") and weight is not None and weight.numel():
                layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr,operator]

    @contextmanager
    def context(self) -> Iterator[None]:
        """vLLM's idea of the current configuration, and this thread on the model's device."""
        from vllm.config import set_current_vllm_config

        on_device = nullcontext() if self._device.type == "cpu" else torch.device(self._device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # per thread, and this is not vLLM's own
        with set_current_vllm_config(self._vllm_config), on_device:
            yield
