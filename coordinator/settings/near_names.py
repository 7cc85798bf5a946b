"""Find the setting whose name was meant: by its names in other trainers, its last part, its spelling."""

import difflib
from collections.abc import Sequence

from coordinator.settings.names_elsewhere import ALIASES

NEAR, NEARER = 0.75, 0.85
"""How alike two spellings must be, from 0 to 1, with up to two letters more or less, and with more: nobody
means `gpus` with `bogus`, or `batch_size` with `gen_batch_size`.
"""
NEAR_WORD = 0.6
"""So much must each word of a name be like that of the other, where they have equally many."""
SHORT = 4
"""The last part of a dotted name that has so many letters says too little: nobody means `dtype` with `type`.
"""


def known_as(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting of that name, whatever its section and spelled with - or _, or by another name."""
    word = plain(typed)
    leaf = word.rpartition(".")[2]
    if word in known:
        return word
    by_leaf = (name for name in known if name.rpartition(".")[2] == leaf)
    section, table = word.rpartition(".")[0].rpartition(".")[2], "rollout.chat_template"
    if ALIASES.get(section) == table and leaf not in ALIASES:
        return f"{table}.{leaf}"
    return ALIASES.get(word) or ALIASES.get(pair_of(word)) or next(by_leaf, None) or ALIASES.get(leaf)


def spelled_like(typed: str, known: Sequence[str]) -> str | None:
    """Return the setting, or section, whose name or last part is spelled most like what was typed."""
    word = plain(typed)
    sections = {name.rpartition(".")[0] for name in known} - {""}
    leaves = {name.rpartition(".")[2]: name for name in reversed(known)}
    # Within a section only what follows must be alike: trainer.project_name is not trainer.betas.
    names = () if word.rpartition(".")[0] in sections else (*known, *sections)
    # Most of a long name of theirs is its sections, which all of them begin with.
    aliases = {name: setting for name, setting in ALIASES.items() if "." not in name}
    spellings = {**aliases, **leaves, **{name: name for name in names}}
    leaf = word.rpartition(".")[2]
    for part in (word, leaf) if len(leaf) > SHORT else (word,):
        for near in difflib.get_close_matches(part, spellings, n=3, cutoff=NEAR):
            likeness = _likeness(near, part)
            is_near = abs(len(near) - len(part)) <= 2 or likeness >= NEARER or near.startswith(part)
            if is_near and _is_like_by_word(near, part):
                return spellings[near]
    return None


def _is_like_by_word(near: str, typed: str) -> bool:
    """Return whether no word of a name is another one: packing_strategy is not sharding_strategy."""
    pairs = list(zip(near.split("_"), typed.split("_"), strict=False))
    return near.count("_") != typed.count("_") or all(
        _likeness(*pair) >= NEAR_WORD and (max(map(len, pair)) >= SHORT or pair[0] == pair[1])
        for pair in pairs
    )


def _likeness(first: str, second: str) -> float:
    return difflib.SequenceMatcher(None, first, second).ratio()


def pair_of(word: str) -> str:
    """Return the last two parts of a dotted name, which say more than the last one alone; else the name."""
    return ".".join(word.split(".")[-2:])


def plain(typed: str) -> str:
    """Return a name as it was typed without what a command line or a file puts around it."""
    return typed.strip(" +~:").lstrip("-").replace("-", "_").lower()
