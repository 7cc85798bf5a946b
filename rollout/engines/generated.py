"""Count what a server has generated since it was started, as vLLM says it to Prometheus (GET /metrics)."""

import re
from typing import NamedTuple, Self

TOKENS, COMPLETIONS = "vllm:generation_tokens_total", "vllm:request_success_total"


class Generated(NamedTuple):
    """What a server has generated. In a vLLM that keeps no statistics, nothing."""

    tokens: int
    """Of unfinished completions too."""
    completions: int
    """Those that are finished."""

    @classmethod
    def read(cls, text: str) -> Self:
        """Return what the answer says: a figure may be split, by engine or by the reason of the end."""
        return cls(_sum(TOKENS, text), _sum(COMPLETIONS, text))

    def text(self) -> str:
        """Return the answer that says it."""
        return f"{TOKENS} {self.tokens}\n{COMPLETIONS} {self.completions}\n"

    def since(self, before: "Generated") -> "Generated":
        """Return what was generated after `before`; a server that has started again begins with nothing."""
        if self.tokens < before.tokens:
            return self
        return Generated(self.tokens - before.tokens, self.completions - before.completions)


def _sum(name: str, text: str) -> int:
    values = re.findall(rf"^{name}(?:{{.*}})? ([0-9.e+]+)$", text, re.MULTILINE)
    return int(sum(map(float, values)))
