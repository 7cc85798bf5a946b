"""The kernel of attention is chosen by a table, and each sees what the dense mask shows."""

import inspect
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sympy
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import flex_attention
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, create_block_mask, create_mask
from torch.nn.attention.varlen import varlen_attn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations import flex_attention as flex
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from scripts.tiny_models import WINDOW, make_batch, tiny_config
from trainer.batch.batch import Batch
from trainer.batch.packing import Bundle, Microbatch, fill
from trainer.model import attention, packed_sequences
from trainer.model.attention import Kernel
from trainer.model.learner import Learner
from trainer.model.packed_sequences import SequenceSeparation
from trainer.model.parallel import decoder_layers
from trainer.model.rounding import Rounding
from trainer.model.token_logprobs import Scorer

CPU = torch.device("cpu")
OWN, SPLIT, VARLEN, FLEX = Kernel


def learner_of(family: str, **more: Any) -> Learner:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **more)).float()
    learner = Learner(Scorer(model, CPU))
    learner.arrange(share_prompts=True)
    return learner


def exact(family: str) -> Learner:
    """A learner in float64."""
    learner = learner_of(family)
    learner.model.double()
    return learner


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch()


@pytest.fixture(scope="module")
def packed(batch: Batch) -> Microbatch:
    """Two rows of several sequences, one of them of a single token, and padding."""
    rows = [[Bundle([k], int(batch.input_tokens[k])) for k in range(r, len(batch), 2)] for r in range(2)]
    filled = fill(batch, rows)
    positions = filled.position_ids.copy()
    assert filled.tokens < filled.token_ids.size and filled.is_packed
    lone = int(np.flatnonzero(positions[1] == 0)[1])
    positions[1, lone - 1] = 0  # the last token of the first sequence is a sequence
    return Microbatch(**{**vars(filled), "position_ids": positions})


@pytest.fixture(scope="module")
def shared(batch: Batch) -> Microbatch:
    """A row whose four sequences share their prompt."""
    first = np.flatnonzero(batch.groups == 0).tolist()
    tokens = 16 + int((batch.input_tokens[first] - 16).sum())
    return fill(batch, [[Bundle(first, tokens, 16)]])


@pytest.mark.parametrize(
    ("device", "works", "shared", "several", "columns", "kernel"),
    [
        ("cuda", [VARLEN, FLEX], False, True, 16, VARLEN),
        ("cuda", [VARLEN, FLEX], False, False, 16, VARLEN),
        ("cuda", [VARLEN, FLEX], True, True, 4096, FLEX),
        ("cuda", [FLEX], False, True, 4096, FLEX),
        ("cuda", [FLEX], False, False, 4096, FLEX),
        ("cuda", [VARLEN], True, False, 4096, OWN),
        ("cuda", [], False, True, 4096, OWN),
        ("cpu", [SPLIT], False, True, attention.SPLIT_FROM, SPLIT),
        ("cpu", [SPLIT], False, True, attention.SPLIT_FROM - 1, OWN),
        ("cpu", [SPLIT], False, False, 4096, OWN),
        ("cpu", [SPLIT], True, True, 4096, OWN),
        ("cpu", [], False, True, 4096, OWN),
        ("mps", [], False, True, 4096, OWN),
    ],
)
def test_choice(
    device: str, works: list[Kernel], shared: bool, several: bool, columns: int, kernel: Kernel
) -> None:
    assert attention.choose_kernel(device, works, shared=shared, several=several, columns=columns) is kernel


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "reason"),
    [
        (torch.bfloat16, 128, 128, ""),
        (torch.float16, 256, 256, ""),
        (torch.bfloat16, 8, 8, ""),
        (torch.float32, 128, 128, "it takes float16 or bfloat16, not float32"),
        (torch.bfloat16, 192, 128, "192 numbers for queries and 128 for values"),
        (torch.bfloat16, 100, 100, "heads have 100 numbers; it takes multiples of 8 up to 256"),
        (torch.bfloat16, 512, 512, "heads have 512 numbers; it takes multiples of 8 up to 256"),
    ],
)
def test_heads_that_flash_kernels_do_not_take(
    dtype: torch.dtype, head_dim: int, value_dim: int, reason: str
) -> None:
    found = attention.refusal(dtype, head_dim, value_dim)
    assert reason in found and bool(found) == bool(reason)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen3", ""),
        ("llama", ""),
        ("gemma3_text", ""),
        ("deepseek_v3", ""),
        ("gpt_oss", "it has no attention sinks"),
        ("gemma2", "it has no cap of the scores"),
        pytest.param("llama4_text", "sequences of a row do not score as they do alone", id="chunks"),
        pytest.param("falcon", None, id="an attention that cannot be exchanged"),
        pytest.param("bloom", None, id="a model with one sequence a row"),
    ],
)
def test_family_that_needs_what_a_kernel_lacks_keeps_its_own(family: str, reason: str | None) -> None:
    assert learner_of(family).arrangement.kernels == ({} if reason is None else {SPLIT: reason})


