"""What an answer of a server says."""

import json
from typing import Any

import pytest

from rollout.engines.answers import RequestRefused, parse_answer


@pytest.mark.parametrize(
    "body",
    [
        {"error": {"message": "no chat template\nis set", "type": "BadRequestError", "code": 400}},
        {"object": "error", "message": "no chat template is set"},
        {"detail": "no chat template is set"},
        {"error": "no chat template is set"},
        ["no chat template is set"],
    ],
)
def test_refusal_is_the_engines_message_in_one_line(body: Any) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_answer("POST /tokenize", 400, json.dumps(body).encode())
    is_known = isinstance(body, dict) and body.get("error") != "no chat template is set"
    said = "no chat template is set" if is_known else " ".join(json.dumps(body).split())
    assert str(refused.value) == f"POST /tokenize: 400: {said}"
