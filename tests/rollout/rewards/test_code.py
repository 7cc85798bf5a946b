"""The reward `code`: tests that pass, and every way to look as if they did."""

import asyncio
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rollout.rewards import resolve
from rollout.rewards.code import code, program_of
from rollout.rewards.resolve import RewardSettingError, check_task, resolve_reward
from rollout.rewards.reward import Reward, RewardError
from rollout.sandbox.run import Limits, why_no_sandbox
from rollout.settings import RolloutSettings

pytestmark = pytest.mark.skipif(
    why_no_sandbox(Limits()) is not None, reason=f"no sandbox: {why_no_sandbox(Limits())}"
)
PAGE = Path(__file__).parents[3] / "docs" / "sandbox.md"
ADDS = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
SUMS = [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5\n", "stdout": "9"}]


QUICK = Limits(cpu_s=2)


def passed(program: str, tests: Any, limits: Limits = QUICK, **task: Any) -> float:
    return code({"id": 1, **task, "tests": tests}, program, "fraction", asdict(limits))["passed"]


@pytest.mark.parametrize(
    ("program", "fraction"),
    [
        ("def add(a, b): return a + b", 1.0),
        ("Here:\n```python\ndef add(a, b):\n    return a + b\n```\nIt prints\n```text\n3\n```\n", 1.0),
        ("```\nadd = lambda a, b: 0\n```\nno, better\n```py\nadd = int.__add__\n```", 1.0),
        ("def add(a, b): return a + b\nif __name__ == '__main__': raise SystemExit", 1.0),
        ("def add(a, b): return 0", 2 / 3),
        ("def add(a, b): return a +", 0.0),
        ("", 0.0),
    ],
)
def test_a_program_is_worth_the_tests_it_passes(program: str, fraction: float) -> None:
    assert passed(program, ADDS) == pytest.approx(fraction)


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os\ndef add(a, b): os._exit(0)",
        "class E:\n def __eq__(self, other): return True\ndef add(a, b): return E()",
        "class E(int):\n def __eq__(self, other): return True\ndef add(a, b): return E(7)",
        "import builtins as b\nb.AssertionError = ValueError\nb.exec = print\ndef add(a, b): return 7",
        "import os\nfor fd in range(20):\n try: os.write(fd, b'1\\n1\\n1\\n')\n except OSError: pass\n",
        "import sys\ndef add(a, b):\n f = sys._getframe()\n while f: f.f_globals.clear(); f = f.f_back\n",
        'import json\njson.dumps = lambda *a: \'{"value": 3, "args": []}\'\nadd = 1',
        "import os\nfor n in os.listdir('.'):\n if n.endswith('json'): open(n, 'w').write('[\"\"]')\nadd = 1",
        "import signal, os\nos.kill(os.getppid(), 9)\nadd = 1",
        "def __getattr__(n): return lambda *a: True\n__builtins__ = {'AssertionError': ValueError}\nadd = 1",
        "def add(a, b):\n while True: pass",
        "while True: pass",
        "def add(a, b): return 'x' * 10**9",
        "def add(a, b):\n a = []\n for i in range(10**5): a = [a]\n return a",
    ],
)
def test_what_only_looks_as_if_it_passed_is_worth_nothing(program: str) -> None:
    assert passed(program, ADDS, Limits(cpu_s=1)) == 0.0


def test_names_of_the_program_do_not_replace_those_of_a_test() -> None:
    program = (
        "import builtins\ndel builtins.abs\ndef abs(x): return 0\ndef isclose(a, b): return True\nf = float"
    )
    tests = ["assert abs(f(1) - 9) < 1", "from math import isclose\nassert isclose(f(1), 2)"]
    assert passed(program, tests) == 0.0
    assert passed(program, ["assert abs(f(1) - 1) < 1"]) == 1.0


@pytest.mark.parametrize(
    ("program", "test"),
    [
        (
            "class Stack:\n def __init__(self): self.held = []\n def push(self, x): self.held.append(x)\n"
            " def pop(self): return self.held.pop()\n def __len__(self): return len(self.held)",
            "s = Stack(); s.push(1); s.push([2])\n"
            "assert s.held == [1, [2]] and len(s) == 2 and s.pop() == [2]\n"
            "s.pop()\ntry: s.pop()\nexcept IndexError: pass\nelse: assert False",
        ),
        ("def f(a): a.sort(); a.append(9)", "a = [2, 1]; f(a); assert a == [1, 2, 9]"),
        ("def f(a, *, b): a.update(b)", "a = {1: 2}; f(a, b={3: {4}}); assert a == {1: 2, 3: {4}}"),
        ("def f(g, xs): return [g(x) for x in xs]", "assert f(lambda x: x + 1, [1, 2]) == [2, 3]"),
        ("def f():\n i = 0\n while True: yield i; i += 1",
         "from itertools import islice\nassert list(islice(f(), 3)) == [0, 1, 2]"),
        ("from math import factorial as f", "from math import factorial\nassert f(3000) == factorial(3000)"),
        ("import numpy\ndef f(n): return numpy.arange(n), numpy.float64(0.5)",
         "assert f(2) == ([0, 1], 0.5)"),
        ("def f(): return float('nan'), float('-inf'), None, True, b'x', {1: (2,)}, 1j, {3}",
         "a = f()\nassert a[0] != a[0] and a[1:] == (float('-inf'), None, True, b'x', {1: (2,)}, 1j, {3})"),
        ("def add(a, b): return a + b",
         "def check(candidate):\n assert candidate('a', 'b') == 'ab'\ncheck(add)"),
    ],
)  # fmt: skip
def test_a_test_can_do_what_tests_do(program: str, test: str) -> None:
    assert passed(program, [test]) == 1.0


