"""Extend vLLM's workers on a CPU for a reload in place; this runs in them (--worker-extension-cls)."""

from typing import Any


class CpuWorkerExtension:
    """Methods that vLLM adds to its worker class."""

    get_model: Any

    def repack_kept_weights(self) -> None:
        """Pack the weights again in every layer that also keeps the unpacked ones.

        On a CPU vLLM computes with packed copies of the weights. Its reload packs only layers that tensors
        were loaded for. An output layer that is tied to the embedding is not among them, and would go on with
        the old weights, without an error.
        """
        for layer in self.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
