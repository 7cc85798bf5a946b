"""The order of the tests where several processes run them: each begins with some of those that take longest.

pytest-xdist gives each process as many tests as any other one, side by side in the order of all, and what has
run out of tests takes some from the end of another's. In the order of the folders one process would have all
tests of whole clusters: the others would take them last, when nothing is left to compute while those wait.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import TypeVar

LONGEST = (
    "tests/cluster/test_faults.py",
    "tests/cluster/test_shared_filesystem.py",
    "tests/cluster/test_ray_launch.py",
    "tests/cluster/test_doctor.py",
    "tests/simulation/test_crews.py",
    "tests/simulation/test_simulation.py",
    "tests/cluster/test_kill_matrix.py",
    "tests/cluster/test_training.py",
    "tests/trainer/job/test_training_job.py",
    "tests/cluster/test_crews.py",
    "tests/trainer/model/test_slices.py",
    "tests/cluster/test_real_filesystems.py",
    "tests/cluster/test_run.py",
    "tests/cluster/test_run_local.py",
    "tests/scripts/test_gpu_hour.py",
    "tests/cluster/test_run_directory_gone.py",
    "tests/dry/test_rehearsal.py",
    "tests/cluster/test_rescore.py",
    "tests/cluster/test_dead_children.py",
    "tests/cluster/test_odd_machines.py",
    "tests/cluster/test_serve.py",
    "tests/scripts/test_benchmarks.py",
    "tests/cluster/test_nobody_gets_in.py",
    "tests/cluster/test_head_start.py",
    "tests/scripts/test_slurm.py",
    "tests/cluster/test_cleanup.py",
    "tests/cluster/test_finishing.py",
    "tests/trainer/update/test_step.py",
    "tests/cluster/test_eval_sets.py",
    "tests/trainer/model/test_packed_sequences.py",
    "tests/trainer/job/test_forks.py",
    "tests/cluster/test_stopped_nodes.py",
    "tests/cluster/test_engine_host.py",
    "tests/trainer/model/test_parallel.py",
    "tests/trainer/checkpoint/test_checkpoint_ranks.py",
    "tests/scripts/test_models.py",
    "tests/packaging/test_distributions.py",
    "tests/scripts/test_serve_page.py",
    "tests/cluster/test_recipes.py",
    "tests/cluster/test_hung_mount.py",
    "tests/cluster/test_changed_inputs.py",
    "tests/scripts/test_site.py",
    "tests/cluster/test_ssh_launch.py",
    "tests/simulation/test_claims.py",
    "tests/simulation/test_copies.py",
    "tests/simulation/test_head_start.py",
    "tests/coordinator/console/server/test_refusals.py",
)
"""Files by the seconds that they take in all, longest first, as `--durations=0` says."""

_T = TypeVar("_T")


def longest_first(tests: Sequence[_T], file_of: Callable[[_T], str], processes: int) -> list[_T]:
    """Return the tests in the order in which `processes` should get them; `file_of` names the file of a test.

    The files of LONGEST are dealt out whole, so that what a file's tests share is made once. The other tests
    follow as they came, so that all processes have the same number.
    """
    long: dict[str, list[_T]] = {name: [] for name in LONGEST}
    for test in tests:
        if (name := file_of(test)) in long:
            long[name].append(test)
    shares: list[list[_T]] = [[] for _ in range(processes)]
    for own, process in zip(filter(None, long.values()), _back_and_forth(processes), strict=False):
        shares[process] += own
    others = (test for test in tests if file_of(test) not in long)
    left = len(tests)
    for number, share in enumerate(shares):
        size = left // (processes - number)  # as pytest-xdist cuts
        share += islice(others, max(0, size - len(share)))
        left -= size
    return [*chain.from_iterable(shares), *others]


def _back_and_forth(processes: int) -> Iterator[int]:
    """Yield 0, 1, 2, 2, 1, 0, 0, ... for three: the shares come out about the same."""
    while True:
        yield from range(processes)
        yield from reversed(range(processes))
