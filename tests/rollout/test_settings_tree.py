"""Marks of settings."""

from typing import Annotated

import pytest
from pydantic import Field

from rollout.settings_tree import Mark, Settings, marked


def test_marks_are_read_at_the_settings_themselves_through_every_section() -> None:
    class Inner(Settings):
        depth: Annotated[Annotated[int, Field(ge=1)] | None, Mark.PER_GUEST] = None
        size: Annotated[int, Field(ge=1), Mark.PER_MACHINE] = 1

    class Tree(Settings):
        name: Annotated[str, Mark.PER_MACHINE] = ""
        inner: Inner = Inner()
        other: int = 0

    assert marked(Tree, Mark.PER_MACHINE) == ["name", "inner.size"]
    assert marked(Tree, Mark.PER_MACHINE, Mark.PER_GUEST) == ["name", "inner.depth", "inner.size"]
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Inner(size=0)
