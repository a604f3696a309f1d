"""Real runs: verl's main_ppo, V1 trainer, FSDP2, vLLM, Ray, TransferQueue, on a CPU.

A run takes most of a minute on one core, so that two run side by side (`-n 2`). Tests that share a run are a group that
one process has. (xdist's own groups are lost with pytest 9.2: it writes them into node ids, which are fixed now.) The
subject of tests that are marked `matrix` is shown by a shorter test too: `make test-matrix` runs them, `make test-e2e`
leaves them out.
"""

import functools
import io
import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from xdist.scheduler import LoadScopeScheduling

from verl_precision.tools.runs import fork_server as workers
from verl_precision.tools.runs import launch
from verl_precision.tools.runs.compare.grid import check_arguments
from verl_precision.tools.runs.compare.run import compare_runs
from verl_precision.tools.runs.read import read_metrics

QUICKSTART = Path("recipes/quickstart/quickstart.yaml")
# In the environment of whatever a test file starts; the file beside it has runs of its own.
TEST_MARK = "VERL_PRECISION_TEST"


# Tests that have a run of their own need not wait for their file: words of the name -> group. A recipe is one, too.
APART = {
    "slurms_job": "slurm",
    "ctrl_c": "interrupt",
    "merged_lora": "lora",
    "rounded_rollout_does_not_see": "stall",
}
# The groups that take longest, longest first, so that two processes end together.
FIRST = (
    *("slurm", "test_quickstart", "test_phantom_clipping", "test_resume", "test_cluster_check"),
    *("test_sanity_set", "test_collapse", "test_offline_mismatch", "moe", "test_routed_experts", "lora"),
)


def group(nodeid: str) -> str:
    """Return the name of the tests that one process has together."""
    file, _, test = nodeid.partition("::")
    recipe = re.search(r"\[(\w+)", test) if file.endswith("test_recipes_train.py") else None
    apart = (name for words, name in APART.items() if words in test)
    return recipe[1] if recipe else next(apart, Path(file).stem)


class Rows(list[dict[str, float]]):
    """The metrics of each step of a run."""

    folder: Path  # of the run


class GroupScheduling(LoadScopeScheduling):
    """Hand out tests by groups."""

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: FIRST.index(name) if (name := group(item.nodeid)) in FIRST else len(FIRST))


@pytest.fixture(scope="session", autouse=True)
def in_repository():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).resolve().parents[2])
        yield


@pytest.fixture(scope="module", autouse=True)
def own_processes() -> Iterator[Callable[[], list[psutil.Process]]]:
    """The live processes of runs that this test file started."""
    mark = uuid.uuid4().hex

    def started_here(process: psutil.Process) -> bool:
        try:
            return process.environ().get(TEST_MARK) == mark
        except psutil.NoSuchProcess:  # ended meanwhile
            return False

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TEST_MARK, mark)
        yield lambda: [process for process in launch.marked_processes() if started_here(process)]


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> Iterator[str]:
    """What forks the workers of most runs, whoever starts them."""
    with workers.fork_server() as python, pytest.MonkeyPatch.context() as patch:
        patch.setenv(launch.WORKER_PYTHON, python)
        yield python


@pytest.fixture(scope="session")
def forked_driver() -> Iterator[Callable[[Path, Sequence[str]], list[str]]]:
    """`verl_command`, forked from a process that has imported just that module: nine seconds of each run."""
    with workers.fork_server(["verl.trainer.main_ppo"], idle_seconds=600.0) as python:
        verl_command = launch.verl_command
        yield lambda config, overrides: [*shlex.split(python), *verl_command(config, overrides)[1:]]


@pytest.fixture(scope="module")
def run_recipe(tmp_path_factory, forked_driver) -> Callable[..., Rows]:
    """Run a recipe with overrides; return the metrics of each step. The same run is done once."""

    @functools.cache
    def run(recipe: Path, *overrides: str) -> Rows:
        folder = tmp_path_factory.mktemp("e2e") / "run"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "verl_command", forked_driver)
            launch.run_verl(recipe, overrides, folder)
        rows = Rows(read_metrics(folder / "metrics.jsonl"))
        rows.folder = folder
        return rows

    return run


@pytest.fixture(scope="module")
def run_quickstart(run_recipe) -> Callable[..., Rows]:
    """`run_recipe` with the quickstart."""
    return lambda *overrides: run_recipe(QUICKSTART, *overrides)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The quickstart at few steps, in BF16 and in FP16: (folder, summaries, what a user saw)."""
    folder = tmp_path_factory.mktemp("e2e") / "comparison"
    seen = io.StringIO()
    steps = ["trainer.total_training_steps=5", "mismatch.keep_tokens=4"]
    runs = check_arguments(QUICKSTART, ["bf16", "fp16"], steps)
    summaries = compare_runs(QUICKSTART, runs, steps, folder, Console(file=seen, width=100))
    return folder, {summary.precision: summary for summary in summaries}, seen.getvalue()
