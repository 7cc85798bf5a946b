"""What vLLM's workers on a CPU lack for a reload in place; it runs in them (--worker-extension-cls)."""

from typing import Any


class CpuWorkerExtension:
    """Mixed into vLLM's worker class."""

    get_model: Any

    def repack_kept_weights(self) -> None:
        """Pack anew what is computed with, wherever a layer keeps the weights that it was packed from.

        On a CPU vLLM computes with packed copies of the weights. Its reload packs those of layers that
        tensors were loaded for, which leaves out an output layer that is tied to the embedding: it would
        go on with the weights of before, without an error.
        """
        for layer in self.get_model().modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
