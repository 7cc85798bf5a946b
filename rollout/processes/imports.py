"""Import large libraries faster."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while a block imports: a fifth of the time that torch and transformers take is spent
    in looking for it, and there is next to none. What there is then stays, and is not looked at again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
