"""What a rank says while it works: the parts it has done, and a state that it could not save. Torch-free."""

from collections.abc import Callable

NOT_SAVED = "TRAINER STATE NOT SAVED"
"""A line with these words is shown by the node at once."""


class Progress:
    """Counts the parts of a training phase that this rank has done, and reports them."""

    def __init__(self, say: Callable[[int, int], None] = lambda done, total: None) -> None:
        """`say` gets the parts done and expected, whenever one of them has grown."""
        self._say = say
        self._done = 0
        self._total = 0

    def expect(self, parts: int) -> None:
        """There are `parts` more to do."""
        self._total += parts
        self._say(self._done, self._total)

    def advance(self) -> None:
        """One more is done."""
        self._done += 1
        self._say(self._done, self._total)
