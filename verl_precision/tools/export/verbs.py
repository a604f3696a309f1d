"""The verb `export`."""

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from verl_precision.cli.verb import errors, say, silence_third_party, verb


@verb("Models and data")
def export(
    checkpoint: Annotated[Path, Argument(help="Folder of a checkpoint, checkpoints/.../global_step_N.")],
    dtype: Annotated[str, Option(help="Dtype of the weights: fp16, bf16 or fp32.")] = "fp16",
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder to create. Default: outputs/export/<run>_<step>_<dtype>.")
    ] = None,
) -> None:
    """Write a checkpoint of an FSDP run as a Hugging Face folder, rounded once from FP32.

    LoRA adapters are merged in FP32. If a weight is not finite in the dtype, the command names it and writes nothing.
    config.json has the dtype of the weights. An existing folder is refused.
    """
    from rich.progress import track

    path = checkpoint.resolve()
    step = path.parent if path.name == "actor" else path
    output = output or Path("outputs") / "export" / f"{step.parent.name}_{step.name}_{dtype}"
    with silence_third_party():
        from verl_precision.tools.export.session import export_checkpoint

        tensors = export_checkpoint(path, dtype, output, partial(track, description="rounding", console=errors))
    say(f"wrote {output}: {len(tensors)} tensors in {dtype}")
    say(f"next: verl-precision evaluate --model {shlex.quote(str(output))} --data FILE --context N --dtype {dtype}")
