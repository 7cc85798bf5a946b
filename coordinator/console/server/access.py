"""Access to the server: by a token always, compared in constant time."""

import contextlib
import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

from coordinator.console.server.client import TOKEN_VARIABLE
from coordinator.settings.tree import SettingsError

SHORTEST = 16
FILE = ".token"
"""The name of the token's file in the directory of all jobs, unless another one is given."""
COOKIE = "flagpost"


class TokenCheck:
    """Decides by a token, or by the cookie that stands for it in a browser."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self.cookie = hmac.new(self._token, b"flagpost page", hashlib.sha256).hexdigest()
        """The cookie of a browser, which shows pages of others too: with it one can only look."""

    def has_token(self, authorization: str) -> bool:
        """Return whether a header `Authorization` has the token."""
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and self.is_token(token.strip())

    def is_token(self, token: str) -> bool:
        """Return whether this is the token."""
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token)

    def has_cookie(self, value: str) -> bool:
        """Return whether this is the cookie of somebody who has given the token."""
        return hmac.compare_digest(value.encode("utf-8", "surrogatepass"), self.cookie.encode())


def find_token(root: Path, file: Path | None) -> tuple[str, str]:
    """Return the token and where it is from: FLAGPOST_TOKEN, or a file that only this user may read.

    Without FLAGPOST_TOKEN and `file` it is in ROOT/.token, which is made if it is not there. SettingsError
    for a token that is short, or that others may read.
    """
    if file is None and (token := os.environ.get(TOKEN_VARIABLE, "")):
        return _checked(token, TOKEN_VARIABLE), TOKEN_VARIABLE
    path = file or root / FILE
    if file is None and not path.exists():
        with tempfile.NamedTemporaryFile("w", dir=root, prefix=FILE) as temporary:  # for this user alone
            temporary.write(f"{secrets.token_urlsafe(32)}\n")
            temporary.flush()
            with contextlib.suppress(FileExistsError):  # another server was faster
                os.link(temporary.name, path)
    try:
        mode = path.stat().st_mode
        token = path.read_text().strip()
    except (OSError, ValueError) as error:
        raise SettingsError(f"--token-file {path}: {getattr(error, 'strerror', None) or error}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise SettingsError(f"--token-file {path}: others may read it; chmod 600 {path}")
    return _checked(token, f"--token-file {path}"), str(path)


def _checked(token: str, where: str) -> str:
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        raise SettingsError(f"{where}: a token has at least {SHORTEST} letters, digits and signs, no spaces")
    return token
