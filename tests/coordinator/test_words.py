"""Names say what a thing is: in swept rooms, none is a participle or a pronoun that would fit everything."""

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
WORDS = """
said found given of about told one made wanted own what asked mine theirs ours there here whole held kept left
rest taken tried moved over both seen gone others how who which apart beside behind away meant then
"""
EMPTY = frozenset(WORDS.split())
SWEPT = ("coordinator", "rollout", "trainer")
"""Packages, rooms and files in which the sweep is done."""
EXCEPTIONS = {
    ("coordinator/protocol/records.py", "given"): "a key of epoch records on disk",
    ("coordinator/journal/events.py", "what"): "a key of events on disk, given as a keyword",
    ("coordinator/start/last_settings.py", "then"): "a key of events on disk: a setting has changed",
    ("rollout/environments/openenv.py", "behind"): "an attribute of functions that code_of reads",
    ("rollout/environments/text_gym.py", "behind"): "an attribute of functions that code_of reads",
    ("rollout/environments/verifiers.py", "behind"): "an attribute of functions that code_of reads",
}


def bound_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a module gives a name to."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case ast.arg(arg=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case (
                ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name))
            ):
                yield node.lineno, name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield node.lineno, name
            case _:
                pass


def empty_names(path: Path) -> list[tuple[int, str]]:
    """Return line and name of what has a name without content in a file."""
    return [(line, name) for line, name in bound_names(ast.parse(path.read_text())) if name in EMPTY]


def swept_files() -> list[Path]:
    roots = [REPOSITORY / room for room in SWEPT]
    return [path for root in roots for path in ([root] if root.is_file() else sorted(root.rglob("*.py")))]


def test_names_in_swept_rooms_say_what_a_thing_is() -> None:
    faults: list[str] = []
    excepted: set[tuple[str, str]] = set()
    for path in swept_files():
        place = path.relative_to(REPOSITORY).as_posix()
        for line, name in empty_names(path):
            if (place, name) in EXCEPTIONS:
                excepted.add((place, name))
            else:
                faults.append(f"{place}:{line}: '{name}' fits everything; name what it is")
    assert not faults, "\n".join(faults)
    assert excepted == EXCEPTIONS.keys(), "exceptions that are none any more"


def test_every_way_to_bind_a_name_is_seen() -> None:
    source = """
import json as found
def said(given, *, own=1): ...
class told: ...
about = 1
self.what = 2
for one in [made for made in ()]: ...
with open() as wanted: ...
match 1:
    case [of]: ...
    case {"a": 1, **asked}: ...
try: ...
except OSError as said: ...
"""
    names = {name for _, name in bound_names(ast.parse(source))}
    assert names >= {
        "said",
        "found",
        "given",
        "own",
        "told",
        "about",
        "what",
        "one",
        "made",
        "wanted",
        "of",
        "asked",
    }
