"""Text that is decoded in pieces is the text that is decoded at once, wherever it is cut."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from rollout.engines.completion import whole_characters
from rollout.engines.embedded.text import TextTokenizer

SAID = ("a\u20ac\U0001f600\u00e9 " + 9 * "\u4f60\u597d" + ".").encode()
BROKEN = b"\xf0\x9f\x98\xf0\x9f\x98\xf0\x9f\x98\xf0\x9f\x98"  # characters without their ends


def byte_level() -> Tokenizer:
    """As GPT-2 and Qwen write bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    tokens = [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]
    assert set(tokens) == set(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As Llama 2 and Gemma write the characters that no token has."""
    tokens = [chr(byte) if byte < 128 else f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


@pytest.mark.parametrize("said", [SAID, BROKEN + SAID, SAID + BROKEN, BROKEN])
@pytest.mark.parametrize("made", [byte_level, byte_fallback])
def test_text_that_is_cut_within_a_character_is_put_together_again(
    made: Any, said: bytes, tmp_path: Path
) -> None:
    PreTrainedTokenizerFast(tokenizer_object=made()).save_pretrained(tmp_path)
    texts = TextTokenizer(tmp_path)
    prompt = list(b"ask: ")

    def completion(before: bytes, after: bytes) -> str:
        generation = SimpleNamespace(prompt_ids=[*prompt, *before], skip_special=True)
        row: Any = SimpleNamespace(
            generation=generation, token_ids=list(after), stop_reason=None, finish_reason="length"
        )
        return texts.completion(row)

    whole = completion(b"", said)
    if said == SAID:
        assert whole == said.decode()
    for cut in range(len(said) + 1):
        first = completion(b"", said[:cut])
        assert whole_characters(first) + completion(said[:cut], said[cut:]) == whole, cut
