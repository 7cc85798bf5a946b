"""What others have put into the environment is read as its owner reads it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from rollout import environment_variables
from rollout.environment_variables import (
    cores,
    memory_bytes,
    need_no_proxy,
    need_quiet_python,
    omp_threads,
    proxy_of,
)


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("4", 4),
        ("4,2", 4),
        (" 4 , 2", 4),
        ("0", None),
        ("", None),
        ("-1", None),
        ("4.5", None),
        ("many", None),
    ],
)
def test_threads_are_read_as_openmp_reads_them(text: str, threads: int | None) -> None:
    assert omp_threads({"OMP_NUM_THREADS": text}) == threads


def in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, str]) -> None:
    """Have this process in control groups of these texts, whose folders have these files."""
    own = tmp_path / "own"
    own.write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(environment_variables, "_GROUPS_OF_THIS_PROCESS", own)
    monkeypatch.setattr(environment_variables, "_CONTROL_GROUPS", tmp_path)


@contextmanager
def one_core() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no shares of the cores on this system")
def test_cores_are_those_of_this_process_not_of_the_machine() -> None:
    with one_core():
        assert cores() == 1


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),  # docker --cpus 1.5
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "50000 100000\n"}, 1),
        ("0::/docker/4711\n", {"cpu.max": "400000 100000\n"}, 4),  # in its namespace the folder is missing
        (
            "5:memory:/\n4:cpu,cpuacct:/docker/4711\n0::/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n"},
            2,
        ),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 64),
        ("0::/\n", {"cpu.max": "9900000 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "?\n"}, 64),
        ("", {}, 64),
    ],
)
def test_cores_follow_the_quota_of_a_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, files: Mapping[str, str], expected: int
) -> None:
    in_groups(tmp_path, monkeypatch, groups, files)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    assert cores() == expected


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),  # docker --memory
        ("5:memory:/docker/4711\n", {"memory/memory.limit_in_bytes": "8192\n"}, 8192),
        ("5:memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("", {}, None),
    ],
)
def test_memory_is_what_a_container_may_have_of_the_machines(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: Mapping[str, str],
    expected: int | None,
) -> None:
    in_groups(tmp_path, monkeypatch, groups, files)
    assert memory_bytes() == (expected or psutil.virtual_memory().total)


def test_own_addresses_need_no_proxy_and_the_rest_stays() -> None:
    environment = {"HTTPS_PROXY": "proxy:3128", "NO_PROXY": "intern, 10.0.0.0/8"}
    need_no_proxy(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == "intern,10.0.0.0/8,localhost,127.0.0.1,::1"
    before = dict(environment)
    need_no_proxy(environment)
    assert environment == before
    need_no_proxy(without := {"NO_PROXY": "intern"})
    assert without == {"NO_PROXY": "intern"}


def test_children_do_not_get_what_makes_python_print_or_end_in_another_way() -> None:
    stays = {"PYTHONPATH": "/mine", "PYTHONHASHSEED": "0"}
    environment = {**stays, "PYTHONVERBOSE": "1", "PYTHONMALLOCSTATS": "1", "PYTHONPROFILEIMPORTTIME": "1"}
    assert not need_quiet_python(environment) and environment == stays
    assert need_quiet_python(environment | {"PYTHONINSPECT": "1"})


@pytest.mark.parametrize(
    ("url", "proxy"),
    [
        ("http://127.0.0.1:8000/score", None),
        ("http://[::1]:8000/score", None),
        ("http://localhost/score", None),
        ("http://judge.intern/score", None),
        ("http://judge.example/score", "http://proxy:3128"),
        ("https://judge.example/score", "http://other:3128"),
    ],
)
def test_addresses_outside_are_reached_as_curl_does(
    monkeypatch: pytest.MonkeyPatch, url: str, proxy: str | None
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("http_proxy", "http://proxy:3128")
    monkeypatch.setenv("https_proxy", "other:3128")
    monkeypatch.setenv("no_proxy", ".intern")
    assert proxy_of(url) == proxy
