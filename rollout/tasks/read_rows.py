"""Read the rows of tasks, one after the other: of JSON lines, CSV, Parquet and Arrow files, and of data
sets of Hugging Face. No file is held in memory, but one that is a single JSON document.
"""

import glob
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout.storage import files
from rollout.tasks.file_kinds import HUB, TABLES, NoRowsError, RowError, TaskRow, kind
from rollout.tasks.table_rows import read_arrow, read_hub, read_parquet
from rollout.tasks.text_rows import read_csv, read_json

log = logging.getLogger(__name__)

_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)(?![a-z])")
"""How the files of a split are named, one of which should not be trained on."""
_READERS: dict[str, Callable[[str, str], Iterator[TaskRow]]] = dict(
    zip(TABLES, (read_csv, read_parquet, read_arrow), strict=True)
)


def is_there(source: str) -> bool:
    """Return whether `source` is a file or a directory, or a pattern that fits a file."""
    return files.exists(Path(source)) or ("*" in source and bool(glob.glob(source, recursive=True)))


def rows(source: str, *, default_split: str = "train", images: str = "images") -> Iterator[TaskRow]:
    """Yield the rows of a file, of all files of a directory or of a pattern with `*` in the order of their
    names, or of a data set. The column `images` may hold bytes. Raises RowError.
    """
    if source.startswith(HUB):
        yield from read_hub(source, default_split, images)
        return
    for file in _files(source):
        if Path(file).is_fifo():
            raise RowError(f"{file}: is a pipe, which can be read once alone; write it to a file first")
        is_empty = True
        try:
            for row in _READERS.get(kind(file), read_json)(file, images):
                is_empty = False
                yield row
            if is_empty and file != source:
                log.warning("%s: holds no task, and is left out", file)
        except NoRowsError as error:
            if file == source:
                raise
            log.warning("%s; it is left out", error)
        except FileNotFoundError:
            by_name = "" if Path(file).suffix else f" (a data set of Hugging Face: {HUB}NAME)"
            by_name = " (nothing is fetched: download it first)" if "://" in file else by_name
            is_list = "," in file or files.exists(Path(file.partition(" ")[0]))
            by_name = " (give several files as a pattern, e.g. 'data/*.jsonl')" if is_list else by_name
            near = files.named_like(Path(file))
            above = next(path for path in Path(file).absolute().parents if files.exists(path))
            if above != Path(file).absolute().parent and Path(file).is_absolute():
                near = f" (there is no {above / Path(file).relative_to(above).parts[0]})"
            raise RowError(
                f"{file}: no such file{by_name}{near}; give a file of JSON lines, CSV, Parquet or Arrow, "
                "builtin:arithmetic, builtin:products or reasoning_gym:NAME"
            ) from None
        except OSError as error:
            raise RowError(f"{file}: {error}") from error


def _files(source: str) -> list[str]:
    if files.exists(Path(source)) and files.is_directory(Path(source)):
        names = [name for name in files.file_names(Path(source)) if not name.startswith((".", "_"))]
        paths = [
            str(Path(source) / name) for name in names if Path(name).suffix.lower() in (".jsonl", *TABLES)
        ]
        if not paths:
            below = ", ".join(files.folder_names(Path(source)))
            way_out = f"one of its folders ({below}), " if below else ""
            raise RowError(
                f"{source}: holds no .jsonl, {', '.join(TABLES)} file; give {way_out}a file or a pattern"
            )
    elif "*" in source and not files.exists(Path(source)):
        paths = sorted(glob.glob(source, recursive=True))
        if not paths:
            raise RowError(f"{source}: no file fits this pattern")
    else:
        return [source]
    splits = {match[0]: file for file in paths if (match := _SPLIT.match(Path(file).name))}
    if len(splits) > 1:
        first = next((name for name in splits if name == "train"), min(splits))
        where = source if "*" not in source else str(Path(source).parent)
        pattern = f"{where}/{first}*{Path(splits[first]).suffix}"
        raise RowError(
            f"{source}: has files of {' and '.join(sorted(splits))}; give a pattern, e.g. '{pattern}'"
        )
    kinds = sorted({Path(file).suffix.lower() for file in paths})
    if len(kinds) > 1:
        raise RowError(f"{source}: has {' and '.join(kinds)} files; give a pattern, e.g. '*{kinds[0]}'")
    return paths
