"""The chunked head: the model's own logprobs and gradients, without its logits."""

import weakref
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.tiny_models import tiny_config
from tests.models import GPT2_LIKE, LLAMA_LIKE
from trainer.model import token_logprobs
from trainer.model.rounding import Rounding
from trainer.model.token_logprobs import Scorer, UnsupportedModel

VOCABULARY = LLAMA_LIKE["vocab_size"]
CHUNK_ROWS = 5
OPT_LIKE = {**LLAMA_LIKE, "ffn_dim": 64, "word_embed_proj_dim": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Config": {**LLAMA_LIKE, "tie_word_embeddings": True},
    "Gemma2Config": {**LLAMA_LIKE, "final_logit_softcapping": 2.0},
    "GraniteConfig": {**LLAMA_LIKE, "logits_scaling": 3.0},
    "CohereConfig": {**LLAMA_LIKE, "logit_scale": 0.3},
    "MixtralConfig": LLAMA_LIKE,
    "GPT2Config": {**GPT2_LIKE, "bos_token_id": 0, "eos_token_id": 0},
    "OPTConfig": OPT_LIKE,
}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_logprobs, "CHUNK_ELEMENTS", CHUNK_ROWS * VOCABULARY)


def make(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**MODELS[name])).float().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(5)  # logits far from 0, where a cap would not show
    return model


def pack() -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Two rows of 12 tokens, 13 of them scored: what the decoder takes, where, targets."""
    generator = torch.Generator().manual_seed(1)
    token_ids = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    scored_at = torch.tensor([0, 1, 2, 3, 5, 7, 8, 12, 13, 14, 20, 21, 22])
    inputs = {"input_ids": token_ids, "position_ids": torch.arange(12).repeat(2, 1)}
    return inputs, scored_at, token_ids.flatten()[scored_at + 1]


TEMPERATURES = torch.linspace(0.4, 1.6, 13)
"""Temperatures of the tokens that `pack` scores: those of one chunk differ too."""


def plain(model: PreTrainedModel, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    inputs, scored_at, targets = pack()
    logits = model(**inputs, use_cache=False).logits
    log_p = torch.log_softmax(logits.flatten(0, 1)[scored_at] / temperatures[:, None], dim=-1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_give_the_models_own_logprobs_and_gradients(name: str) -> None:
    model = make(name)
    scorer = Scorer(model, CPU)
    expected = plain(model, TEMPERATURES)
    found = scorer(*pack(), TEMPERATURES)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # The mean, so that gradients are of the order of 1.
    mine, theirs = (torch.autograd.grad(lp.square().mean(), parameters) for lp in (found[0], expected[0]))
    scale = max(gradient.abs().max().item() for gradient in theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * max(1.0, scale))
    assert scale > 1e-2


@pytest.mark.parametrize("rows", [CHUNK_ROWS, 13], ids=["chunks", "one chunk"])
def test_entropies_have_their_gradient_where_it_is_asked_for(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "CHUNK_ELEMENTS", rows * VOCABULARY)
    model = make("Qwen3Config")
    scorer, parameters = Scorer(model, CPU), [*model.parameters()]
    assert not scorer(*pack(), TEMPERATURES)[1].requires_grad
    found = scorer(*pack(), TEMPERATURES, True)[1]
    mine, theirs = (
        torch.autograd.grad(values.sum(), parameters) for values in (found, plain(model, TEMPERATURES)[1])
    )
    scale = max(gradient.abs().max().item() for gradient in theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6 * max(1.0, scale))
    assert scale > 1e-2
    with torch.no_grad():
        assert not scorer(*pack(), TEMPERATURES, True)[1].requires_grad


HALF = Rounding(torch.bfloat16, torch.bfloat16)
"""The rounding on a GPU that holds the whole model in float32."""
in_bfloat16 = pytest.mark.parametrize("rounding", [None, HALF], ids=["bfloat16 weights", "rounded"])


def in_half(model: PreTrainedModel, rounding: Rounding | None) -> Scorer:
    return Scorer(model if rounding else model.bfloat16(), CPU, rounding)


@in_bfloat16
@pytest.mark.parametrize("name", ["MixtralConfig", "Gemma2Config"])
def test_gradient_of_the_head_is_summed_over_the_chunks_in_float32(
    name: str, rounding: Rounding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_logprobs, "CHUNK_ELEMENTS", VOCABULARY)  # a token each
    model = make(name)
    head: Any = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not tied
    scorer = in_half(model, rounding)
    inputs, scored_at, targets = pack()
    (found,) = torch.autograd.grad(scorer(*pack(), TEMPERATURES)[0].sum(), head.weight)
    exact = torch.zeros_like(head.weight, dtype=torch.float32)
    for k in range(len(targets)):
        this = slice(k, k + 1)
        one = scorer(inputs, scored_at[this], targets[this], TEMPERATURES[this])[0]
        exact += torch.autograd.grad(one.sum(), head.weight)[0]
    torch.testing.assert_close(found, exact.to(found.dtype), rtol=1e-6, atol=1e-6)


class LikeTheHead(TorchDispatchMode):
    """How many tensors as large as the head's weight there are at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most, self._alive = 0, dict[int, weakref.ref[Any]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.numel() == VOCABULARY * LLAMA_LIKE["hidden_size"]:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = weakref.ref(storage, lambda _, key=key: self._alive.pop(key))
                self.most = max(self.most, len(self._alive))
        return out


