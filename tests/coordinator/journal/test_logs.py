"""Log lines of a node: where they come from, and nothing that steers a terminal."""

import logging

from coordinator.journal.logs import Prefix


def test_text_of_a_model_steers_no_terminal() -> None:
    prefix = Prefix(2)
    prefix.follow(lambda: " it 7 train_rollout", lambda: ("", ""))
    text = "given up: \x1b]0;title\x07\x1b[2J\x9b31m\r gone\tto\nanother line"
    record = logging.LogRecord("name", logging.WARNING, "file", 1, "%s", (text,), None)
    said = "given up: ^[]0;title^G^[[2J\\x9b31m^M gone\tto\nanother line"
    assert prefix.format(record) == f"[rank 2 it 7 train_rollout] warning: {said}"


def test_neither_does_the_text_of_an_error() -> None:
    try:
        raise ValueError("\x1b[2J")
    except ValueError as error:
        record = logging.LogRecord("name", logging.ERROR, "file", 1, "", (), (ValueError, error, None))
    said = Prefix(0).format(record)
    assert "^[[2J" in said and "\x1b" not in said
