"""Text behind other tokens: its tokens spell it, whatever a tokenizer puts in front of a text."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollout.engines import appended_text

TEXTS = ["=85\n", " =85", "85", "\n</think>\n\n", "\n", "  two", "the answer", "a</s>b</s>c", " , 's ."]
CORPUS = ["The answer is 42.", "= 85 <<27+58>>=85 two </think> , 's ."] * 4
BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def _byte_pairs(**more: Any) -> Tokenizer:
    return Tokenizer(models.BPE(unk_token="<unk>", **more))


def prepending() -> Tokenizer:
    """Llama 2's and Mistral's: a normalizer, which acts behind each special token too."""
    raw = _byte_pairs(byte_fallback=True, fuse_unk=True)
    raw.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    raw.decoder = _decoder()
    return raw


def _decoder(strip: int = 1) -> decoders.Sequence:
    replace = decoders.Replace(SPACE, " ")
    parts = [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", strip, 0)]
    return decoders.Sequence(parts)


def metaspace(scheme: str) -> Tokenizer:
    raw = _byte_pairs(byte_fallback=True)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    raw.decoder = _decoder(0 if scheme == "never" else 1)
    return raw


def bytes_of(*, prefix: bool) -> Tokenizer:
    raw = _byte_pairs()
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    raw.decoder = decoders.ByteLevel()
    return raw


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "prepend": prepending,
    "always": lambda: metaspace("always"),
    "first": lambda: metaspace("first"),
    "never": lambda: metaspace("never"),
    "bytes": lambda: bytes_of(prefix=False),
    "bytes with a space": lambda: bytes_of(prefix=True),
}


@pytest.fixture(params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    raw = KINDS[request.param]()
    special = ["<unk>", "</s>", *BYTES] if "bytes" not in request.param else ["<unk>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "bytes" in request.param else []
    raw.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        ),
    )
    return raw


def appended(raw: Tokenizer, text: str) -> list[int]:
    async def tokenize(text: str) -> list[int]:
        return raw.encode(text, add_special_tokens=False).ids

    async def detokenize(ids: list[int]) -> str:
        return raw.decode(ids, skip_special_tokens=False)

    return asyncio.run(appended_text.token_ids(text, tokenize, detokenize, {}))


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_behind_others_spell_the_text(tokenizer: Tokenizer, text: str) -> None:
    before = tokenizer.encode("The answer 27+58", add_special_tokens=False).ids
    said = tokenizer.decode(before, skip_special_tokens=False)
    whole = tokenizer.decode(before + appended(tokenizer, text), skip_special_tokens=False)
    assert whole == said + text


def test_character_that_no_token_writes_is_said(caplog: pytest.LogCaptureFixture) -> None:
    raw = _byte_pairs()
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    raw.decoder = decoders.Metaspace(prepend_scheme="always")
    raw.train_from_iterator(
        [*CORPUS, "0 a 0a"], trainers.BpeTrainer(special_tokens=["<unk>"], show_progress=False)
    )
    with caplog.at_level(logging.WARNING):
        tokens = [raw.id_to_token(one) for one in appended(raw, "85é")]
    assert "".join(map(str, tokens)) == "85<unk>"
    assert "cannot write 'é'" in caplog.text


def test_tokenizer_that_puts_nothing_in_front_is_asked_once_a_text() -> None:
    asked: list[str] = []

    async def tokenize(text: str) -> list[int]:
        asked.append(text)
        return list(text.encode())

    async def detokenize(ids: list[int]) -> str:
        return bytes(ids).decode()

    async def main() -> None:
        facts: dict[str, bool] = {}
        for _ in range(3):
            assert await appended_text.token_ids("=85", tokenize, detokenize, facts) == list(b"=85")

    asyncio.run(main())
    assert asked == ["0", "a", "=85", "=85", "=85"]
