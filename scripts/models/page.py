"""Write docs/models.md from what the columns returned."""

import re
from collections.abc import Iterable
from datetime import date

from scripts.models.columns import COLUMNS
from scripts.models.families import NO, Tried

HEAD = """# Models

    run --model /shared/models/Qwen3-0.6B --tasks tasks.jsonl --dry-run

says whether a model fits. Below is every model type of `AutoModelForCausalLM` in transformers, tried
on {day} with {versions}.
`python -m scripts.models --vllm .venv-vllm/bin/python` writes this page. It makes a tiny random model of each
family, in float32 on a CPU, and tries it in each way. A number is an error that float32's rounding may make,
less than 1e-3. **no** is followed by a larger error, or by the number of its reason, [below](#reasons). Some
reasons lie in the tiny model or in the CPU.

Models with `longrope` (Phi 3.5, Phi 4 mini) or `dynamic` compute all positions otherwise once a sequence is
long. None gets that long here: for Phi 3.5 the context is 4096 tokens, `--max-model-len` of your own server.

- **rows**: what keeps sequences apart that share a row ([gpus.md](gpus.md#batches)): positions, or
  masks, or that one is *alone* in a row; and the largest error of a logprob against the sequence on its own.
- **shared prompts**: the same, where the prompt is computed once for several samples.
- **sharded**: an optimizer step with FSDP2 over two processes: the error of the gradient's norm (a fraction)
  and of the loss. **tensor parallel**: the same, with each layer on two processes.
- **context parallel**, no column: the same, with each sequence on two. It is refused where one is *alone* in
  a row, and right elsewhere, but for: {exceptions}.
- **LoRA**: a step with adapters on all linear layers but routers of experts; how many modules have one.
- **embedded engine**: it generates for prompts of two lengths at once, in its default float64; the largest
  error of its logprobs against the trainer's.
- **vLLM**: the same with vLLM on a CPU, before and after it has loaded the weights anew and proved them
  ([gpus.md](gpus.md#what-is-proved)). \\*: with transformers' code.
"""

PICTURES = """## With pictures

`python -m scripts.models --pictures --vllm .venv-vllm/bin/python` tries these. Of `mistral3`
transformers needs torchvision, of `smolvlm` num2words. vLLM for CPUs looks at pictures of `gemma3` causally.
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