def seen_by_bounds(bounds: Tensor, columns: int, window: int | None = None) -> Tensor:
    """(columns, columns): what the tokens of a row see by bounds, causally."""
    seen = torch.zeros(columns, columns, dtype=torch.bool)
    for begin, end in zip(bounds.tolist()[:-1], bounds.tolist()[1:], strict=True):
        seen[begin:end, begin:end] = torch.ones(end - begin, end - begin, dtype=torch.bool).tril()
    return seen.triu(1 - window) if window else seen


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text"])
def test_bounds_say_what_the_dense_mask_says(family: str, packed: Microbatch) -> None:
    config = tiny_config(family, attn_implementation="sdpa")
    told = packed_sequences.decoder_inputs(packed, SequenceSeparation.MASKS, SPLIT, config, CPU)
    assert told.keys() == {"input_ids", "position_ids", "seq_idx"} | {
        f"{name}_{of}" for name in ("cu_seq_lens", "max_length") for of in "qk"
    }
    bounds, columns = told["cu_seq_lens_q"], packed.token_ids.size
    assert told["input_ids"].shape == (1, columns) and bounds[-1] == columns
    assert told["max_length_q"] == bounds.diff().max() and bounds.diff().min() == 1
    own = np.cumsum(packed.position_ids.ravel() == 0)[None]
    masks = packed_sequences.attention_masks(
        torch.from_numpy(np.stack([own, own])), told["position_ids"], config
    )
    masks = masks if isinstance(masks, dict) else {"full_attention": masks}
    assert torch.equal(masks["full_attention"][0, 0], seen_by_bounds(bounds, columns))
    if "sliding_attention" in masks:
        assert torch.equal(masks["sliding_attention"][0, 0], seen_by_bounds(bounds, columns, WINDOW))


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("name", ["packed", "shared"])
def test_blocks_of_flex_attention_show_what_the_dense_mask_shows(
    family: str, name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def uncompiled(**given: Any) -> BlockMask:
        given["_compile"] = False
        return create_block_mask(**given)

    monkeypatch.setattr(masking_utils, "create_block_mask", uncompiled)
    microbatch = request.getfixturevalue(name)
    found = []
    for implementation in ("sdpa", FLEX.registered):
        config = tiny_config(family, attn_implementation=implementation)
        masks = packed_sequences.decoder_inputs(microbatch, SequenceSeparation.MASKS, FLEX, config, CPU)[
            "attention_mask"
        ]
        found.append(masks if isinstance(masks, dict) else {"": masks})
    dense, blocks = found
    rows, columns = microbatch.token_ids.shape
    assert dense.keys() == blocks.keys()
    for kind in (kind for kind in blocks if kind not in packed_sequences.UNMASKED):
        block = blocks[kind]
        seen = create_mask(block.mask_mod, rows, 1, columns, columns, device="cpu")
        assert torch.equal(seen, dense[kind]), kind


def test_flex_attention_is_told_to_take_the_kernel_that_has_no_shortest_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.graph import GraphLowering  # slow to import
    from torch._inductor.kernel.flex.flex_decoding import _use_flex_decoding
    from torch._inductor.virtualized import V

    asked: list[FlexKernelOptions] = []

    def stand_in(query: Tensor, *_: Any, **given: Any) -> Any:
        asked.append(given["kernel_options"])
        return query if given.get("return_aux") is given.get("return_lse") is None else (query, query)

    monkeypatch.setattr(flex, "compile_friendly_flex_attention", stand_in)
    tensor = torch.zeros(1, 4, 41, 8)
    attend = ALL_ATTENTION_FUNCTIONS[FLEX.registered]
    attend(SimpleNamespace(training=False), tensor, tensor[:, :1], tensor[:, :1], None)
    known = flex_attention._apply_kernel_options(tensor, tensor, tensor, False, asked[0], None)

    def sized(*sizes: int) -> Any:
        return SimpleNamespace(get_size=lambda: [sympy.Integer(size) for size in sizes])

    with V.set_graph_handler(GraphLowering(make_fx(lambda x: x)(tensor))):
        taken = [
            _use_flex_decoding(sized(1, 4, 41, 8), sized(1, 1, 1, 1), sized(1, 1, 41, 8), dict(options), True)
            for options in (known, {})
        ]
    assert taken == [False, True]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Plain matrix products in place of torch's varlen attention, in any dtype; the calls that it gets."""
    calls: list[dict[str, Any]] = []

    def stand_in(*args: Any, **kwargs: Any) -> Tensor:
        bound = inspect.signature(varlen_attn).bind(*args, **kwargs)
        bound.apply_defaults()
        calls.append(given := bound.arguments)
        query, key, value, bounds = (given[name] for name in ("query", "key", "value", "cu_seq_q"))
        assert query.dtype == key.dtype == value.dtype and query.stride(-1) == 1
        assert query.ndim == 3 and len(query) == len(key) == int(bounds[-1])
        assert bounds.dtype == torch.int32 and torch.equal(bounds, given["cu_seq_k"])
        assert given["max_q"] == given["max_k"] == int(bounds.diff().max())
        groups = query.shape[1] // key.shape[1]
        assert given["enable_gqa"] or groups == 1
        left, right = given["window_size"]
        own = torch.bucketize(torch.arange(len(query)), bounds[1:], right=True)
        ahead = torch.arange(len(query))[:, None] - torch.arange(len(query))
        seen = own[:, None] == own
        seen &= (ahead <= left) | torch.tensor(left < 0)
        seen &= (ahead >= -right) | torch.tensor(right < 0)
        scale = given["scale"] or query.shape[-1] ** -0.5
        scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(groups, 1)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(groups, 1))

    monkeypatch.setattr(attention, "varlen_attn", stand_in)
    monkeypatch.setattr(attention, "HALF", (*attention.HALF, torch.float32, torch.float64))
    return calls


