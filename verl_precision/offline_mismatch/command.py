"""`verl-precision mismatch`."""

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console


def mismatch(
    model: Annotated[str, typer.Option(help="Folder or hub name of the model; tiny:qwen3 is built in.")] = "tiny:qwen3",
    prompts: Annotated[
        Path | None, typer.Option(help="A .parquet or .jsonl file. Default: 16 built-in questions.")
    ] = None,
    prompt_field: Annotated[str, typer.Option(help="Column of the prompts: a chat, as verl's, or text.")] = "prompt",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    rollout_dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype of vLLM. Give it several times for several. Default: fp16 and bf16.")
    ] = None,
    train_dtype: Annotated[
        list[str] | None, typer.Option(help="Dtype of the trainer, likewise. Default: fp16 and bf16.")
    ] = None,
    responses: Annotated[int, typer.Option(help="Responses to each prompt, in each rollout dtype.")] = 8,
    max_response_tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 1024,
    seed: Annotated[int, typer.Option(help="Sampling seed.")] = 0,
    in_flight: Annotated[int, typer.Option(min=1, help="Responses sampled or scored together, by each engine.")] = 256,
    shard_responses: Annotated[int | None, typer.Option(min=1, hidden=True, help="Former name of --in-flight.")] = None,
    attention: Annotated[str, typer.Option(help="Attention of the trainer: sdpa or flash_attention_2.")] = "sdpa",
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens of one forward of the trainer.")] = 16384,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder of the results; an interrupted job continues. Default: outputs/mismatch/<model>."),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Share the work among the GPUs of this Ray cluster, e.g. auto.")
    ] = None,
) -> None:
    """Sample in some dtypes, score in others, and show how far the two engines' probabilities are apart.

    Nothing is trained. Writes table.md, summary.json and figures. A job that was interrupted continues when the
    command is repeated. One model is in memory at a time.
    """
    from verl_precision.offline_mismatch.prompts import BUILT_IN_NAME, read_prompts
    from verl_precision.offline_mismatch.session import measure_mismatch
    from verl_precision.offline_mismatch.settings import MismatchJob

    console, errors = Console(width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    folder = output or Path("outputs") / "mismatch" / re.sub(r"[^\w.-]+", "-", Path(model).name)
    if shard_responses is not None:
        errors.print("warning: --shard-responses is now called --in-flight; the old name goes with the next version")
        in_flight = shard_responses
    values: dict[str, Any] = dict(
        model=model,
        prompts=BUILT_IN_NAME if prompts is None else str(prompts),
        rollout_dtypes=tuple(rollout_dtype or ("fp16", "bf16")),
        train_dtypes=tuple(train_dtype or ("fp16", "bf16")),
        responses=responses,
        max_response_tokens=max_response_tokens,
        seed=seed,
        attention=attention,
        micro_batch_tokens=micro_batch_tokens,
    )
    job = MismatchJob(**values)
    chosen = read_prompts(prompts, prompt_field, max_prompts)
    try:
        measure_mismatch(job, chosen, folder, console, ray_address, in_flight)
    except KeyboardInterrupt:
        said = f"every process has ended. What is done is in {folder}; the same command continues"
        raise KeyboardInterrupt(said) from None
