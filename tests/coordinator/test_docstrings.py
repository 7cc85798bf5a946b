"""Docstrings: what they begin with says what a thing is, and the names in them that are of our code exist."""

import re
import sys
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
OURS = ("coordinator", "rollout", "trainer", "scripts")
RIDDLE = re.compile(r'\s*"""(Of|As|Those|These|See|The same)\b')
"""A docstring that begins without a noun: whoever sees it alone learns nothing."""
DOCSTRING = re.compile(r'^\s*"""(.*?)"""', re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"(?:  |^ *)# .*", re.MULTILINE)
DEFINED = re.compile(r"^(?:async )?(?:class|def) (\w+)", re.MULTILINE)
SINGLE = re.compile(r"`([A-Za-z_]\w*)`")
DOTTED = re.compile(r"(?<![\w./$<>:-])([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?![\w/<*(-]|\.\w)")
FILES = re.compile(r"\.(py|json|jsonl|md|toml|html|safetensors|txt|log|ok|model)$")
SETTINGS = re.findall(r"^\| `([\w.]+)`", (REPOSITORY / "docs/settings.md").read_text(), re.MULTILINE)
NOT_OURS = {
    *("add_prefix_space", "bogus", "iteration_N", "my_env", "nohup", "pissa", "pred", "rank_0001"),
    *("bell.node", "group.samples", "policy.with_tools", "sample.reward", "turn.role"),
    *("loss_by_source.math", "trainer.project_name"),
}
"""Names of other programs, and of what an example makes."""


@cache
def sources(*folders: str) -> dict[Path, str]:
    files = [path for folder in folders for path in sorted((REPOSITORY / folder).rglob("*.py"))]
    return {path.relative_to(REPOSITORY): path.read_text() for path in files}


def code_of(source: str) -> str:
    """Return a file without docstrings and comments."""
    return re.sub(r"#.*", "", DOCSTRING.sub("", source))


@cache
def members() -> dict[str, set[str]]:
    """Return the words in each package and module of ours (by its last parts too), and around each class."""
    inside: dict[str, set[str]] = {}
    for path, source in sources(*OURS).items():
        parts = [part for part in path.with_suffix("").parts if part != "__init__"]
        words = {*re.findall(r"\w+", code_of(source))}
        for place in [*(".".join(parts[begin:]) for begin in range(len(parts))), *DEFINED.findall(source)]:
            inside.setdefault(place, set()).update(words)
        for end in range(1, len(parts)):
            for begin in range(end):
                inside.setdefault(".".join(parts[begin:end]), set()).add(parts[end])
    return inside


@cache
def words() -> set[str]:
    return set[str]().union(members(), *members().values())


def stale_names(text: str, code: str = "") -> list[str]:
    """Return the names in a docstring that look like names of our code and are none; `code`: around it."""
    stale = [name for name in SINGLE.findall(text) if name not in words()]
    for name in DOTTED.findall(text):
        (holder, _, last), first = name.rpartition("."), name.partition(".")[0]
        is_ours = (first in members() or last in members()) and name not in members()
        is_other = first in sys.stdlib_module_names or bool(FILES.search(name))
        is_variable = re.search(rf"\b{first}(:|,|\)| = )|import {first}\b", code) or f"{first} = " in text
        is_setting = any(name.startswith(f"{each}.") or each.startswith(name) for each in SETTINGS)
        if is_ours and not is_other and not is_variable and not is_setting:
            holders = (holder, holder.rpartition(".")[2])
            stale += [] if any(last in members().get(each, ()) for each in holders) else [name]
    return [name for name in stale if name not in NOT_OURS]


def test_names_of_our_code_in_docstrings_and_comments_exist() -> None:
    faults: list[str] = []
    for path, source in sources(*OURS).items():
        code = code_of(source)
        texts = [*DOCSTRING.findall(source), *COMMENT.findall(DOCSTRING.sub("", source))]
        faults += [f"{path}: {name}" for text in texts for name in stale_names(text, code)]
    assert not faults, "named in a docstring or a comment, and not there"


def test_names_that_have_moved_or_gone_are_seen() -> None:
    text = "pairs.Preferences, `packed_sequences`, `gone_function`, phase.gone, neighbours.decoder_inputs"
    seen = ["gone_function", "pairs.Preferences", "phase.gone", "neighbours.decoder_inputs"]
    assert stale_names(text) == seen
    assert not stale_names("rollout.max_tokens, run.json, threading.Event, trainer.model.loading")


def test_docstrings_of_attributes_classes_and_modules_begin_with_a_noun() -> None:
    faults: list[str] = []
    for path, source in sources(*OURS, "tests").items():
        lines = ["", *source.splitlines()]
        for number, line in enumerate(lines):
            before = lines[number - 1].partition("  #")[0].strip()
            if RIDDLE.match(line) and (not before.endswith(":") or before.startswith("class ")):
                faults.append(f"{path}:{number}: {line.strip()}")
    assert not faults, "say of what it is a number, a name, a part"
