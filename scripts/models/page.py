"""Write docs/models.md from what the columns returned."""

import re
from collections.abc import Iterable
from datetime import date

from scripts.models.columns import COLUMNS
from scripts.models.families import NO, Tried

HEAD = """# Models

    run --model /shared/models/Qwen3-0.6B --tasks tasks.jsonl --dry-run

checks whether a model fits. The table lists every model type of `AutoModelForCausalLM` in transformers,
tested on {day} with {versions}.
`python -m scripts.models --vllm .venv-vllm/bin/python` writes this page.
It builds a tiny random model of each family, in float32 on a CPU, and tests it in each way. A number is an
error below 1e-3, which float32 rounding can explain. **no** is followed by a larger error, or by the number
of a [reason](#reasons). Some reasons come from the tiny model or the CPU.

Models with `longrope` (Phi 3.5, Phi 4 mini) or `dynamic` change all positions once a sequence is long.
Flagpost keeps sequences shorter than that: for Phi 3.5 the context is 4096 tokens, also for
`--max-model-len` of your own server.

- **rows**: how [packed sequences](gpus.md#batches) in one row are kept apart: by positions, by masks, or
  because each is *alone* in its row; and the largest error of a logprob compared with the sequence on its
  own.
- **shared prompts**: the same, if the prompt is computed once for several samples.
- **sharded**: an optimizer step with FSDP2 over two processes: the relative error of the gradient norm, and
  the error of the loss. **tensor parallel**: the same, with each layer split over two processes.
- **context parallel** (no column): the same, with each sequence split over two. It is refused for families
  that are *alone* in a row, and correct for all others except: {exceptions}.
- **LoRA**: a step with adapters on all linear layers except expert routers; the number of adapted modules.
- **embedded engine**: generation for prompts of two lengths at once, in its default float64; the largest
  difference between its logprobs and the trainer's.
- **vLLM**: the same with vLLM on a CPU, before and after it has reloaded and verified the weights
  ([gpus.md](gpus.md#how-weights-are-verified)). \\*: using transformers' code.
"""

PICTURES = """## With pictures

`python -m scripts.models --pictures --vllm .venv-vllm/bin/python` tests these. For `mistral3` transformers
needs torchvision, for `smolvlm` num2words. vLLM on CPUs processes pictures of `gemma3` causally.
"""
CONTEXT = "context parallel"
"""The column that the page has in a sentence."""
SEEING = ("rows", "shared prompts", "sharded", "LoRA", "embedded engine", "vLLM")
"""Columns of the table of families that are shown pictures."""
SHORTER = {
    r"trainer\.tensor_parallel_size=\d+ and \w+: (.*); use 1": r"\1",
    r"^its plan asks for .*": "transformers' tensor-parallel plan for it asks for what is not there",
    r"(error \d)\.\d(e[+-]\d+)": r"\1\2",
    r"trainer\.lora\.targets=all-linear: \[PEFT\S* (.*?) \(model_type=.*": r"peft: \1",
    r".*are not supported for now.*": "vLLM has no such architecture",
    r".*does not recognize this architecture.*": "the transformers beside vLLM has no such family",
    r"ValidationError: 1 validation error for ModelConfig Value error, (.*?) \[type=.*": r"\1",
    r"<class '[\w.]*'>": "its class",
    r"VLLMValidationError: At most (\d) image.*": r"at most \1 picture in a prompt",
}
"""Patterns in reasons, and what is shown in their place."""


def page(tried: dict[str, Tried], versions: str) -> str:
    """Return the page's text, from what try_family returned for each family."""
    columns = [name for name in (*COLUMNS, "vLLM") if name != CONTEXT]
    rows = {family: {**cells} for family, cells in tried.items() if isinstance(cells, dict)}
    exceptions = [
        family
        for family, cells in rows.items()
        if cells.pop(CONTEXT, "").startswith(NO) != cells["rows"].startswith("alone")
    ]
    reasons = list(dict.fromkeys(reason for cells in rows.values() for reason in _reasons(cells.values())))
    exceptions = ", ".join(exceptions) or "none"
    lines = [HEAD.format(day=date.today(), versions=versions, exceptions=exceptions)]
    lines += [f"| family | {' | '.join(columns)} |", f"|{'---|' * (len(columns) + 1)}"]
    for family, cells in rows.items():
        shown = [_cell(cells.get(column, "not tried"), reasons) for column in columns]
        lines.append(f"| {family} | {' | '.join(shown)} |")
    lines += ["", "## Reasons", ""]
    lines += [f"{number}. {_plain(reason)}" for number, reason in enumerate(reasons, 1)]
    lines += ["", "## Not tried, or refused", ""]
    refused: dict[str, list[str]] = {}
    for family, why in tried.items():
        if isinstance(why, str):
            refused.setdefault(why.replace(f"a {family} model", "the model"), []).append(family)
    lines += [f"- {', '.join(families)}: {_plain(why)}" for why, families in refused.items()]
    return "\n".join([*lines, ""])


def pictures(tried: dict[str, Tried]) -> str:
    """Return the end of the page, from what try_family returned for families that are shown pictures."""
    lines = [PICTURES, f"| family | {' | '.join(SEEING)} |", f"|{'---|' * (len(SEEING) + 1)}"]
    for family, cells in tried.items():
        if isinstance(cells, str):
            lines.append(f"| {family} | **no**: {_plain(cells)} |{' |' * (len(SEEING) - 1)}")
        else:
            shown = [
                f"**no**: {_plain(_reason(cell))}" if cell.startswith(NO) else cell
                for cell in (cells.get(column, "") for column in SEEING)
            ]
            lines.append(f"| {family} | {' | '.join(shown)} |")
    return "\n".join([*lines, ""])


def _reasons(cells: Iterable[str]) -> list[str]:
    found = [_reason(cell) for cell in cells if cell.startswith(NO)]
    return [reason for reason in found if not reason.startswith("error ")]


def _reason(cell: str) -> str:
    """Return why a cell says no, in the same words for each family."""
    why = cell.removeprefix(NO)
    for words, fewer in SHORTER.items():
        why = re.sub(words, fewer, why)
    return why


def _cell(cell: str, reasons: list[str]) -> str:
    if not cell.startswith(NO):
        return cell
    reason = _reason(cell)
    return (
        f"**no** {reason.removeprefix('error ')}"
        if reason.startswith("error ")
        else f"**no** ({reasons.index(reason) + 1})"
    )


def _plain(text: str, longest: int = 60) -> str:
    """Return the text as Markdown shows it, cut if it is long."""
    cut = text if len(text) <= longest else f"{text[:longest].rpartition(' ')[0]} ..."
    return re.sub(r"([|<>*_`\[\]])", r"\\\1", cut.replace("\n", " "))