@in_bfloat16
def test_gradient_of_the_head_waits_for_no_other_chunk(
    rounding: Rounding | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def most(chunks: int) -> int:
        monkeypatch.setattr(token_logprobs, "CHUNK_ELEMENTS", -(-13 // chunks) * VOCABULARY)
        logprobs, _ = in_half(make("Qwen3Config"), rounding)(*pack())
        with LikeTheHead() as alive:
            logprobs.sum().backward()
        return alive.most

    assert most(13) <= most(3) <= 5


def test_rounded_model_computes_as_one_in_bfloat16_and_trains_its_exact_weights() -> None:
    model = make("Qwen3Config")
    exact = [parameter.detach().clone() for parameter in model.parameters()]
    logprobs, _ = Scorer(model, CPU, HALF)(*pack(), TEMPERATURES)
    half = make("Qwen3Config")
    for parameter in half.parameters():  # and no buffer
        parameter.data = parameter.data.bfloat16()
    expected, _ = Scorer(half, CPU)(*pack(), TEMPERATURES)
    assert torch.equal(logprobs, expected)
    logprobs.sum().backward()
    for parameter, before in zip(model.parameters(), exact, strict=True):
        assert torch.equal(parameter, before) and parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    """How many rows of logits a tensor has held at most."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            # The head's weight, transposed, is no logits.
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCABULARY,) and len(tensor) != 32:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return out


def test_logits_of_a_whole_pack_never_exist() -> None:
    model = make("GraniteConfig")
    with LargestTensor() as largest:
        Scorer(model, CPU)(*pack(), TEMPERATURES)[0].sum().backward()
    assert largest.rows == CHUNK_ROWS
    with LargestTensor() as largest:
        plain(model, TEMPERATURES)[0].sum().backward()
    assert largest.rows == 24


def test_nothing_scored_still_reaches_every_parameter() -> None:
    model = make("Qwen3Config")
    none = torch.zeros(0, dtype=torch.int64)
    one = torch.zeros(1, 1, dtype=torch.int64)
    logprobs, entropy = Scorer(model, CPU)({"input_ids": one, "position_ids": one}, none, none)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in model.parameters())


def test_model_that_does_not_end_in_its_decoder_is_refused() -> None:
    model = make("Qwen3Config")
    copied = make("Qwen3Config").get_decoder()
    model.get_decoder = lambda: copied  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModel, match=r"Qwen3Model is not what the logits .* Qwen3ForCausalLM"):
        Scorer(model, CPU)(*pack())


def test_model_that_needs_more_than_the_last_hidden_state_is_refused() -> None:
    model = AutoModelForCausalLM.from_config(tiny_config("prophetnet")).float().eval()
    none, one = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.int64)
    with pytest.raises(UnsupportedModel, match=r"a ProphetNetForCausalLM makes its logits of more than"):
        Scorer(model, CPU)({"input_ids": one}, none, none)


@pytest.mark.parametrize("family", ["llama4_text", "modernbert-decoder"])
def test_decoder_is_found_where_get_decoder_names_something_else(family: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(family)).float().eval()
    assert type(model.get_decoder()) is not type(model.model)
    found = Scorer(model, CPU)(*pack(), TEMPERATURES)
    torch.testing.assert_close(found, plain(model, TEMPERATURES), rtol=1e-6, atol=1e-6)
