"""Load the user's functions, named as `module:function` or `file.py:function`, and know their source."""

import difflib
import functools
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from rollout.origin import Code

SUFFIX = ".py"
PACKAGES = ("rollout", "trainer", "coordinator")
"""Ours. The current directory may have files of these names."""
_IMPORTING = (__file__, importlib.__file__)
_MOST_NAMED = 8
"""So many functions of a module are named to somebody who has named none of them."""
_searched: list[str] = []
"""Where this process searched for modules before it loaded code of the user's."""


class PluginError(ValueError):
    """A `module:function` cannot be loaded; the message says why."""


def load_function(name: str, *, make: bool = True) -> Callable[..., Any]:
    """Return the function that `module:function` names, or an object of the class that it names, if one is
    called like a function; with `make=False` the class itself. Searches the current directory too; in place
    of a module a file can stand (`rewards/mine.py:score`), whose directory is searched as well. Raises
    PluginError.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise PluginError(f"{name!r} is not of the form module:function")
    file = Path(module_name).absolute() if module_name.endswith(SUFFIX) else None
    module_name = module_of(name)
    search_here()
    if (file is None or str(file.parent) == _here()) and (hidden := hidden_file(module_name)):
        raise PluginError(hidden)
    try:
        with _before_here(file.parent) if file else nullcontext():
            module = importlib.import_module(module_name)
    except Exception as error:  # the user's module may raise anything when it is imported
        sys.path = search_path()
        if file and not file.is_file():
            raise PluginError(f"{file}: no such file") from error
        error_text = " ".join(str(error).split())
        searched = f"looked for in {_here() or 'no directory'}, on PYTHONPATH and in what is installed"
        # The module that lacks a name: of `from queue import Tasks`, of `import queue; queue.Tasks`
        lacking = getattr(error, "name", None) if isinstance(error, ImportError) else None
        lacking = lacking or getattr(getattr(error, "obj", None), "__name__", "")
        is_said = isinstance(error, SyntaxError)
        if file and isinstance(error, ModuleNotFoundError) and not hidden_file(str(lacking)):
            error_text += (
                f"; install it on every node, or keep the function in a file that does not import {lacking}"
            )
        where = hidden_file(str(lacking)) or _raised_at(error) or ("" if is_said else searched)
        raise PluginError(
            f"module {module_name!r} cannot be imported: {type(error).__name__}: {error_text}"
            f"{where and f' ({where})'}"
        ) from error
    sys.path = search_path()  # what this program imports later must be found too
    imported = getattr(module, "__file__", None) or module_name
    if file and os.path.realpath(imported) != os.path.realpath(file):
        if not file.is_file():
            raise PluginError(f"{file}: no such file")
        raise PluginError(f"{file} is hidden by {imported}; give your file another name")
    function = getattr(module, function_name, None)
    if not callable(function):
        problem = "no such name" if function is None else f"a {type(function).__name__}, no function"
        raise PluginError(f"{title_of(name)!r}: {problem} in {imported}{_named_like(function_name, module)}")
    if (
        not make
        or not inspect.isclass(function)
        or not any("__call__" in vars(base) for base in function.__mro__)
    ):
        return function
    try:
        instance: Any = function()
        return instance
    except Exception as error:  # as of the module
        error_text = " ".join(str(error).split())
        raise PluginError(
            f"class {name!r} cannot be made without arguments: {type(error).__name__}: {error_text}; make an "
            f"object of it in {module_name}, and name that"
        ) from error


@contextmanager
def _before_here(directory: Path) -> Iterator[None]:
    """Have imports search a directory right before the current one, and later behind it. Do nothing where
    they search it earlier.
    """
    here, place = _here(), str(directory)
    index = sys.path.index(here) if here in sys.path else len(sys.path)
    if place in sys.path[: index + 1]:
        yield
        return
    sys.path.insert(index, place)
    try:
        yield
    finally:
        sys.path = [path for path in search_path() if path != place] + [place]


def _named_like(typed: str, module: Any) -> str:
    """Say which function of a module is spelled most like what was typed, else which ones it has."""
    there = [
        name for name, value in vars(module).items()
        if inspect.isroutine(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    if near := difflib.get_close_matches(typed, there, n=1):
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(there[:_MOST_NAMED])}" if there else ""


def _raised_at(error: Exception) -> str:
    """Return the line of the user's module that has raised; an empty text if none was reached."""
    lines = (frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename not in _IMPORTING)
    first = next((frame for frame in lines if not frame.filename.startswith("<frozen ")), None)
    return f"{first.filename}, line {first.lineno}" if first else ""


def module_of(name: str) -> str:
    """Return the module of `module:function`, or of `file.py:function`."""
    module = name.partition(":")[0]
    return Path(module).stem if module.endswith(SUFFIX) else module


def with_whole_path(name: str) -> str:
    """Return `file.py:function` with the whole path of a file that is here: a node may be started in another
    directory. Any other name stays as it is.
    """
    file, sign, function = name.partition(":")
    is_here = sign and file.endswith(SUFFIX) and Path(file).is_file()
    return f"{Path(file).absolute()}:{function}" if is_here else name


