"""`verl-precision sanity-set`."""

import sys
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def _fraction(value: str) -> Fraction:
    try:
        return Fraction(value[:-1]) / 100 if value.endswith("%") else Fraction(value)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter(f"{value!r}: allowed: a share such as 0.2, 20% or 1/5") from None


def sanity_set(
    data: Annotated[Path, typer.Argument(help="Data set in verl's format: .parquet or .jsonl.")],
    model: Annotated[str, typer.Option("--model", "-m", help="Folder or hub name of the model to start from.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the results. Given again, it is resumed.")],
    responses_per_problem: Annotated[int, typer.Option("--responses-per-problem", "-n", help="For each problem.")] = 40,
    low: Annotated[Fraction, typer.Option(parser=_fraction, metavar="SHARE", help="Smallest accuracy kept.")] = "0.2",  # type: ignore[assignment]
    high: Annotated[Fraction, typer.Option(parser=_fraction, metavar="SHARE", help="Largest accuracy kept.")] = "0.8",  # type: ignore[assignment]
    reward: Annotated[str, typer.Option(help="verl, math-verify, or FILE.py:FUNCTION with verl's signature.")] = "verl",
    correct_at: Annotated[float, typer.Option(help="Smallest score of a correct response.")] = 1.0,
    dtype: Annotated[str, typer.Option(help="Dtype of the engine: fp16, bf16 or fp32.")] = "fp16",
    max_prompt_length: Annotated[int, typer.Option(min=1, help="Most tokens; longer prompts are left out.")] = 1024,
    max_response_length: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 6976,
    seed: Annotated[int, typer.Option(help="Sampling seed; each response has its own from it.")] = 0,
    in_flight: Annotated[int, typer.Option(min=1, help="Responses drawn at a time, by each engine.")] = 512,
    all_responses: Annotated[bool, typer.Option("--all-responses", help="Do not stop at a decided verdict.")] = False,
    keep_text: Annotated[bool, typer.Option("--keep-text", help="Write responses into the journal too.")] = False,
    responses: Annotated[Path | None, typer.Option(help="Replay a journal instead of sampling.")] = None,
    ray_address: Annotated[str | None, typer.Option(help="Draw on each GPU of this Ray; `local` starts one.")] = None,
    engines: Annotated[int | None, typer.Option(min=1, help="With --ray-address: how many. Default: all GPUs.")] = None,
) -> None:
    """Keep the problems a model solves sometimes: the data set of the sanity test (section 4 of the paper).

    Draws responses at temperature 1 and top_p 1 and keeps problems with an accuracy from low to high. A problem is left
    alone as soon as its verdict can no longer change. Every response is on disk before it counts: after an
    interruption, the same command continues. Writes kept.parquet, summary.json and accuracy.png.
    """
    from verl_precision.sanity_set.session import Options, build_sanity_set
    from verl_precision.sanity_set.verdict import Window

    values: dict[str, Any] = dict(
        data=data,
        model=model,
        output=output,
        window=Window(responses_per_problem, low, high),
        reward=reward,
        correct_at=correct_at,
        dtype=dtype,
        max_prompt_length=max_prompt_length,
        max_response_length=max_response_length,
        seed=seed,
        in_flight=in_flight,
        early_stopping=not all_responses,
        keep_text=keep_text,
        recorded=responses,
        ray_address=ray_address,
        engines=engines,
    )
    try:
        build_sanity_set(Options(**values), Console(width=None if sys.stderr.isatty() else 100))
    except KeyboardInterrupt:
        said = f"every response that was ready is in {output}. The same command continues."
        raise KeyboardInterrupt(said) from None
