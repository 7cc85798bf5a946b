"""Compute logprobs of tokens from hidden states, chunk by chunk: a pack's logits never exist at once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

CHUNK_ELEMENTS = 1 << 26
"""Logits that may exist at once: 256 MiB of them in float32."""


class UnsupportedModel(ValueError):
    """A causal LM that is not a decoder with a head on it, as transformers builds them."""


class Scorer(nn.Module):
    """A causal language model that returns logprobs. If sharded, it is the root of FSDP: its hooks gather
    embeddings and head, tied or not, for the whole of `forward`.
    """

    def __init__(
        self, model: Any, device: torch.device, autocast: bool = False, offloaded: bool = False
    ) -> None:
        """`model` is a transformers causal LM, maybe in peft's wrapper, and computes on `device`.

        `autocast`: compute in bfloat16. `offloaded`: FSDP keeps the weights in host memory.
        """
        super().__init__()
        self.model = model.eval()  # dropout off; nothing else differs in the models that we train
        self._causal = [model.get_base_model() if hasattr(model, "get_base_model") else model]
        self.device = device
        self.offloaded = offloaded
        self._autocast = autocast
        self.config: Any = self._causal[0].config.get_text_config()
        self._rows = max(1, CHUNK_ELEMENTS // self.config.vocab_size)

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        scored_at: Tensor,
        targets: Tensor,
        temperatures: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` (N,) and entropies (N,) from the logits at `scored_at`.

        `token_ids` and `position_ids` are (R, C); `scored_at` (N,) indexes the flattened R x C positions.
        `temperatures`: (N,), by which each token's logits are divided; None: all are 1. `mask`: (R, 1, C, C),
        see `shared_prompts`; None: see `packing`. The entropy is a statistic and has no gradient.
        """
        decoder = self._causal[0].get_decoder()  # not by its plain name: a module would count twice
        with torch.autocast("cuda", torch.bfloat16) if self._autocast else nullcontext():
            hidden = decoder(
                input_ids=token_ids,
                position_ids=position_ids,
                attention_mask=mask,
                use_cache=False,
                return_dict=True,
            ).last_hidden_state
            scoring = hidden.flatten(0, 1)[scored_at]  # (N, hidden)
            of_tokens = (scoring, targets) if temperatures is None else (scoring, targets, temperatures)
            chunks = list(zip(*(values.split(self._rows) for values in of_tokens), strict=True))
            if len(chunks) == 1:
                scores = [self._score(*chunks[0])]
            else:  # computed again in the backward pass, so that only one chunk's logits exist at a time
                scores = [
                    checkpoint(self._score, *chunk, use_reentrant=False, preserve_rng_state=False)
                    for chunk in chunks
                ]
        # Concatenated even if there is one chunk: FSDP needs new tensors, not views.
        return torch.cat([score[0] for score in scores]), torch.cat([score[1] for score in scores])

    def _score(
        self, hidden: Tensor, targets: Tensor, temperatures: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of `targets` (n,) and entropies (n,) where the decoder ended in `hidden` (n, hidden).

        `temperatures`: (n,), or None.
        """
        causal = self._causal[0]
        with _ends_in(causal, hidden[None]):
            # The model does the rest itself: it may scale or cap its logits.
            logits = causal(input_ids=targets[None], use_cache=False, return_dict=True).logits[0]
        if temperatures is not None:
            logits = logits.float() / temperatures[:, None]
        log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[:, None])[:, 0], entropy


class _Decoded(BaseModelOutputWithPast):
    """The hidden states of a decoder, and None for any other attribute that a model asks for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _ends_in(causal: Any, hidden: Tensor) -> Iterator[None]:
    """Inside the context the decoder of `causal` returns `hidden` (1, n, hidden); it must be called."""
    decoder = causal.get_decoder()
    own = vars(decoder).get("forward")
    asked = False

    def forward(*_: Any, **__: Any) -> _Decoded:
        nonlocal asked
        asked = True
        return _Decoded(last_hidden_state=hidden)

    decoder.forward = forward
    try:
        yield
        if not asked:
            raise UnsupportedModel(
                f"{type(decoder).__name__} is not what the logits come from in a {type(causal).__name__}; "
                "train a model whose get_decoder() is"
            )
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own
