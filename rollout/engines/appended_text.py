"""Tokenise a text that stands behind other tokens, so that its tokens spell it and nothing else.

Many tokenizers put a space in front of every text (SentencePiece's dummy prefix, Metaspace,
`add_prefix_space`), some in front of what follows a special token too. So the text is tokenised behind
another one, whose tokens are then taken away, and what is left is read back. That works with what any server
offers, without its tokenizer.
"""

import logging
from collections.abc import Awaitable, Callable
from itertools import takewhile

from rollout.engines.answers import RequestRefused

log = logging.getLogger(__name__)

Tokenize = Callable[[str], Awaitable[list[int]]]
Detokenize = Callable[[list[int]], Awaitable[str]]
ANCHORS = ("\n", "0", "a", ".", ")")
"""Texts to stand in front; one that no token joins with the text is used."""
_PUTS_SPACE = "puts a space"


async def token_ids(
    text: str, tokenize: Tokenize, detokenize: Detokenize, facts: dict[str, bool]
) -> list[int]:
    """Return tokens that spell the text behind other ones. `facts`: what is known of the tokenizer, kept from
    call to call.
    """
    if not text or not await _puts_space(tokenize, detokenize, facts):
        return await tokenize(text)
    ids: list[int] = []
    while text:
        tokens, spelt = await _behind(text, tokenize, detokenize)
        if 0 < spelt < len(text):  # behind a special token in the text there is a space again
            before, covered = await _behind(text[:spelt], tokenize, detokenize)
            if covered == spelt:
                ids, text = ids + before, text[spelt:]
                continue
        if spelt < len(text) and not facts.setdefault(f"misspells {text[spelt]}", False):
            facts[f"misspells {text[spelt]}"] = True
            log.warning("the tokenizer cannot write %r, which an environment appends", text[spelt])
        return ids + tokens
    return ids


async def _puts_space(tokenize: Tokenize, detokenize: Detokenize, facts: dict[str, bool]) -> bool:
    """Return whether a text that is tokenised by itself begins with a space that it has not."""
    if _PUTS_SPACE not in facts:
        first, second = await tokenize("0"), await tokenize("a")
        try:
            facts[_PUTS_SPACE] = await detokenize(first + second) == f"{await detokenize(first)} a"
        except RequestRefused:  # a server that cannot read tokens back
            facts[_PUTS_SPACE] = False
    return facts[_PUTS_SPACE]


async def _behind(text: str, tokenize: Tokenize, detokenize: Detokenize) -> tuple[list[int], int]:
    """Return tokens for a text behind others, and how many of its characters they spell from the first on."""
    best, most = await tokenize(text), -1
    for anchor in ANCHORS:
        front, all_tokens = await tokenize(anchor), await tokenize(anchor + text)
        if all_tokens[: len(front)] != front:
            continue
        before, after = await detokenize(front), await detokenize(all_tokens)
        if after == before + text:
            return all_tokens[len(front) :], len(text)
        pairs = zip(after.removeprefix(before), text, strict=False)
        spelt = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        if after.startswith(before) and spelt > most:
            best, most = all_tokens[len(front) :], spelt
    return best, max(most, 0)
