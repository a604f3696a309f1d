"""The verb `evaluate`."""

from typing import Any

from verl_precision.cli.verb import ENGINES, run_job, verb


@verb("verl_precision.tools.evaluate.settings:Evaluation", needs=ENGINES)
def evaluate(given: dict[str, Any]) -> None:
    """Measure how often a model solves the problems of one or more data sets, in each dtype and context.

    Shows avg@k with its standard error, pass@k and the share of truncated responses; with several dtypes also the
    paired differences, which are the deployment gap. Writes table.md and summary.json. Every response is on disk before
    it counts: after an interruption, the same command continues.
    """
    from verl_precision.tools.evaluate.settings import Evaluation

    job = Evaluation(**given)
    from verl_precision.tools.evaluate.session import evaluate as evaluate_model

    run_job(job, evaluate_model)
