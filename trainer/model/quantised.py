"""Hold frozen linear layers in 4 bits (NF4), under adapters that are trained: QLoRA, arXiv 2305.14314.

bitsandbytes makes the codes, and the weights of them again. Its own Linear4bit is not used: on CPUs that
multiply bfloat16 it packs a weight anew when no gradient is asked for, and has no backward pass from then on.
"""

import logging
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainer.model.lora import ROUTERS
from trainer.model.parallel import decoder_layers
from trainer.model.vision import vision_parameters

BLOCK = 64
"""Neighbouring weights that have one scale, a float32."""


def quantise(model: Any, device: torch.device) -> None:
    """Put the linear layers of the decoder into 4 bits on `device`, one by one, but for adapters and for
    routers of experts: tokens would go to other experts than the engine's. Fused experts stay, too, and the
    vision tower.
    """
    vision = {id(parameter) for parameter in vision_parameters(model).values()}
    for layer in decoder_layers(model):
        for path, module in list(layer.named_modules()):
            routes = re.fullmatch(ROUTERS, path.removesuffix(".base_layer"))
            if not isinstance(module, nn.Linear) or module.weight.requires_grad or routes:
                continue
            if id(module.weight) not in vision:
                parent, _, attribute = path.rpartition(".")
                setattr(layer.get_submodule(parent), attribute, Quantised(module, device))


class Quantised(nn.Module):
    """A frozen linear layer, which makes its weight when it computes, and keeps none of it."""

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        codes, state = _functional().quantize_4bit(
            linear.weight.detach().to(device), blocksize=BLOCK, quant_type="nf4"
        )
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", codes)  # (in x out / 2, 1), uint8
        self.register_buffer("scales", state.absmax)  # (in x out / BLOCK,), float32
        self.shape, self.dtype = linear.weight.shape, linear.weight.dtype
        self.bias = linear.bias

    @property
    def weight(self) -> Tensor:
        """(out, in) the weight that it computes with, made anew."""
        functions = _functional()
        state = functions.QuantState(
            absmax=self.scales, shape=self.shape, dtype=self.dtype, blocksize=BLOCK, quant_type="nf4"
        )
        return functions.dequantize_4bit(self.codes, state)

    def forward(self, inputs: Tensor) -> Tensor:
        return (
            _DequantisedMatmul.apply(inputs, self)
            if self.bias is None
            else _DequantisedMatmul.apply(inputs, self) + self.bias
        )


class _DequantisedMatmul(torch.autograd.Function):
    """Inputs times the weight of a Quantised layer, whose weight exists only while it is multiplied."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, layer: Quantised) -> Tensor:
        ctx.layer = layer
        return functional.linear(inputs, layer.weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return gradient @ ctx.layer.weight, None


def _functional() -> Any:
    """Return bitsandbytes' functions. It takes seconds to import, and warns of a kernel that is not used."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    import bitsandbytes.functional

    return bitsandbytes.functional
