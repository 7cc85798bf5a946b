"""The pages that mkdocs shows: README, docs/ and what they link to, each at its place in the repository.

So a relative link leads to the same file here as on GitHub, and mkdocs finds the ones that are broken.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from pygments.lexers import find_lexer_class_for_filename

REPOSITORY = Path(__file__).resolve().parents[2]
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
LINK = re.compile(r"\]\(([^)#\s]+)")


class Source(File):
    """A file that is no page, such as a job script: shown as one, in colours."""

    def is_documentation_page(self) -> bool:
        return True


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give the pages their places, and add the files that they link to."""
    for file in (*files.documentation_pages(), *files.media_files()):
        if file.src_dir == config.docs_dir:
            files.remove(file)
            uri = f"docs/{file.src_uri}"
            files.append(File.generated(config, uri, abs_src_path=str(file.abs_src_path)))
    for name in AT_THE_TOP:
        files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / name)))
    for page in files.documentation_pages():
        for link in LINK.findall(page.content_string):
            uri = posixpath.normpath(posixpath.join(posixpath.dirname(page.src_uri), link))
            if uri not in files.src_uris and os.path.isfile(REPOSITORY / uri):
                files.append(_source(uri, config))
    return files


def _source(uri: str, config: MkDocsConfig) -> File:
    """The page of a file of the repository."""
    text = (REPOSITORY / uri).read_text()
    lexer = find_lexer_class_for_filename(uri)
    language = lexer.aliases[0] if lexer else "bash" if text.startswith("#!") else "text"
    lines = ["---", "search: {exclude: true}", "---", f"# {uri}", f"~~~~~{language}", text.rstrip(), "~~~~~"]
    return Source.generated(config, uri, content="\n".join(lines) + "\n", inclusion=InclusionLevel.NOT_IN_NAV)
