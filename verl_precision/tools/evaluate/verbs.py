"""The verbs `evaluate` and `sanity-set`."""

from typing import Any

from verl_precision.cli.verb import ENGINES, run_job, verb


@verb("Models and data", "verl_precision.tools.evaluate.settings:Evaluation", needs=(*ENGINES, "pandas"))
def evaluate(given: dict[str, Any]) -> None:
    """Measure how often a model solves the problems of one or more data sets, in each dtype and context.

    Shows avg@k with its standard error, pass@k and the share of truncated responses; with several dtypes also the
    paired differences between dtypes. Writes table.md and summary.json. Every response is on disk before
    it counts: after an interruption, the same command continues.
    """
    from verl_precision.tools.evaluate.settings import Evaluation

    job = Evaluation(**given)
    from verl_precision.tools.evaluate import session

    run_job(job, session.evaluate)


@verb("Models and data", "verl_precision.tools.evaluate.settings:SanitySet", needs=ENGINES)
def sanity_set(given: dict[str, Any]) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1, and keeps the problems with an accuracy from --low to --high. Sampling
    stops for a problem once its verdict is decided. Every response is on disk before it counts: after an interruption,
    the same command continues. Writes kept.parquet and summary.json.
    """
    from verl_precision.tools.evaluate.settings import SanitySet

    job = SanitySet(**given)
    from verl_precision.tools.evaluate.session import build_sanity_set

    run_job(job, build_sanity_set)
