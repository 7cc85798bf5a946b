"""Count what a server has generated since it was started, as vLLM says it to Prometheus (GET /metrics)."""

import re
from typing import NamedTuple, Self

TOKENS, COMPLETIONS = "vllm:generation_tokens_total", "vllm:request_success_total"


class Generated(NamedTuple):
    """What a server has generated. In a vLLM that keeps no statistics, nothing."""

    tokens: int
    """Generated tokens, those of unfinished completions too."""
    completions: int
    """Completions that are finished."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return the sums of the answer's figures, which may be split, by engine or reason of the end."""
        return cls(_sum(TOKENS, text), _sum(COMPLETIONS, text))

    def text(self) -> str:
        """Return the answer that says it."""
        return f"{TOKENS} {self.tokens}\n{COMPLETIONS} {self.completions}\n"

    def since(self, before: "Generated") -> "Generated":
        """Return the part that was generated after `before`; a server that has started again begins at 0."""
        if self.tokens < before.tokens:
            return self
        return Generated(self.tokens - before.tokens, self.completions - before.completions)


def _sum(name: str, text: str) -> int:
    values = re.findall(rf"^{name}(?:{{.*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return int(sum(map(float, values)))
