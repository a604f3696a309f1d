"""The time that the checks of weight syncs and the mismatch statistics add to a step of the quickstart.

    python benchmarks/step_share.py
    python benchmarks/step_share.py --repeats 3

verl, vLLM, Ray and FSDP2 in FP16 on a CPU. Guard and canary are `weight_sync/seconds` in the run's metrics, the
statistics `timing_s/mismatch`. A pair: the time of one part in a step, and of the whole step. The first is omitted.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from measure import Record, parser, record, report

from verl_precision.tools.runs.launch import run_verl
from verl_precision.tools.runs.read import read_metrics

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart" / "quickstart.yaml"
PARTS = {
    "weight_sync/seconds": (
        *("guard and canary", "one forward of the trainer, for the canary"),
        "with layers and bytes of the weights, not with the batch",
    ),
    "timing_s/mismatch": ("statistics of the mismatch", "", "with the tokens of the batch"),
}


def parse() -> argparse.Namespace:
    return parser(__doc__, repeats=8).parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    chosen = ("precision=fp16", f"trainer.total_training_steps={arguments.repeats + 1}")
    with TemporaryDirectory() as folder:
        run_verl(RECIPE, chosen, Path(folder) / "run")
        steps = read_metrics(Path(folder) / "run" / "metrics.jsonl")[1:]
    whole = [1e3 * step["timing_s/step"] for step in steps]
    for key, (what, limit, growth) in PARTS.items():
        part, name = [1e3 * step[key] for step in steps], f"{what}, quickstart in FP16"
        yield record(name, "the whole step", "ms", part, whole, at_most=0.01, limit=limit, growth=growth)


if __name__ == "__main__":
    report(records(given := parse()), given.json)
