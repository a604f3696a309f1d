"""The verbs `mismatch` and `explain`: the size of the gap between two engines, and its causes."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, BadParameter, Option

from verl_precision.cli.verb import ENGINES, FIGURES, console, run_job, silence_third_party, verb


@verb("Before a run", "verl_precision.tools.jobs.settings:MismatchJob", needs=(*FIGURES, *ENGINES, "verl"))
def mismatch(job: Any) -> None:
    """Measure the gap between rollout and trainer for each pair of dtypes, without training.

    vLLM samples responses, and verl's FSDP engine scores the same tokens. Writes table.md, summary.json and figures.
    After an interruption, the same command continues. One model is in memory at a time.
    """
    from verl_precision.tools.gap.pairs import measure_mismatch

    run_job(job, measure_mismatch)


@verb("A run", "verl_precision.tools.jobs.settings:Explanation")
def explain(
    given: dict[str, Any],
    overrides: Annotated[list[str] | None, Argument(help="With --recipe: Hydra overrides: precision=bf16.")] = None,
    recipe: Annotated[
        Path | None,
        Option(help="Take model, dtypes, sampling and 16 prompts from a recipe's YAML. Write options before it."),
    ] = None,
    run: Annotated[
        Path | None, Option(help="Folder or metrics file of a run: print the command that explains its gap.")
    ] = None,
) -> None:
    """Find the causes of the gap between rollout and trainer, and show their remedies.

    vLLM samples responses. Their log-probs are computed several times, with one setting changed each time: decode,
    batch, dtype, engine, weights, attention, packing, experts. The difference between two steps belongs to the setting
    that changed, and the parts add up to the whole gap. The result may be that nothing is wrong.

    Writes explanation.json. After an interruption, the same command continues. One model is in memory at a time.
    """
    from verl_precision.base.settings import command_option
    from verl_precision.base.versions import require_packages
    from verl_precision.tools.jobs.settings import Explanation

    if (recipe and run) or (overrides and not recipe):
        raise BadParameter("give --recipe with its overrides, or --run, or neither. Leave one out.")
    if run is not None and given:
        raise BadParameter(f"--run only prints a command. Leave out {command_option(min(given))}.")
    if run is not None:
        with silence_third_party():
            from verl_precision.tools.gap.explain.from_run import show_run

            show_run(run, console)
        return
    require_packages("explain", *ENGINES, "verl")
    if recipe is not None:
        with silence_third_party():
            from verl_precision.tools.checking.composing import compose_recipe
            from verl_precision.tools.gap.explain.from_run import explained_by

            of_recipe = explained_by(compose_recipe(recipe, overrides or []))
        given = {"output": Path("outputs") / "explain" / recipe.stem, **of_recipe, **given}
    job = Explanation(**given)
    from verl_precision.tools.gap.explain.session import explain as explain_gap

    run_job(job, explain_gap)
