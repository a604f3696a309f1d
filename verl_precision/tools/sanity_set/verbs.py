"""The verb `sanity-set`."""

from typing import Any

from verl_precision.cli.verb import ENGINES, FIGURES, run_job, verb


@verb("verl_precision.tools.sanity_set.settings:SanitySet", needs=(*FIGURES, *ENGINES))
def sanity_set(given: dict[str, Any]) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1, and keeps the problems with an accuracy from --low to --high. Sampling
    stops for a problem once its verdict is decided. Every response is on disk before it counts: after an interruption,
    the same command continues. Writes kept.parquet, summary.json and accuracy.png.
    """
    from verl_precision.tools.sanity_set.settings import SanitySet

    job = SanitySet(**given)
    from verl_precision.tools.sanity_set.session import build_sanity_set

    run_job(job, build_sanity_set)
