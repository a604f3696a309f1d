"""What a run has left: its metrics, and the config it had."""

from pathlib import Path

from omegaconf import DictConfig

from verl_precision.errors import ConfigurationError
from verl_precision.integration.recipe_config import recorded_config
from verl_precision.runs.read import Run, read_runs


def read_run(path: Path) -> tuple[Run, DictConfig | None]:
    """Return a run's metrics and config; None where it has left no config.

    Args:
        path: A folder of `verl-precision compare`; a folder of checkpoints, whose metrics file stands beside it under
            the same name; or a metrics file.

    Raises:
        ConfigurationError: If there are no metrics, or those of several runs.
    """
    beside = path.with_name(f"{path.name}.jsonl")
    source = beside if beside.is_file() else path
    (run, *others) = read_runs([source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        raise ConfigurationError(
            "there are several runs in it", setting="--run", value=str(path), allowed="one run",
            remedy=f"Name one of {names}.",
        )  # fmt: skip
    found = (recorded_config(folder) for folder in (path, run.path.parent, run.path.with_suffix("")))
    return run, next((config for config in found if config is not None), None)
