"""What the files of a model say of its special tokens, and which of them end a sequence."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.engines.completion import completion_of, completion_request
from rollout.engines.special_tokens import SpecialTokens, read_special_tokens
from rollout.origin import Sampling

ADDED = [
    {"id": 0, "content": "<pad>", "special": True},
    {"id": 1, "content": "<end>", "special": True},
    {"id": 2, "content": "<turn>", "special": True},
    {"id": 3, "content": "<plain>", "special": False},
]
TOKENIZER = {"added_tokens": ADDED, "model": {"vocab": {"a": 7, "</s>": 8}}}
MARKS = SpecialTokens({"<pad>": 0, "<end>": 1, "<turn>": 2, "</think>": 9}, (2, 1))


@pytest.mark.parametrize(
    ("documents", "ends"),
    [
        ({}, ()),
        ({"config.json": {"eos_token_id": None}}, ()),
        ({"config.json": {"eos_token_id": 0}, "generation_config.json": {}}, (0,)),
        ({"config.json": {"eos_token_id": 9}, "generation_config.json": {"eos_token_id": [7, 8]}}, (7, 8, 9)),
        ({"config.json": {"text_config": {"eos_token_id": [4, 5]}, "eos_token_id": 5}}, (5, 4)),
        ({"tokenizer.json": TOKENIZER, "tokenizer_config.json": {"eos_token": "<turn>"}}, (2,)),
        ({"tokenizer.json": TOKENIZER, "tokenizer_config.json": {"eos_token": {"content": "</s>"}}}, (8,)),
        ({"tokenizer.json": TOKENIZER, "special_tokens_map.json": {"eos_token": "<end>"}}, (1,)),
        ({"tokenizer.json": {"model": {"vocab": [["a", -1.0], ["</s>", -2.0]]}},
          "tokenizer_config.json": {"eos_token": "</s>"}}, (1,)),
        ({"vocab.json": {"</s>": 5}, "tokenizer_config.json": {"eos_token": "</s>"}}, (5,)),
        ({"tokenizer_config.json": {"eos_token": "<e>", "added_tokens_decoder": {"6": {"content": "<e>"}}},
          "config.json": {"eos_token_id": 1}}, (6, 1)),
    ],
)  # fmt: skip
def test_sequence_ends_at_every_token_that_tokenizer_or_configurations_name(
    documents: dict[str, Any], ends: tuple[int, ...], tmp_path: Path
) -> None:
    for name, document in documents.items():
        (tmp_path / name).write_text(json.dumps(document))
    assert read_special_tokens(tmp_path).end_ids == ends


def test_special_tokens_of_a_tekken_file_are_known(tmp_path: Path) -> None:
    special = [
        {"rank": 2, "token_str": "</s>", "is_control": True},
        {"rank": 5, "token_str": "[/THINK]"},
    ]
    (tmp_path / "tekken.json").write_text(json.dumps({"special_tokens": special}))
    assert read_special_tokens(tmp_path) == SpecialTokens({"</s>": 2, "[/THINK]": 5}, (2,))


def test_tekken_file_that_lists_no_special_tokens_has_those_of_its_time(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_text(json.dumps({"config": {"version": "v3"}, "vocab": []}))
    special_tokens = read_special_tokens(tmp_path)
    assert (special_tokens.end_ids, len(special_tokens.ids)) == ((2,), 20)
    assert [special_tokens.ids[text] for text in ("[INST]", "[TOOL_CALLS]", "[TOOL_CONTENT]")] == [3, 9, 19]


def test_special_tokens_of_a_sentencepiece_model_alone_are_known(tmp_path: Path) -> None:
    pieces = [("<unk>", 2), ("<s>", 3), ("</s>", 3), ("[INST]", 4), ("▁a" * 99, 1), ("</think>", 3)]
    trainer_spec = b"\x12\x02\x18\x01"
    (tmp_path / "tokenizer.model").write_bytes(b"".join(_piece(*each) for each in pieces) + trainer_spec)
    assert read_special_tokens(tmp_path) == SpecialTokens({"</s>": 2, "</think>": 5, "<s>": 1}, (2,))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "[INST]"}')
    assert read_special_tokens(tmp_path).end_ids == (3,)


@pytest.mark.parametrize(
    "data", [b"", b"\x0a", b"\x0a\xff\xff", b"\x0a\x03\x0a\x01\xff", b"IQ== 0\nIg== 1\n"]
)
def test_tokenizer_model_of_another_program_says_nothing(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.model").write_bytes(data)
    assert read_special_tokens(tmp_path) == SpecialTokens()


def _piece(text: str, kind: int) -> bytes:
    """Return a piece as SentencePiece's protobuf has it, with a score."""
    words = text.encode()
    size = bytes([len(words)]) if len(words) < 128 else bytes([len(words) & 127 | 128, len(words) >> 7])
    body = b"\x0a" + size + words + b"\x15" + bytes(4) + bytes([0x18, kind])
    length = bytes([len(body)]) if len(body) < 128 else bytes([len(body) & 127 | 128, len(body) >> 7])
    return b"\x0a" + length + body


def test_special_tokens_are_those_that_decoding_leaves_out(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    (tmp_path / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "added_tokens": [
            {**one, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for one in ADDED
        ],
        "model": {"type": "BPE", "vocab": {"<pad>": 0, "<end>": 1, "<turn>": 2, "<plain>": 3, "a": 4,
                                           "b": 5, "</s>": 6}, "merges": []},
    }))  # fmt: skip
    made = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>")
    made.save_pretrained(tmp_path)
    special_tokens, tokenizer = read_special_tokens(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    hidden = {id for id in range(len(tokenizer)) if not tokenizer.decode([id], skip_special_tokens=True)}
    assert set(special_tokens.ids.values()) == hidden == {0, 1, 2, 6}
    assert special_tokens.end_ids == (6,)


def choice(text: str, stop_reason: Any) -> dict[str, Any]:
    logprobs = {"token_logprobs": [0.0]}
    made = {"prompt_token_ids": [4], "token_ids": [5], "text": text, "logprobs": logprobs}
    return {**made, "finish_reason": "stop", "stop_reason": stop_reason}


def test_stop_string_that_is_a_special_token_works_by_its_id() -> None:
    sampling = Sampling(stop=("<pad>", "x"))
    request = completion_request("a", sampling, MARKS)
    assert (request["stop_token_ids"], request["stop"]) == ([2, 1, 0], ["<pad>", "x"])
    assert request["skip_special_tokens"] is True
    assert completion_of(choice("a", 0), sampling, MARKS).stop_string == "<pad>"
    assert completion_of(choice("a", 1), sampling, MARKS).stop_string == ""  # an end of sequence


@pytest.mark.parametrize("given", [{"stop": ("<pad>\n",)}, {"reasoning_end": "</think>"}])
def test_text_is_searched_for_special_tokens_and_shows_no_other(given: dict[str, Any]) -> None:
    sampling = Sampling(**given)
    assert completion_request("a", sampling, MARKS)["skip_special_tokens"] is False
    text = completion_of(choice("so<turn></think>7<end>", None), sampling, MARKS).text
    assert text == ("so</think>7" if sampling.reasoning_end else "so7")
