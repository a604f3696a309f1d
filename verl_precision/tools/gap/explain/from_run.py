"""What a run has left, metrics and config, and what they tell, on the terminal."""

import shlex
from pathlib import Path

from omegaconf import DictConfig
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.base.verl_config import lora_rank
from verl_precision.check.recipe_config import recorded_config
from verl_precision.mismatch.alarm import first_alarms
from verl_precision.tools.gap.explain.causes import CAUSES
from verl_precision.tools.gap.explain.from_config import explained_by, replays_sampling
from verl_precision.tools.gap.explain.from_metrics import gap_of, recorded_causes
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.tables import terminal_table


def read_run(source: Path) -> tuple[Run, DictConfig | None]:
    """Return a run's metrics and config; None where it has left no config.

    Args:
        source: A folder of `verl-precision compare`; a folder of checkpoints, whose metrics file stands beside it under
            the same name; or a metrics file.

    Raises:
        ConfigurationError: If there are no metrics, or those of several runs.
    """
    beside = source.with_name(f"{source.name}.jsonl")
    (run, *others) = read_runs([beside if beside.is_file() else source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        raise ConfigurationError(
            "there are several runs in it", setting="--run", value=str(source), allowed="one run",
            remedy=f"Name one of {names}.",
        )  # fmt: skip
    found = (recorded_config(folder) for folder in (source, run.path.parent, run.path.with_suffix("")))
    return run, next((config for config in found if config is not None), None)


def show_run(source: Path, console: Console) -> None:
    """Print what a run has recorded of the causes, and what a rerun would add."""
    run, config = read_run(source)
    settings = None if config is None else explained_by(config)
    found = recorded_causes(settings, config is not None and replays_sampling(config), run.rows)
    console.print(gap_of(run.rows), highlight=False, soft_wrap=True)
    faults = [one for one in found if one.fault]
    named = "; ".join(f"{one.cause}: {CAUSES[one.cause].title}" for one in faults)
    console.print(f"Something is wrong. {named}." if faults else "Nothing that is recorded is wrong.", soft_wrap=True)
    words = {True: "FAULT", False: "right", None: "a cost"}
    rows = [(one.cause, one.seen, words[one.fault]) for one in found]
    if found:
        console.print(terminal_table(("cause", "recorded", ""), rows, words=3, red=range(len(faults))))
    if alarms := first_alarms(run.rows):
        rung = ", ".join(f"{name} at step {step}" for name, step in alarms.items())
        console.print(f"Alarms: {rung}. What they mean: verl-precision report {run.path}", soft_wrap=True)
    for one in faults:
        console.print(f"{one.cause}: {one.remedy}.", highlight=False, soft_wrap=True)
    if config is None or settings is None:
        console.print("It has left no config. A rerun tells the share of each cause, and more of them:")
        console.print("verl-precision explain --recipe RECIPE.yaml", highlight=False)
        return
    job = Explanation(**settings)
    known = {one.cause for one in found if one.fault is not None}
    causes = ", ".join(one.cause for one in variants(job)[1:] if one.cause not in known)
    console.print(f"A rerun tells the share of each cause ({causes}) and what vLLM's operations do:", soft_wrap=True)
    options = shlex.join(as_options(Explanation, settings))
    console.print(f"verl-precision explain {options}", highlight=False, soft_wrap=True)
    if lora_rank(config):
        console.print(
            "It trains an adapter: add --adapter and the folder lora_adapter of a checkpoint.", soft_wrap=True
        )