def title_of(name: str) -> str:
    """Return the short name of `DIR/file.py:function`, file.py:function; any other name stays as it is."""
    file, sign, function = name.partition(":")
    return f"{Path(file).name}:{function}" if sign and file.endswith(SUFFIX) else name


def search_here() -> None:
    """Have imports search the current directory, behind everything else: a file there may well be named like
    one of our packages, of the standard library, or of what is installed.
    """
    sys.path = search_path()
    for package in PACKAGES:  # what finds an editable installation of them is asked after all of sys.path
        with suppress(ImportError):
            importlib.import_module(package)
    if (here := _here()) and here not in sys.path:
        sys.path.append(here)
    if not _searched:
        _searched.extend(sys.path)


def _here() -> str:
    """Return the current directory; empty if it was removed, which user code may have gone to."""
    with suppress(FileNotFoundError):
        return os.getcwd()
    return ""


def search_path() -> list[str]:
    """Return where imports search: where they do now, and last where they did before the user's code was
    loaded, which may have taken that away, or put there what is no path.
    """
    now: Any = sys.path
    paths = [path for path in now if isinstance(path, str)] if isinstance(now, list) else list[str]()
    return list(dict.fromkeys([*paths, *_searched]))


def keep_process() -> None:
    """Keep code of the user's from taking what this program needs in the same process: calls that are as deep
    as before, and files that others can read.
    """
    least, limit = sys.getrecursionlimit(), sys.setrecursionlimit
    sys.setrecursionlimit = lambda new, /: limit(max(new, least))
    mask = os.umask(0o077)
    os.umask(mask)
    os.umask = lambda _new, /: mask


def hidden_file(module_name: str) -> str:
    """Say that imports of a module miss its file in the current directory, and what to do; an empty text if
    they find it, or one that is equal, or if there is none.
    """
    if not module_name:
        return ""
    top, *inner = module_name.split(".")
    spec = None
    with suppress(ValueError, ImportError):
        spec = importlib.util.find_spec(top)
    file = _source_file(Path(top), inner)
    if file is None or spec is None:
        return ""
    places = spec.submodule_search_locations or [str(spec.origin).removesuffix(".py")]
    for other in filter(None, (_source_file(Path(place), inner) for place in places)):
        if other.samefile(file) or other.read_bytes() == file.read_bytes():
            return ""
    kind = "Flagpost's own package" if top in PACKAGES else "Python's own module"
    kind = kind if top in {*PACKAGES, *sys.stdlib_module_names} else f"the installed module at {places[0]}, "
    path = file.absolute()
    return f"{path} is hidden by {kind} {top!r}, which imports find first; give your file another name"


def is_installed(library: str) -> bool:
    """Return whether a library can be imported: a folder of that name in the current directory is none."""
    spec = importlib.util.find_spec(library)
    return spec is not None and spec.origin is not None


def _source_file(top: Path, inner: Sequence[str]) -> Path | None:
    """Return the file of a module in the package, or the module, at `top`; None if there is none."""
    module = top.joinpath(*inner)
    files = (module / "__init__.py", module.with_name(f"{module.name}.py"))
    return next((file for file in files if file.is_file()), None)


def check_call(function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raise PluginError if `function` certainly cannot be called with positional arguments of these names,
    or yields where it should return. What cannot be known passes.
    """
    try:  # the wrapper of a decorator may take others than the function in it
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # it is written in C
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        raise PluginError(
            f"it takes {signature}, but is called with ({', '.join(arguments)}); give it these parameters"
        ) from None
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError("it yields; it must return its result")


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a function, or an object that is called like one, is `async def`."""
    return any(map(inspect.iscoroutinefunction, (function, _called(function))))


def may_be_async(function: Callable[..., Any]) -> bool:
    """Return whether `function`, or one that it wraps, is async, or may be: it takes `*args`, as wrappers do,
    or is written in C.
    """
    codes = [(layer, getattr(_called(layer), "__code__", None)) for layer in _layers(function)]
    return any(code is None or code.co_flags & inspect.CO_VARARGS or is_async(layer) for layer, code in codes)


def _called(function: Any) -> Any:
    """Return the function that runs when `function` is called."""
    return function if inspect.isroutine(function) else type(function).__call__


def _layers(function: Any) -> Iterator[Any]:
    """Yield the function and those that it wraps, the innermost last; a `partial` is none of them."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, functools.partial):
            function = function.func
            continue
        yield function
        function = getattr(function, "__wrapped__", None)


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
    behind = str(getattr(innermost, "behind", ""))
    return Code(name, hashlib.sha256("".join([*digests, version, behind]).encode()).hexdigest()[:16])


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
        sys.meta_path.insert(0, _AsItWas(loaded))


class _AsItWas(importlib.abc.MetaPathFinder):
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
    *_, innermost = _layers(function)
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
