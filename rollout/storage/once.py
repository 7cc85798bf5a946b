"""Create a file once: of all clients that try, one wins, and each learns whether it was the one.

A hard link shows a file whole, and fails if its name is there. Where there are no hard links, the creators
agree in rounds, until the claim of a round is taken:

    .NAME.claim0.tmp      created exclusively, then filled by its creator: a checksum and the content
    .NAME.verdict0.tmp    created exclusively: a directory if the claim is taken, a file if it is skipped

Only the creator of a claim takes it, when it has read it back. The others skip it after TORN_S without a
verdict (its creator has died, or does not know that it has created it), and try the next round. A verdict has
no content, so it cannot be torn. Everybody who finds that a claim is taken publishes its content as NAME,
unless it is there: the content is the same, so it does not matter who is last. Claims and verdicts stay, so
that a client that still sees an old listing comes to the same end. `withdraw` removes them.

Two gaps remain without hard links. A client that is suspended between its last look and its rename, while
the file is withdrawn, publishes the old content when it wakes. And where neither O_EXCL nor mkdir hold
between clients, there may be two winners; `run doctor` finds that.
"""

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
from functools import partial
from pathlib import Path

from rollout.storage import files
from rollout.storage.retry import PASSING_AFTER_MKDIR, SharedFsError, retry

TORN_S = 2.0
"""How long the creator of a claim has until others skip it; a file that is torn for longer stays so."""
ROUNDS = 40
TIMES = 3
"""How often a temporary file is written anew that somebody has removed."""
NO_LINKS = {errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EMLINK, errno.EXDEV}
"""What os.link reports where the filesystem has no hard links."""


def create_once(path: Path, data: bytes) -> bool:
    """Create `path` with `data` (not empty) unless it exists; True if it now holds exactly `data`.

    A file that is torn (empty, or a JSON object that does not parse) for TORN_S counts as missing.
    """
    if _link(path, data):
        content = _settled(path)
        if content is None or not _is_torn(content):
            return content == data
    return _agree(path, data) == data


def link(source: Path, path: Path, data: bytes) -> bool | None:
    """Link `source`, which holds `data`, to `path` unless something is there; True if `path` now holds
    `data`. None if the filesystem has no hard links.
    """
    files.operations["link"] += 1
    try:
        retry("link", path, lambda: os.link(source, path), source)
    except FileExistsError:  # maybe made by a call whose reply was lost: reading it back tells
        return files.content(path) == data
    except SharedFsError as error:
        if error.errno not in NO_LINKS:
            raise
        return None
    return True


def create_exclusively(path: Path, data: bytes, *, durable: bool = False) -> bool:
    """Create and fill `path`; True if this call did, and reads it back. What another fills is left alone.

    If the reply to the call is lost, nobody knows that the file is theirs: `create_once` has no such gap.
    """
    files.operations["open"] += 1
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        descriptor = retry("create", path, partial(os.open, path, flags, files.MODE), path.parent)
    except FileExistsError:
        return False

    def fill() -> None:
        os.pwrite(descriptor, data, 0)
        if durable:
            os.fsync(descriptor)

    try:
        retry("write", path, fill)
    finally:
        with contextlib.suppress(OSError):  # reading back tells
            os.close(descriptor)
    return files.content(path) == data


def withdraw(path: Path, aside: Path) -> None:
    """Rename a file that was created once, so that it can be created again."""
    _forget_claims(path)
    files.rename(path, aside)


def remove(path: Path) -> None:
    """Remove a file that was created once, with what its creators agreed by."""
    _forget_claims(path)
    files.remove(path)


def _forget_claims(path: Path) -> None:
    for name in files.listing(path.parent):
        if name.startswith((f".{path.name}.claim", f".{path.name}.verdict")):
            files.remove_any(path.with_name(name))


def _link(path: Path, data: bytes) -> bool:
    """Link `data` to `path` if nothing is there; False if the filesystem has no hard links."""
    for further_tries in reversed(range(TIMES)):
        temp = files.write_temporary(path, data)
        files.operations["link"] += 1
        try:
            retry("link", path, lambda temp=temp: os.link(temp, path), temp)
            break
        except FileExistsError:
            break  # maybe made by a call whose reply was lost: reading it back tells
        except FileNotFoundError:
            # This process was suspended, and a newer one took its temporary file for a dead one's.
            if not further_tries:
                raise
        except SharedFsError as error:
            if error.errno not in NO_LINKS:
                raise
            return False
        finally:
            files.drop(temp)
    files.fsync_directory(path.parent)
    return True


def _agree(path: Path, data: bytes) -> bytes:
    """Agree with the other creators of `path` on its content, and return it."""
    for number in range(ROUNDS):
        claim, verdict = (path.with_name(f".{path.name}.{kind}{number}.tmp") for kind in ("claim", "verdict"))
        if (content := _settled(path)) is not None and not _is_torn(content):
            return content
        is_mine = create_exclusively(claim, _sealed(data), durable=True)
        if not is_mine:
            _wait_for(verdict)
        if _is_taken(verdict, is_mine):
            claimed = retry("read", claim, partial(_unsealed, claim), claim)
            if not is_mine:
                _wait_for(path)
            content = _settled(path)
            if content is None or _is_torn(content):
                files.publish(path, claimed)
                return claimed
            return content
    raise SharedFsError("create", path, OSError(errno.EIO, "no claim is taken"), ROUNDS * TORN_S)


def _is_taken(verdict: Path, take: bool) -> bool:
    """Give the verdict on a claim unless there is one; True if the claim is taken."""
    files.operations["mkdir"] += 1

    def give() -> None:
        if take:
            os.mkdir(verdict, 0o770)
        else:
            os.close(os.open(verdict, os.O_WRONLY | os.O_CREAT | os.O_EXCL, files.MODE))

    with contextlib.suppress(FileExistsError):
        retry("create", verdict, give, verdict.parent)
    mode = retry("look at", verdict, lambda: os.lstat(verdict).st_mode, verdict, PASSING_AFTER_MKDIR)
    return stat.S_ISDIR(mode)


def _sealed(data: bytes) -> bytes:
    return hashlib.sha256(data).digest() + data


def _unsealed(claim: Path) -> bytes:
    """Return the content of a claim; raises ESTALE while a client shows only a part of it."""
    sealed = claim.read_bytes()
    if _sealed(sealed[32:]) != sealed:
        raise OSError(errno.ESTALE, "it is shown in part")
    return sealed[32:]


def _wait_for(path: Path) -> None:
    """Wait until `path` is listed, for TORN_S at most."""
    deadline_s = time.monotonic() + TORN_S
    while path.name not in files.listing(path.parent) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _settled(path: Path) -> bytes | None:
    """Return the content once it is whole, after TORN_S as it is then; None if the file is gone."""
    deadline_s = time.monotonic() + TORN_S
    while (content := files.content(path)) is not None and _is_torn(content):
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    return content


def _is_torn(content: bytes) -> bool:
    if not content.startswith(b"{"):
        return not content
    try:
        json.loads(content)
    except ValueError:
        return True
    return False
