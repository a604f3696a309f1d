"""Real runs: verl's main_ppo, V1 trainer, FSDP2, vLLM, Ray, TransferQueue, on a CPU.

A run takes a minute on two cores, most of it imports on one core, so that two run side by side (`-n 2`), each test
file in one process (`--dist loadfile`), and tests of a file share runs where they can.
"""

import io
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from verl_precision.tools.runs import fork_server as workers
from verl_precision.tools.runs.compare.run import check_arguments, compare_runs
from verl_precision.tools.runs.launch import run_verl
from verl_precision.tools.runs.processes import marked_processes
from verl_precision.tools.runs.read import read_metrics

QUICKSTART = Path("recipes/quickstart/quickstart.yaml")
# In the environment of whatever a test file starts; the file beside it has runs of its own.
TEST_MARK = "VERL_PRECISION_TEST"


# The longest first, so that two processes end together.
FIRST = ("test_recipes_train", "test_resume", "test_collapse", "test_killed_run", "test_quickstart")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


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
        yield lambda: [process for process in marked_processes() if started_here(process)]


@pytest.fixture(scope="session")
def fork_server() -> Iterator[str]:
    """What forks the workers of most runs; test_cluster_check.py and test_resume.py's kills have Ray start them."""
    with workers.fork_server() as python:
        yield python


@pytest.fixture(scope="module")
def run_recipe(tmp_path_factory, fork_server) -> Callable[..., list[dict[str, float]]]:
    """Run a recipe with overrides; return the metrics of each step. The same run is done once."""
    done: dict[tuple[Path | str, ...], list[dict[str, float]]] = {}

    def run(recipe: Path, *overrides: str) -> list[dict[str, float]]:
        key = (recipe, *overrides)
        if key not in done:
            folder = tmp_path_factory.mktemp("e2e") / "run"
            run_verl(recipe, overrides, folder, lambda progress: None, fork_server)
            done[key] = read_metrics(folder / "metrics.jsonl")
        return done[key]

    return run


@pytest.fixture(scope="module")
def run_quickstart(run_recipe) -> Callable[..., list[dict[str, float]]]:
    """`run_recipe` with the quickstart."""
    return lambda *overrides: run_recipe(QUICKSTART, *overrides)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory):
    """The quickstart at few steps, in BF16 and in FP16: (folder, summaries, what a user saw)."""
    folder = tmp_path_factory.mktemp("e2e") / "comparison"
    seen = io.StringIO()
    steps = ["trainer.total_training_steps=5"]
    runs = check_arguments(QUICKSTART, ["bf16", "fp16"], steps)
    summaries = compare_runs(QUICKSTART, runs, steps, folder, Console(file=seen, width=100))
    return folder, {summary.precision: summary for summary in summaries}, seen.getvalue()
