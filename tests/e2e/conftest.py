"""Real runs: verl's main_ppo, V1 trainer, FSDP2, vLLM, Ray, TransferQueue, on a CPU.

Each run takes minutes on two cores, so that tests share them where they can.
"""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from verl_precision.compare.results import read_metrics
from verl_precision.compare.run import run_verl
from verl_precision.compare.session import compare_precisions

RECIPE = Path("recipes/quickstart/quickstart.yaml")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.e2e)


@pytest.fixture(scope="session", autouse=True)
def in_repository():
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(__file__).resolve().parents[2])
        yield


@pytest.fixture(scope="session")
def run_quickstart(tmp_path_factory) -> Callable[..., list[dict[str, float]]]:
    """Run the quickstart recipe with overrides; return the metrics of each step. The same overrides run once."""
    done: dict[tuple[str, ...], list[dict[str, float]]] = {}

    def run(*overrides: str) -> list[dict[str, float]]:
        if overrides not in done:
            folder = tmp_path_factory.mktemp("e2e") / "run"
            run_verl(RECIPE, overrides, folder, on_progress=lambda progress: None)
            done[overrides] = read_metrics(folder / "metrics.jsonl")
        return done[overrides]

    return run


@pytest.fixture(scope="session")
def comparison(tmp_path_factory):
    """The quickstart at few steps, in BF16 and in FP16: (folder, summaries, what a user saw)."""
    folder = tmp_path_factory.mktemp("e2e") / "comparison"
    seen = io.StringIO()
    summaries = compare_precisions(
        RECIPE, ["bf16", "fp16"], ["trainer.total_training_steps=5"], folder, Console(file=seen, width=100)
    )
    return folder, {summary.precision: summary for summary in summaries}, seen.getvalue()
