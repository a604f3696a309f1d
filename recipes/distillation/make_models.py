"""The student of the distillation recipe: the teacher with noise in its weights.

    python recipes/distillation/make_models.py outputs/distillation/near

The teacher is the model of recipes/collapse with logits of about 20. Each matrix between embedding and head gets
Gaussian noise of `--noise` times its own standard deviation, so that the student is near, and can reach the teacher.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from verl_precision.base.files import new_folder

TEACHER = Path("outputs/collapse/task/logits_20")


def main() -> None:
    """Write the student into the folder that the command line names; keep an existing one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="The student is written into it.")
    parser.add_argument("--noise", type=float, default=0.1, help="In standard deviations of a matrix. Default: 0.1.")
    parser.add_argument("--seed", type=int, default=0, help="Of the noise. Default: 0.")
    arguments = parser.parse_args()
    if not arguments.folder.exists():
        model = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
        generator = torch.Generator().manual_seed(arguments.seed)
        with torch.no_grad():
            for parameter in model.model.layers.parameters():
                if parameter.dim() > 1:
                    parameter.add_(
                        arguments.noise * parameter.std() * torch.randn(parameter.shape, generator=generator)
                    )
        with new_folder(arguments.folder) as whole:
            shutil.copytree(TEACHER, whole, dirs_exist_ok=True)
            model.save_pretrained(whole)
    print(arguments.folder)


if __name__ == "__main__":
    main()