def gradients(learner: Learner, microbatch: Microbatch, kernel: Kernel) -> tuple[Tensor, list[Tensor]]:
    """Logprobs of the trained tokens, and the gradients of their weighted sum."""
    scores = learner._run(learner.scorer, microbatch, kernel=kernel)[0]
    weights = torch.linspace(-1, 1, len(scores), dtype=scores.dtype)
    parameters = list(learner.parameters.values())
    found = torch.autograd.grad((scores * weights).sum(), parameters, allow_unused=True)
    return scores.detach(), [torch.zeros(()) if one is None else one for one in found]


FAMILIES = [
    "qwen3",
    pytest.param("llama", id="llama, groups of heads"),
    pytest.param("mistral", id="mistral, a window in every layer"),
    pytest.param("gemma3_text", id="gemma3, windows in some layers"),
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", [SPLIT, VARLEN])
def test_scores_and_gradients_are_those_of_the_dense_mask(
    family: str, kernel: Kernel, packed: Microbatch, flash: list[dict[str, Any]]
) -> None:
    learner = exact(family)
    wanted, dense = gradients(learner, packed, OWN)
    flash.clear()
    found, mine = gradients(learner, packed, kernel)
    assert bool(flash) == (kernel is VARLEN)
    # logprobs are computed in float32
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    scale = max(float(one.abs().max()) for one in dense)
    for a, b in zip(mine, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * scale)


def test_layers_that_are_computed_again_use_the_same_kernel(packed: Microbatch) -> None:
    learner = exact("gemma3_text")
    _, wanted = gradients(learner, packed, SPLIT)
    for layer in decoder_layers(learner.model):
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    _, found = gradients(learner, packed, SPLIT)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


@torch.no_grad()
def test_wide_rows_are_split_on_a_cpu_and_shared_prompts_are_not(
    packed: Microbatch, shared: Microbatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = learner_of("qwen3")
    wanted = [learner.logprobs(one)[0] for one in (packed, shared)]
    assert [learner.kernel(one) for one in (packed, shared)] == [OWN, OWN]
    monkeypatch.setattr(attention, "SPLIT_FROM", 64)
    assert [learner.kernel(one) for one in (packed, shared)] == [SPLIT, OWN]
    for one, scores in zip((packed, shared), wanted, strict=True):
        torch.testing.assert_close(learner.logprobs(one)[0], scores, rtol=0, atol=1e-5)


def test_varlen_attention_gets_the_rounded_dtype(packed: Microbatch, flash: list[dict[str, Any]]) -> None:
    """Norms too: with float32 weights they would leave queries and keys in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("qwen3")).float()
    learner = Learner(Scorer(model, CPU, Rounding(torch.bfloat16, torch.bfloat16)))
    with torch.no_grad():
        learner._run(learner.scorer, packed, kernel=VARLEN)
    assert {one[name].dtype for one in flash for name in ("query", "key", "value")} == {torch.bfloat16}


class _NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        raise RuntimeError("no backward\nfor this head")


class _WrongBackward(_NoBackward):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # pyright: ignore
        return -gradient


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        pytest.param(lambda out: out, "", id="sound"),
        (_NoBackward.apply, "RuntimeError: no backward for this head"),
        (_WrongBackward.apply, "it is wrong by 2.0e+00 of the largest value"),
        (lambda out: out * 1.2, "it is wrong by"),
    ],
)
def test_kernel_that_fails_forwards_or_backwards_is_not_used(
    broken: Callable[[Tensor], Tensor],
    reason: str,
    packed: Microbatch,
    flash: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sound = attention.varlen_attn
    monkeypatch.setattr(attention, "varlen_attn", lambda *args, **kwargs: broken(sound(*args, **kwargs)))  # type: ignore
    monkeypatch.setitem(attention.CANDIDATES, "cpu", (VARLEN,))
    arrangement = learner_of("qwen3").arrangement
    assert arrangement.kernels[VARLEN].startswith(reason) and bool(arrangement.kernels[VARLEN]) == bool(
        reason
    )
    assert arrangement.works == ([] if reason else [VARLEN])
    assert f"varlen is not used: {reason}" in str(arrangement) or not reason
    assert "\n" not in str(arrangement) and arrangement.packing.several


def test_head_that_flash_kernels_do_not_take_is_found_before_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine without a GPU nothing is half precision either."""
    monkeypatch.setitem(attention.CANDIDATES, "cpu", (VARLEN,))
    kernels = learner_of("qwen3").arrangement.kernels
    assert kernels == {VARLEN: "it takes float16 or bfloat16, not float32"}


def test_kernel_that_forgets_a_long_window_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' own windows are as short as the masks' while it is tried."""
    assert learner_of("gemma3_text", sliding_window=4096).arrangement.works == [SPLIT]
    sound = attention._by_bounds(attention.split_attn)

    def forgets(*args: Any, sliding_window: int | None = None, **kwargs: Any) -> Any:
        return sound(*args, **kwargs)

    monkeypatch.setitem(attention.ALL_ATTENTION_FUNCTIONS, SPLIT.registered, forgets)
    monkeypatch.setattr(attention, "failure", lambda *_: "")
    learner = learner_of("gemma3_text", sliding_window=4096)
    assert learner.arrangement.kernels == {SPLIT: "sequences of a row do not score as they do alone"}
    windows = {getattr(layer, "sliding_window", None) for layer in learner.model.modules()}
    assert windows == {None, 4096}


def test_saved_configuration_does_not_name_a_kernel(packed: Microbatch, tmp_path: Path) -> None:
    learner = learner_of("qwen3")
    learner._run(learner.scorer, packed, kernel=SPLIT)
    learner.model.save_pretrained(tmp_path)
    assert "flagpost" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
