"""README.md's table of models says what docs/models.md has found."""

import re

from tests.scripts.pages import REPOSITORY

COLUMNS = {"all weights": "sharded", "tensor parallel": "tensor parallel", "LoRA": "LoRA", "vLLM": "vLLM"}
"""By column of the README, that of docs/models.md."""


def table(page: str, first: str) -> list[dict[str, str]]:
    """The rows of the table whose first column has this title, by column."""
    lines = (REPOSITORY / page).read_text().splitlines()
    begin = next(k for k, line in enumerate(lines) if line.startswith(f"| {first} |"))
    titles, rows = [cell.strip() for cell in lines[begin].split("|")[1:-1]], list[dict[str, str]]()
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append(dict(zip(titles, (cell.strip() for cell in line.split("|")[1:-1]), strict=True)))
    return rows


def test_table_of_models_is_that_of_the_page() -> None:
    families = {row["family"]: row for row in table("docs/models.md", "family")}
    rows = table("README.md", "models")
    for row in rows:
        types = [name.strip(" `") for name in row["types in transformers"].split(",")]
        assert types
        for here, there in COLUMNS.items():
            for name in types:
                works = "**no**" not in families[name][there]
                assert row[here] == ("yes" if works else "no"), (name, here)


def test_number_of_families_is_that_of_the_page() -> None:
    families = len(table("docs/models.md", "family"))
    text = " ".join((REPOSITORY / "README.md").read_text().split())
    assert f"lists all {families} families" in text


def test_models_that_read_pictures_are_those_of_the_page() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    sentence = readme.partition("Vision-language models train")[2].partition(". ")[0]
    page = (REPOSITORY / "docs/models.md").read_text().partition("## With pictures")[2]
    assert re.findall(r"`(\w+)`", sentence) == re.findall(r"^\| (\w+) \| (?!rows|---)", page, re.MULTILINE)
