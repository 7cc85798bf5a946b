"""Compute logprobs of tokens from hidden states, chunk by chunk: a pack's logits never exist at once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from rollout.engines.embedded.picture_input import (
    PlacedPictures,
    ShownPicture,
    picture_tensors,
    with_pictures,
)
from rollout.engines.embedded.routes import Routes
from trainer.model import context
from trainer.model.attention import Kernel
from trainer.model.parallel import decoder_layers
from trainer.model.rounding import Rounding

CHUNK_ELEMENTS = 1 << 26
"""Logits that may exist at once: 256 MiB of them in float32."""


_AGAIN: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
"""How a chunk is computed again in the backward pass: it draws no random numbers."""


class UnsupportedModel(ValueError):
    """A causal LM that is not a decoder with a head on it, as transformers builds them."""


class Scorer(nn.Module):
    """A causal language model that returns logprobs. If sharded, it is the root of FSDP: its hooks gather
    embeddings and head, tied or not, for the whole of `forward`.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        rounding: Rounding | None = None,
        computes_in: torch.dtype = torch.float32,
        offloaded: bool = False,
    ) -> None:
        """`model` is a transformers causal LM, maybe in peft's wrapper, and computes on `device`.

        `rounding`: of its weights, layer by layer; None: it computes with them as they are, or as FSDP casts
        them. `computes_in`: the number type of its layers. `offloaded`: FSDP keeps the weights in host
        memory.
        """
        super().__init__()
        self.model = model.eval()  # dropout off; nothing else differs in the models that we train
        self._causal = [model.get_base_model() if hasattr(model, "get_base_model") else model]
        self.device = device
        self.computes_in = computes_in
        self.offloaded = offloaded
        self.config: Any = self._causal[0].config.get_text_config()
        self.routes: Routes | None = None
        """With trainer.routing_replay: where its tokens go."""
        self._own_attention: str = self.config._attn_implementation
        self._rows = max(1, CHUNK_ELEMENTS // self.config.vocab_size)
        self._rounding = rounding
        layers = decoder_layers(model)
        inside = {module for layer in layers for module in layer.modules()}
        self._embeddings = [module for module in _decoder(self.causal).modules() if module not in inside]
        """Modules of the decoder outside of its layers."""
        self._head = [*{*self.causal.modules()} - {*_decoder(self.causal).modules()}]
        self._tower: list[nn.Module] = []
        """What makes features of pictures; its layers are rounded as those of the decoder."""
        if hasattr(self.causal.base_model, "get_image_features"):
            self._tower = [
                module
                for module in self._head
                if module not in inside and module is not self.causal.get_output_embeddings()
            ]
            self._head = [self.causal.get_output_embeddings()]
        if rounding:
            for layer in layers:
                rounding.wrap(layer)

    @property
    def causal(self) -> Any:
        """The transformers model, out of peft's wrapper."""
        return self._causal[0]

    def use(self, kernel: Kernel, divided: bool = False) -> None:
        """Compute attention with this kernel from now on: a backward pass may compute the forward again.
        `divided`: the ranks of a context group compute it together.
        """
        name = self._own_attention if kernel is Kernel.OWN else kernel.registered
        name = context.divided(name) if divided else name
        if self.config._attn_implementation != name:
            self.config._attn_implementation = name

    def forward(
        self,
        inputs: Mapping[str, Any],
        scored_at: Tensor,
        targets: Tensor,
        temperatures: Tensor | None = None,
        entropy_gradient: bool = False,
        pictures: PlacedPictures | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` (N,) and entropies (N,) from the logits at `scored_at`.

        `inputs` is what the decoder takes of R rows of C tokens, see packed_sequences.decoder_inputs;
        `scored_at` (N,) indexes the flattened R x C positions. Each token's logits are divided by its own
        of `temperatures` (N,); None: all are 1. The entropies have a gradient only with `entropy_gradient`.
        `pictures`: those in the rows.
        """
        hidden = self._hidden(inputs, pictures or PlacedPictures(()))
        scoring = hidden.flatten(0, 1)[scored_at]  # (N, hidden)
        of_tokens = (scoring, targets) if temperatures is None else (scoring, targets, temperatures)
        chunks = list(zip(*(values.split(self._rows) for values in of_tokens), strict=True))
        if len(chunks) == 1:
            scores = [self._score(*chunks[0], entropy_gradient=entropy_gradient)]
        else:  # computed again in the backward pass, so that only one chunk's logits exist at a time
            weights = self._head_weights(len(chunks))
            scores = [
                checkpoint(self._score, *chunk, weight=weight, entropy_gradient=entropy_gradient, **_AGAIN)
                for chunk, weight in zip(chunks, weights, strict=True)
            ]
        # Concatenated even if there is one chunk: FSDP needs new tensors, not views.
        return torch.cat([score[0] for score in scores]), torch.cat([score[1] for score in scores])

    def _hidden(self, inputs: Mapping[str, Any], pictures: PlacedPictures) -> Tensor:
        """(R, C, hidden) where the decoder ends."""
        model, blank = self.causal.base_model, pictures.blank
        tower = self._tower if pictures.pictures or blank else []
        with (
            self._rounded([*tower, *self._embeddings]),
            with_pictures(model, inputs, pictures, self.computes_in) as inputs,
        ):
            zero = self._zero(blank) if blank else 0.0
            decoder = model if pictures.pictures else _decoder(self.causal)
            return decoder(**inputs, use_cache=False, return_dict=True).last_hidden_state + zero

    def _zero(self, blank: ShownPicture) -> Tensor:
        """Return 0, of which the features of a picture are a part."""
        tensors = picture_tensors(blank.tensors, self.device, self.computes_in)
        features: Any = self.causal.base_model.get_image_features(**tensors, return_dict=True)
        return torch.cat(
            [part.flatten()[:0] for part in tree_leaves(features) if torch.is_tensor(part)]
        ).sum()

    def _rounded(self, modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
        return self._rounding.applied_to(modules) if self._rounding else nullcontext()

    def _head_weights(self, chunks: int) -> Iterable[Tensor | None]:
        """Yield the head's weight for each chunk, so that the sum of its gradients is in float32 though they
        are in bfloat16; None: as it is.

        Each must be asked for just before its chunk is computed. A backward pass begins with what was made
        last: a weight made before all chunks would keep its gradient until all of them are done.
        """
        head = self._causal[0].get_output_embeddings()
        weight = None if head is None else head._parameters.get("weight")
        if weight is None or not (weight.requires_grad and torch.is_grad_enabled()):
            return [None] * chunks
        if weight.dtype == torch.float32:
            return [None] * chunks
        total: list[Tensor | None] = [None]
        collected = _ReleaseGradient.apply(weight, total)
        return (_AccumulateGradient.apply(collected, total) for _ in range(chunks))  # pyright: ignore[reportReturnType]

    def _score(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperatures: Tensor | None = None,
        weight: Tensor | None = None,
        entropy_gradient: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` (n,) and entropies (n,) where the decoder ended in `hidden` (n, hidden).

        `temperatures`: (n,), or None. `weight`: what the head takes in place of its own.
        """
        causal = self._causal[0]
        with self._rounded(self._head), _ends_in(causal, hidden[None]), _head_with(causal, weight):
            # The model does the rest itself: it may scale or cap its logits.
            logits = causal(input_ids=targets[None], use_cache=False, return_dict=True).logits[0]
        if temperatures is not None:
            logits = logits.float() / temperatures[:, None]
        log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], entropy


def _decoder(causal: Any) -> Any:
    """Return the module that makes hidden states; a few models name themselves, or a part of their head."""
    decoder = causal.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not causal:
        return decoder
    return getattr(causal, "model", decoder)


class _AccumulateGradient(torch.autograd.Function):
    """Identity whose gradient is added to `total[0]` and goes no further."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: list[Tensor | None]) -> Tensor:
        ctx.total = total
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:  # pyright: ignore
        # Room is made when it is needed.
        ctx.total[0] = gradient.float() if ctx.total[0] is None else ctx.total[0].add_(gradient)
        return None, None


class _ReleaseGradient(torch.autograd.Function):
    """Identity whose gradient is what the _Added behind it have left in `total[0]`."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, total: list[Tensor | None]) -> Tensor:
        ctx.set_materialize_grads(False)  # no zeros for the gradient that does not come
        ctx.total, ctx.dtype = total, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, _gradient: None) -> tuple[Tensor, None]:  # pyright: ignore
        total, ctx.total[0] = ctx.total[0], None  # the node outlives its gradient
        return total.to(ctx.dtype), None


@contextmanager
def _head_with(causal: Any, weight: Tensor | None) -> Iterator[None]:
    """Inside the context the head of `causal` has this weight; None: its own."""
    if weight is None:
        yield
        return
    parameters = causal.get_output_embeddings()._parameters
    before, parameters["weight"] = parameters["weight"], weight
    try:
        yield
    finally:
        parameters["weight"] = before


class _Decoded(BaseModelOutputWithPast):
    """The hidden states of a decoder, and None for any other attribute that a model asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _ends_in(causal: Any, hidden: Tensor) -> Iterator[None]:
    """Inside the context the decoder of `causal` returns `hidden` (1, n, hidden); it must be called."""
    decoder = _decoder(causal)
    before = vars(decoder).get("forward")
    is_called = False

    def forward(*_: Any, **__: Any) -> _Decoded:
        nonlocal is_called
        is_called = True
        return _Decoded(last_hidden_state=hidden)

    decoder.forward = forward
    try:
        try:
            yield
        except (IndexError, TypeError) as error:
            raise UnsupportedModel(
                f"a {type(causal).__name__} makes its logits of more than the decoder's last hidden state "
                f"({error}); train a causal decoder"
            ) from error
        if not is_called:
            raise UnsupportedModel(
                f"{type(decoder).__name__} is not what the logits come from in a {type(causal).__name__}; "
                "train a model whose get_decoder() is"
            )
    finally:
        del decoder.forward
        if before is not None:
            decoder.forward = before
