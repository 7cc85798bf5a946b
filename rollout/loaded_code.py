"""The source of code that a process has loaded: its digest, and its texts for another process."""

import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rollout.origin import Code
from rollout.plugins import layers, module_of


def code_of(name: str, function: Any) -> Code:
    """Return the Code behind the name of a reward or an environment, which is loaded.

    The digest is of the file of the module that `name` names, of the file that defines the function (maybe
    another one), of the version of the library that a built-in reward asks (`function.library`), and of what
    else the function says is behind it (`function.behind`). It is the same on every machine that has the same
    files. Modules that these files import are not covered.
    """
    texts = [_source(module) for module in _modules(name, function)]
    digests = [hashlib.sha256(text).hexdigest() if text else "" for text in texts]
    innermost = _innermost(function)
    version = _version(getattr(innermost, "library", ""))
    code_behind = str(getattr(innermost, "behind", ""))
    return Code(name, hashlib.sha256("".join([*digests, version, code_behind]).encode()).hexdigest()[:16])


def package_code(module: str) -> str:
    """Return a digest of the Python files of a module or a package, and of the version that it is installed
    as. Imports nothing.
    """
    spec = importlib.util.find_spec(module)
    places = [Path(place) for place in (spec and spec.submodule_search_locations) or ()]
    files = [(file, file.relative_to(place)) for place in places for file in sorted(place.rglob("*.py"))]
    if spec and not places and spec.origin:
        files = [(Path(spec.origin), Path(module))]
    digest = hashlib.sha256()
    for file, name in files:
        digest.update(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for library in importlib.metadata.packages_distributions().get(module, ()):
        digest.update(f"{library} {_version(library)}\n".encode())
    return digest.hexdigest()


def sources(name: str, function: Any) -> dict[str, tuple[str, str]]:
    """Return path and text of the files that `code_of` covers, by module, for another process."""
    texts: dict[str, tuple[str, str]] = {}
    for module in _modules(name, function):
        path = getattr(sys.modules.get(module), "__file__", None)
        with suppress(UnicodeDecodeError):  # no source, or one in an old encoding: the file has to do
            if path and path.endswith(".py") and (text := _source(module).decode()):
                texts[module] = path, text
    return texts


def load_as_it_was(loaded: Mapping[str, tuple[str, str]]) -> None:
    """Have this process import modules from what `sources` has returned in another one: their files may have
    changed since, and an iteration's samples must be scored by the code that its digest names.
    """
    if loaded:
        sys.meta_path.insert(0, _RecordedModuleFinder(loaded))


class _RecordedModuleFinder(importlib.abc.MetaPathFinder):
    def __init__(self, loaded: Mapping[str, tuple[str, str]]) -> None:
        self._loaded = loaded

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in self._loaded:
            return None
        file, text = self._loaded[fullname]
        is_package = [str(Path(file).parent)] if Path(file).name == "__init__.py" else None
        loader = _FromText(fullname, file, text.encode())
        return importlib.util.spec_from_file_location(
            fullname, file, loader=loader, submodule_search_locations=is_package
        )


class _FromText(importlib.machinery.SourceFileLoader):
    """Loads a module from a text; there is no bytecode of it."""

    def __init__(self, fullname: str, path: str, text: bytes) -> None:
        super().__init__(fullname, path)
        self.text = text

    def get_data(self, path: str) -> bytes:
        return self.text if path == self.path else super().get_data(path)

    def path_stats(self, path: Any) -> Any:
        raise OSError("it is not the file that is loaded")


def _modules(name: str, function: Any) -> list[str]:
    """Return the modules that `name` and the function's definition name."""
    named = {module_of(name)} if ":" in name else set[str]()
    return sorted({*named, getattr(_innermost(function), "__module__", None) or ""})


def _innermost(function: Any) -> Any:
    *_, innermost = layers(function)
    return innermost


@functools.cache  # the file may change while the process lives, but not what it has loaded
def _source(module: str) -> bytes:
    """Return the content of a loaded module's file; empty for a module that has none."""
    loaded = sys.modules.get(module)
    loader = getattr(getattr(loaded, "__spec__", None), "loader", None)
    if isinstance(loader, _FromText):
        return loader.text
    path = getattr(loaded, "__file__", None)
    with suppress(OSError):
        return Path(path).read_bytes() if path else b""
    return b""


def _version(library: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(library) if library else ""
    return ""
