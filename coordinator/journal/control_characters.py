"""Spell control characters: text from models, users and other nodes must not steer a terminal."""

_SEEN = {
    **{code: f"^{chr(code ^ 64)}" for code in (*range(32), 127) if chr(code) not in "\t\n"},
    **{code: f"\\x{code:02x}" for code in range(128, 160)},
}


def plain(text: str) -> str:
    """Spell the control characters of `text` (`^[` for ESC), except tabs and line ends.

    Text from others must not move the cursor of a terminal, or rename its window.
    """
    return text.replace("\r\n", "\n").translate(_SEEN)


def one_line(text: str) -> str:
    """Spell all control characters of `text`, tabs and line ends included."""
    return plain(text).replace("\n", "^J").replace("\t", "^I")
