"""README, CONTRIBUTING, CHANGELOG and docs/*.md as the tests read them: commands, blocks, links, headings."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [*sorted(REPOSITORY.glob("*.md")), *sorted((REPOSITORY / "docs").glob("*.md"))]

PROGRAMS = (
    *("run", "make", "bash", "sh", "python", "python3", "pip", "pytest", "hf", "vllm", "cat", "head", "tail"),
    *(
        "sbatch",
        "srun",
        "squeue",
        "scancel",
        "scontrol",
        "kubectl",
        "docker",
        "ray",
        "sky",
        "ssh",
        "scp",
        "rsync",
        "git",
    ),
    *("curl", "mount", "sudo", "apt", "export", "source", "cd", "chmod", "mkdir", "cp", "rm", "ls", "env"),
)
"""First words that make a line of an indented block a command."""
COMMAND = re.compile(rf"(?:[A-Z_]+=\S* )*(?:(?:{'|'.join(PROGRAMS)})(?= |$)|\.venv[\w-]*/|\./)")
RUN = re.compile(r"run (?:-|[a-z]+ |[a-z_.]+=)")
"""A code span of `run` that looks so is a command; `run doctor` is a name."""
SHELL = {"sh", "bash", "console", "shell"}


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the word behind the fence, the text."""

    page: str
    kind: str
    text: str


def name(page: Path) -> str:
    """`docs/basics.md`."""
    return str(page.relative_to(REPOSITORY))


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        yield Block(name(page), kind, text)


def commands(page: Path) -> Iterator[str]:
    """Every command of a page: lines of indented and shell blocks, and code spans; without comments."""
    text = page.read_text().replace("\\\n", " ")
    for block in blocks(page):
        if block.kind in SHELL:
            lines = block.text.replace("\\\n", " ").splitlines()
            yield from filter(None, (_bare(line.removeprefix("$ ")) for line in lines))
    text = without_fences(text)
    for line in text.splitlines():
        if line.startswith("    ") and COMMAND.match(line.strip()):
            yield _bare(line)
    for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", re.sub(r"^    .*$", "", text, flags=re.MULTILINE)):
        words = " ".join(span.split())
        first, *rest = words.split()
        is_name = not RUN.match(words) if first == "run" else len(rest) < 2 and first not in {"make", "bash"}
        if COMMAND.match(words) and rest and not is_name and "..." not in words:
            yield words


def _bare(line: str) -> str:
    """A command without its comment and its spaces."""
    return " ".join(re.sub(r"(^|\s+)#.*", "", line).split())


def without_fences(text: str) -> str:
    """The text, with nothing in the place of fenced blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """The targets of a page's links."""
    text = re.sub(r"`[^`\n]*`", "", without_fences(page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(page: Path) -> set[str]:
    """What may stand behind # in a link to a page, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", without_fences(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
