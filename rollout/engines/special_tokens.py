"""Read what the files of a model directory say of its special tokens, and of those that end a sequence.

Without torch or transformers. Engines leave special tokens out of a text, so a setting that names one must
work by its id.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout.engines.model_dir import read_json
from rollout.engines.sentencepiece_file import CONTROL, USER_DEFINED, VocabularyPiece, read_pieces
from rollout.storage import files

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PIECES = "tokenizer.model"
_FURTHER = ("additional_special_tokens", "extra_special_tokens")
_OF_TEKKEN = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    *("[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
"""The special tokens, by their ids, of a tekken.json that lists none: of Mistral's tokenizers up to v7."""


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens of a model."""

    ids: Mapping[str, int] = field(default_factory=dict[str, int])
    """By their text."""
    end_ids: tuple[int, ...] = ()
    """What ends a sequence by the tokenizer, generation_config.json or config.json, the tokenizer's first."""
    not_special: Mapping[str, int] = field(default_factory=dict[str, int], compare=False)
    """Added tokens that are not special: engines leave them in a text."""
    words: int = field(default=0, compare=False)
    """One more than the largest id of the tokens that were not added."""

    def stop_ids(self, stop: Iterable[str]) -> dict[int, str]:
        """Id -> text of the strings that are one special token each."""
        return {self.ids[text]: text for text in stop if text in self.ids}

    def are_in(self, *texts: str | None) -> bool:
        """Return whether one of the texts has a special token in it."""
        return any(mark in text for text in texts if text for mark in self.ids)

    def without(self, text: str, texts: Iterable[str]) -> str:
        """Return a text without the special tokens in it, but for those that are in one of `texts`."""
        texts = list(texts)
        left_out = [mark for mark in self.ids if not any(mark in each for each in texts)]
        # The longest first: one may begin as another does.
        return re.sub("|".join(map(re.escape, sorted(left_out, key=len, reverse=True))) or "(?!)", "", text)


NO_SPECIAL_TOKENS = SpecialTokens()
"""The special tokens of a model of which nothing is known."""


def read_special_tokens(model_dir: Path) -> SpecialTokens:
    """Return the special tokens that the directory names; WeightsError for a file that is no JSON object."""
    names = set(files.file_names(model_dir))

    def read(name: str) -> dict[str, Any]:
        return read_json(model_dir / name) if name in names else {}

    tokenizer, config = read("tokenizer.json"), read("tokenizer_config.json")
    named: dict[str, Any] = {**read("special_tokens_map.json"), **config}
    tekken = read("tekken.json")  # of Mistral's own tokenizers
    listed = [
        {"token_str": text, "rank": id} for id, text in enumerate(_OF_TEKKEN if "vocab" in tekken else ())
    ]
    added = [
        {"content": entry["token_str"], "id": entry["rank"], "special": entry.get("is_control", True)}
        for entry in tekken.get("special_tokens") or listed
    ]
    pieces: list[VocabularyPiece] = []
    if not tokenizer and _PIECES in names:
        pieces = read_pieces(files.read(model_dir / _PIECES))
    added += [
        {"content": piece.text, "id": id, "special": piece.kind == CONTROL}
        for id, piece in enumerate(pieces)
        if piece.kind in (CONTROL, USER_DEFINED)
    ]
    if added:
        named = {"eos_token": "</s>", **named}
    added += [entry for entry in tokenizer.get("added_tokens") or () if isinstance(entry, dict)]
    added += [{**entry, "id": int(key)} for key, entry in (config.get("added_tokens_decoder") or {}).items()]
    vocabulary: dict[str, int] = {piece.text: id for id, piece in enumerate(pieces)}
    vocabulary |= {**_vocabulary(tokenizer), **read("vocab.json")}
    ids_added = {**read("added_tokens.json"), **{entry["content"]: entry["id"] for entry in added}}
    words = max((token for text, token in vocabulary.items() if text not in ids_added), default=-1) + 1
    vocabulary |= ids_added
    special = {entry["content"] for entry in added if entry.get("special")} | set(_special_texts(named))
    ends = [vocabulary.get(_content(named.get("eos_token")))]
    for document in (read("generation_config.json"), read("config.json")):
        for part in (document, document.get("text_config")):
            ids = part.get("eos_token_id") if isinstance(part, dict) else None
            ends += ids if isinstance(ids, list) else [ids]
    return SpecialTokens(
        ids={text: vocabulary[text] for text in sorted(special) if text and text in vocabulary},
        end_ids=tuple(
            dict.fromkeys(token_id for token_id in ends if type(token_id) is int and token_id >= 0)
        ),
        not_special={text: token for text, token in ids_added.items() if text and text not in special},
        words=words,
    )


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of the tokens of tokenizer.json, which lists them, or their scores."""
    tokens = (tokenizer.get("model") or {}).get("vocab") or {}
    return tokens if isinstance(tokens, dict) else {token: id for id, (token, _) in enumerate(tokens)}


def _special_texts(config: Mapping[str, Any]) -> list[str]:
    further = [config.get(name) or () for name in _FURTHER]
    listed = [each for entry in further for each in (entry.values() if isinstance(entry, dict) else entry)]
    return [_content(value) for value in [*(config.get(name) for name in _NAMED), *listed]]


def _content(token: Any) -> str:
    """Return the text of a special token, which is one or an object that has it."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""