def test_objects_of_the_programs_classes_are_not_compared() -> None:
    program = "class E:\n def __eq__(self, other): return True\n"
    assert passed(program, ["assert E() == E()", "x = E()\nassert x in [1]"]) == 0.0


def test_a_test_does_not_let_the_program_into_its_own_functions() -> None:
    program = "def f(g):\n g.__globals__['add'] = lambda a, b: a + b\n return True"
    assert passed(program, ["assert f(lambda: 0)"]) == 0.0


def test_a_node_that_keeps_its_files_to_itself_runs_programs_too() -> None:
    umask = os.umask(0o077)
    try:
        assert passed("def add(a, b): return a + b", ["assert add(1, 2) == 3"]) == 1.0
        assert passed("print(3)", [{"stdin": "", "stdout": "3"}]) == 1.0
    finally:
        os.umask(umask)


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): raise ValueError('\\r1')",
        "raise ValueError('\\r1\\n1\\x0b1\\x851\\u20281')",
        "def add(a, b): raise ValueError('1\\n1\\n1\\n')",
    ],
)
def test_what_a_program_raises_is_no_passed_test(program: str) -> None:
    tests = ["assert add(1, 2) == 3", "assert add(0, 0) == 0", "assert add(-1, 1) == 0"]
    assert passed(program, tests) == 0.0


def test_setup_comes_before_the_tests_and_is_none() -> None:
    tests = ["assert f(N) == N", "assert f(pi) == 3"]
    assert passed("def f(x): return x", tests, setup="N = 3\nfrom math import pi") == 0.5
    assert passed("def f(x): return x", tests, setup="1 / 0") == 0.0


@pytest.mark.parametrize(
    ("program", "fraction"),
    [
        ("print(sum(map(int, input().split())), ' ')\n", 1.0),
        ("print(3)", 0.5),
        ("print(3, flush=True); 1 / 0", 0.0),
        ("while True: pass", 0.0),
    ],
)
def test_a_program_is_worth_the_cases_it_prints(program: str, fraction: float) -> None:
    assert passed(program, SUMS, Limits(wall_s=15, cpu_s=1)) == fraction


def test_hanging_cases_take_no_longer_than_all_may() -> None:
    assert passed("import time; time.sleep(600)", SUMS * 50, Limits(wall_s=2)) == 0.0


def values(reward: Reward, task: Any, text: str, **settings: Any) -> dict[str, float]:
    (values,) = asyncio.run(reward.values([task], [text], RolloutSettings(**settings)))
    if isinstance(values, RewardError):
        raise values
    return values


def test_the_setting_says_what_counts() -> None:
    task, text = {"id": "a", "tests": ADDS}, "def add(a, b): return 0"
    assert values(resolve_reward("code"), task, text) == {"reward": 0.0, "passed": pytest.approx(2 / 3)}
    fraction = values(resolve_reward("code,score=fraction,cpu_s=5"), task, text)
    assert fraction["reward"] == pytest.approx(2 / 3)
    both = resolve_reward("code=1 + code,score=fraction,name=part=0.3")
    assert values(both, task, text)["reward"] == pytest.approx(0.2)
    assert resolve_reward("code").code.digest != resolve_reward("code,cpu_s=5").code.digest


def test_time_that_no_completion_can_have_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"wall_s=30 must be below rollout.reward_timeout_s=20"):
        values(resolve_reward("code"), {"id": "a", "tests": ADDS}, "", reward_timeout_s=20.0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("code,score=most", "score=most: give one of all, fraction"),
        ("code,cpu_s=many", "cpu_s=many: give a number"),
        ("code,cpu_s=0", "cpu_s=0: give a value of 1 or more"),
        ("code,wall_s=nan", "wall_s=nan: give a value"),
        ("code,speed=3", "no parameter 'speed'; there is score,"),
        ("code,memory_mib=2", "cannot run code here: "),
    ],
)
def test_wrong_parameter_is_an_error(name: str, reason: str) -> None:
    with pytest.raises(RewardSettingError) as raised:
        resolve_reward(name)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_machine_without_a_sandbox_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.rewards.code.why_no_sandbox", lambda limits: "this machine refuses unshare")
    with pytest.raises(
        RewardSettingError, match=r"cannot run code here: this machine refuses unshare \(docs"
    ):
        resolve.resolve_reward("code")


@pytest.mark.parametrize(
    "task",
    [{}, {"tests": []}, {"tests": 3}, {"tests": ["assert ("]}, {"tests": [{"stdin": "1"}]},
     {"tests": ["assert f(1)", {"stdin": "", "stdout": ""}]}, {"tests": ["f()"], "setup": "("}],
)  # fmt: skip
def test_task_that_it_cannot_score_is_told(task: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^its? "):
        check_task("code", task)
    check_task("code", {"tests": "assert f(1) == 1"})


def test_tasks_of_the_page_can_be_solved() -> None:
    (block,) = re.findall(r"^```json\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    adds, sums = map(json.loads, block.splitlines())
    assert passed("def add(a, b): return a + b", **adds) == 1.0
    assert passed("print(sum(map(int, input().split())))", **sums) == 1.0


def test_program_of_an_answer_that_was_cut() -> None:
    assert program_of("So:\n```python\nx = 1\ny = ") == "x = 1\ny = "
