"""`verl-precision mismatch`."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from verl_precision.errors import VerlPrecisionError


def mismatch(
    model: Annotated[str, typer.Option(help="Folder or hub name; tiny:qwen3 is built in.")] = "tiny:qwen3",
    prompts: Annotated[
        Path | None, typer.Option(help="A .parquet or .jsonl file. Default: 16 built-in questions.")
    ] = None,
    prompt_field: Annotated[str, typer.Option(help="Its field: a chat, as verl's, or text.")] = "prompt",
    max_prompts: Annotated[int | None, typer.Option(min=1, help="Use the first N prompts only.")] = None,
    rollout_dtype: Annotated[list[str] | None, typer.Option(help="vLLM's; repeat it. Default: fp16 and bf16.")] = None,
    train_dtype: Annotated[
        list[str] | None, typer.Option(help="The trainer's; repeat it. Default: fp16 and bf16.")
    ] = None,
    responses: Annotated[int, typer.Option(help="Per prompt and rollout dtype.")] = 8,
    max_response_tokens: Annotated[int, typer.Option(help="A response ends there.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    shard_responses: Annotated[
        int, typer.Option(help="Responses a file: lost at most when a run is killed, sampled together.")
    ] = 256,
    attention: Annotated[str, typer.Option(help="The trainer's: sdpa or flash_attention_2.")] = "sdpa",
    micro_batch_tokens: Annotated[int, typer.Option(help="Tokens of one forward of the trainer.")] = 16384,
    output: Annotated[
        Path | None, typer.Option(help="Folder; one that is there goes on. Default: outputs/mismatch/<model>.")
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Share the work among the GPUs of this Ray cluster, e.g. auto.")
    ] = None,
) -> None:
    """Sample in some dtypes, score in others, and show how far the two engines' probabilities are apart.

    Nothing is trained. Writes table.md, summary.json and figures. A run that was killed goes on when the command is
    repeated. One model is in memory at a time.
    """
    from verl_precision.offline.prompts import BUILT_IN_NAME, read_prompts
    from verl_precision.offline.session import analyse
    from verl_precision.offline.settings import OfflineSettings

    console, errors = Console(width=None if sys.stdout.isatty() else 120), Console(stderr=True)
    folder = output or Path("outputs") / "mismatch" / re.sub(r"[^\w.-]+", "-", Path(model).name)
    try:
        settings = OfflineSettings(
            model=model,
            prompts=BUILT_IN_NAME if prompts is None else str(prompts),
            rollout_dtypes=tuple(rollout_dtype or ("fp16", "bf16")),
            train_dtypes=tuple(train_dtype or ("fp16", "bf16")),
            responses=responses,
            max_response_tokens=max_response_tokens,
            seed=seed,
            shard_responses=shard_responses,
            attention=attention,
            micro_batch_tokens=micro_batch_tokens,
        )
        analyse(settings, read_prompts(prompts, prompt_field, max_prompts), folder, console, ray_address)
    except VerlPrecisionError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        errors.print(f"interrupted; every process has ended. What is done is in {folder}; the same command goes on")
        raise typer.Exit(130) from None
