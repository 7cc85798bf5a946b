"""The tool `python`: what the model reads of a program, and episodes in which it has the tool."""

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from rollout import PYTHON_TOOL, Policy, Sample, Sampling, run_python
from rollout.environments import environment
from rollout.environments.environment import EnvironmentSettingError, resolve_environment
from rollout.environments.python_tool import MOST_CALLS
from rollout.sandbox.run import Limits, why_no_sandbox
from tests.rollout.scripted import ScriptedClient, text_of
from tests.rollout.templated import QWEN3, TemplatedClient

pytestmark = pytest.mark.skipif(
    why_no_sandbox(Limits()) is not None, reason=f"no sandbox: {why_no_sandbox(Limits())}"
)


def said(code: object, **options: Any) -> str:
    return asyncio.run(run_python({"code": code}, **options))


def test_model_reads_what_the_program_prints() -> None:
    assert said("print(6 * 7)") == "42\n"
    assert said("x = 1") == "(it printed nothing)"
    assert said("print(1)\n1 / 0").startswith("1\nerror: Traceback")
    assert said("print(1)\n1 / 0").endswith("ZeroDivisionError: division by zero")
    assert said("raise SystemExit(3)") == "error: exit code 3"
    assert said("print('\ud800')").startswith("error: ")


def test_long_output_is_cut_in_its_middle() -> None:
    text = said("print('a' * 5000 + 'b' * 5000)", most_characters=100)
    assert text == "a" * 50 + "\n[... 9901 characters are left out ...]\n" + "b" * 49 + "\n"


def test_program_that_hangs_is_ended_and_holds_nobody() -> None:
    async def main() -> float:
        began_s = time.monotonic()
        slow = asyncio.create_task(
            run_python(
                {"code": "print(7, flush=True)\nimport time; time.sleep(600)"}, limits=Limits(wall_s=5)
            )
        )
        await asyncio.sleep(0)
        free_s = time.monotonic() - began_s
        assert await slow == "7\nerror: it was ended after 5 s"
        return free_s

    assert asyncio.run(main()) < 4


def test_program_finds_no_network_and_no_file_of_the_user() -> None:
    assert "OSError" in said("import socket\nsocket.create_connection(('127.0.0.1', 1), 1)")
    assert "FileNotFoundError" in said(f"open({__file__!r})")


@pytest.mark.parametrize("arguments", [{}, {"code": 3}, {"code": "1", "more": 1}, {"source": "print(1)"}])
def test_wrong_call_is_said_to_the_model(arguments: dict[str, Any]) -> None:
    assert asyncio.run(run_python(arguments)).startswith(
        "error: python takes the text `code` and nothing else"
    )


def call(code: str) -> str:
    return (
        f"<tool_call>\n{json.dumps({'name': 'python', 'arguments': {'code': code}})}\n</tool_call><|im_end|>"
    )


def samples_of(directory: Path, *lines: str, name: str = "python") -> tuple[TemplatedClient, list[Sample]]:
    client, sampling = TemplatedClient(directory, QWEN3, *lines), Sampling(n=1, max_tokens=2000)
    asked = [{"role": "user", "content": "What is 27*58?"}]
    task = {"id": "1", "messages": asked, "answer": "1566"}
    played = resolve_environment(name)(task, Policy(client, sampling, 7), sampling)
    return client, asyncio.run(_awaited(played))


async def _awaited(played: Any) -> list[Sample]:
    return await played


def test_result_is_in_the_conversation_and_is_not_trained(tmp_path: Path) -> None:
    lines = call("print(27 * 58)"), call("print(1 / 0)"), "1566<|im_end|>"
    client, (sample,) = samples_of(tmp_path, *lines)
    trained: Any = [t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m]
    assert client.tokenizer.decode(trained) == "".join(lines)
    whole = str(client.tokenizer.decode(sample.token_ids))
    assert "<tool_response>\n1566\n" in whole and "ZeroDivisionError" in whole
    assert '"python"' in whole.partition("What is")[0]
    assert (sample.text, sample.metrics, sample.reward) == ("1566", {"calls": 2, "unread_calls": 0}, None)


SUMS = r"""
import asyncio

from rollout import Episode, Policy, Sample, Sampling, Task, run_python


async def with_python(task: Task, policy: Policy, sampling: Sampling) -> list[Sample]:
    async with asyncio.TaskGroup() as group:
        played = [group.create_task(play(task, policy.episode(j))) for j in range(sampling.n)]
    return [one.result() for one in played]


async def play(task: Task, episode: Episode) -> Sample:
    turn, calls = await episode.generate(task["prompt"], stop=[">>"]), 0
    while turn.finish_reason == "stop" and "<<" in turn.text and calls < 4:
        calls += 1
        program = f"print({turn.text.rpartition('<<')[2]})"
        result = await run_python({"code": program}, most_characters=100)
        turn = await episode.generate(f"={result.strip()}\n", stop=[">>"])
    return episode.sample(metrics={"calls": calls})
"""
"""An environment that finds programs in the text."""


def test_model_without_a_template_for_tools_runs_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_sums.py").write_text(SUMS)
    monkeypatch.syspath_prepend(tmp_path)
    client, sampling = ScriptedClient("<<27*58", "<<1/0", "1566"), Sampling(n=1, max_tokens=100)
    play = resolve_environment("my_sums:with_python")
    asked = play({"id": "1", "prompt": "27*58="}, Policy(client, sampling, 7), sampling)
    (sample,) = asyncio.run(_awaited(asked))
    assert (sample.text, sample.metrics) == ("1566", {"calls": 2})
    said = text_of(sample)
    assert said.startswith("27*58=<<27*58=1566\n<<1/0=error: ") and "ZeroDivisionError" in said
    assert text_of(sample, trained=True) == "<<27*58<<1/01566"


def test_model_that_calls_for_ever_is_ended(tmp_path: Path) -> None:
    _, (sample,) = samples_of(tmp_path, *[call("print(1)")] * (MOST_CALLS + 1))
    assert sample.metrics == {"calls": MOST_CALLS, "unread_calls": 0}


def test_machine_without_a_sandbox_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "why_no_sandbox", lambda _: "this machine refuses unshare")
    with pytest.raises(EnvironmentSettingError, match="no program can run here: this machine refuses"):
        resolve_environment("python")
    assert PYTHON_TOOL["function"]["name"] == "python"
