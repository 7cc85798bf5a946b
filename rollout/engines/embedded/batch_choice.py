"""Find out, by trying, how the rows of a model can be decoded together.

What a family's layers remember, and whether padding misleads them, stands in no list here: a few rows are
generated, and compared with plain forward passes over each row alone. So an unknown family is right too.
"""

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import log_softmax
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from rollout.engines.embedded.batch import Batch, Generation, SampleInProgress
from rollout.engines.embedded.cohorts import Cohorts
from rollout.engines.embedded.padded import PaddedBatch
from rollout.engines.embedded.picture_input import PlacedPictures, ShownPicture, with_pictures
from rollout.engines.short_model import short_model, short_windows

log = logging.getLogger(__name__)

BatchMaker = Callable[[PreTrainedModel], Batch]

_PROMPTS = (3, 11, 1, 3)
"""Lengths of the prompts that are tried, in tokens; the last one joins the others midway."""
_TOKENS = 8
_SAID = 120
"""Characters of an error that are said."""
_WINDOW = 4
"""While padding is tried, attention windows are this short, so that the rows outgrow them."""
_TOLERANCES = {torch.bfloat16: 0.1, torch.float32: 1e-4, torch.float64: 1e-5}
"""The mean error of a token's log-probability, in standard deviations over the vocabulary. In a model of
float64 many families compute some things in float32, which makes 1e-6 at most; the steps of nemotron_h and
zamba2, which do not bound the time step as their prefill does, make 4e-5."""


def batch_maker(model: PreTrainedModel) -> BatchMaker:
    """Return the BatchMaker of the fastest batch in which each row computes what it would compute alone. It
    holds for other weights of the model too. Unless it is PaddedBatch, a log line says so.
    """
    with torch.inference_mode():
        short = short_model(model, model.dtype)
        maker = (short and _found(short)) or _found(model)
    if maker is Cohorts:
        log.info("padding would change this model's logits: only rows of equal length are decoded together")
    if maker is not None:
        return maker
    log.warning("this model's cache cannot be used: every token costs a pass over its whole row")
    return partial(Cohorts, cached=False)


def _found(model: PreTrainedModel) -> BatchMaker | None:
    """Return the BatchMaker of the fastest batch that is right; None if no batch with a cache is."""
    if _pads_well(model):
        return PaddedBatch
    return Cohorts if _agrees(model, Cohorts) else None


def _pads_well(model: PreTrainedModel) -> bool:
    """Return whether PaddedBatch is right, also for rows that are longer than the model's
    attention windows.
    """
    config = model.config.get_text_config(decoder=True)
    layers = {type(layer) for layer in DynamicCache(config=config).layers}
    if not layers <= {DynamicLayer, DynamicSlidingWindowLayer}:
        return False  # what such layers remember of a row is no keys and values, or not of this row alone
    if DynamicSlidingWindowLayer not in layers:
        return _agrees(model, PaddedBatch)
    ids = _prompt(model, 3 * _WINDOW)
    unpadded = _logprobs(model, ids)
    with short_windows([config], _WINDOW):
        is_shorter = not torch.equal(_logprobs(model, ids), unpadded)
        return is_shorter and _agrees(model, PaddedBatch)


def why_no_pictures(model: PreTrainedModel, example: ShownPicture) -> str:
    """Return why rows with a picture cannot be decoded together in a PaddedBatch; empty if they can."""
    if not hasattr(model.base_model, "get_image_features"):
        return f"a {type(model).__name__} has no part for them"
    return _trouble(model, PaddedBatch, example)


def _agrees(model: PreTrainedModel, make: BatchMaker) -> bool:
    return not _trouble(model, make)


def _trouble(model: PreTrainedModel, make: BatchMaker, picture: ShownPicture | None = None) -> str:
    """Return empty if rows that join and leave such a batch get the log-probabilities of plain forward
    passes, else why not. `picture`: shown in each second prompt.
    """
    try:
        rows = _generate(make(model), [_prompt(model, length) for length in _PROMPTS], picture)
        errors, spreads = list[Tensor](), list[Tensor]()
        for row in rows:
            prompt = row.generation.prompt_ids
            logprobs = _logprobs(model, prompt + row.token_ids, row.generation)[len(prompt) - 1 : -1]
            expected = logprobs.gather(1, torch.tensor(row.token_ids)[:, None])[:, 0]
            errors.append((torch.tensor(row.logprobs, dtype=torch.float64) - expected).abs())
            spreads.append(logprobs.std(-1))
        is_right = bool(torch.cat(errors).mean() <= _TOLERANCES[model.dtype] * torch.cat(spreads).mean())
        return "" if is_right else "rows that are decoded together score otherwise than alone"
    except Exception as error:  # a model's own code may raise anything, e.g. at a cache of another kind
        log.debug("%s does not work with this model", make, exc_info=error)
        return " ".join(f"{type(error).__name__}: {error}".split())[:_SAID]


def _generate(batch: Batch, prompts: list[list[int]], picture: ShownPicture | None) -> list[SampleInProgress]:
    """Generate two rows of each prompt, of different lengths; the last prompt joins the others midway."""
    *first, last = [
        Generation(
            [*prompt[:1], *picture.token_ids, *prompt[1:]] if picture and number % 2 else prompt,
            *(2, _TOKENS - number, 1.0, 1.0, ()),
            seed=10 * number,
            pictures=[(picture, 1)] if picture and number % 2 else (),
        )
        for number, prompt in enumerate(prompts)
    ]
    _take(batch, 0, *batch.join([row for generation in first for row in generation.rows]))
    for _ in range(_TOKENS // 2):
        _take(batch, 0, *batch.step())
    begin = len(batch.rows)
    _take(batch, begin, *batch.join(last.rows))
    while batch.rows:
        _take(batch, 0, *batch.step())
    return [row for generation in (*first, last) for row in generation.rows]


def _take(batch: Batch, begin: int, tokens: list[int], logprobs: list[float]) -> None:
    for row, token, logprob in zip(batch.rows[begin:], tokens, logprobs, strict=True):
        row.token_ids.append(token)
        row.logprobs.append(logprob)
    batch.keep(
        [
            i
            for i, row in enumerate(batch.rows)
            if len(row.token_ids) < row.generation.max_tokens - row.index  # rows of one prompt part too
        ]
    )


def _prompt(model: PreTrainedModel, length: int) -> list[int]:
    size = int(model.config.get_text_config(decoder=True).vocab_size)
    return [(5 + 7 * i + length) % size for i in range(length)]


def _logprobs(model: PreTrainedModel, ids: list[int], generation: Generation | None = None) -> Tensor:
    """(L, V), float64, of a plain forward pass. `generation`: of which they are a row."""
    inputs = {"input_ids": torch.tensor([ids])}
    if generation is None or not generation.pictures:
        return log_softmax(model(**inputs, use_cache=False).logits[0].double(), -1)
    places = torch.arange(len(ids))[None]
    pictures = PlacedPictures(generation.pictures, answers=places >= len(generation.prompt_ids))
    inputs["position_ids"] = places
    with with_pictures(model.base_model, inputs, pictures, model.dtype) as inputs:
        return log_softmax(model(**inputs, use_cache=False).logits[0].double(), -1)
