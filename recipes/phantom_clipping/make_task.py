"""The task of the phantom-clipping stall, for a CPU: a random Qwen3 whose weights lie on the BF16 grid, and prompts.

    python recipes/phantom_clipping/make_task.py outputs/phantom_clipping/task

Shorter is better: the reward is minus the length of the response (recipes/quickstart/reward.py). The vocabulary has an
end token and 15 letters. A prompt is four random letters. A response has at most eight tokens, so a random model ends
some responses by chance. Released checkpoints are in BF16, so an FP32 copy is on the BF16 grid, and so is `on_grid`.
`off_grid` is the control, the same weights before rounding. Each seed has different weights.
"""

import argparse
import itertools
import random
from pathlib import Path

from verl_precision.base.files import new_folder
from verl_precision.tools import tiny_model
from verl_precision.tools.tiny_model import IM_END, random_model, save, settings, write_problems

END, LETTERS = IM_END, "abcdefghijklmno"
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # the prompt is the four letters
PROMPTS, PROMPT_LENGTH = 1024, 4
CONFIG = settings("qwen3")[1] | {
    "vocab_size": 1 + len(LETTERS),
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def build_model(seed: int, on_grid: bool):
    """Return a random Qwen3 in FP32.

    Args:
        seed: Seed of the weights.
        on_grid: Whether each weight is rounded to BF16.
    """
    model = random_model("qwen3", CONFIG, seed)
    return model.bfloat16().float() if on_grid else model


def build_tokenizer():
    """Return the tokenizer: the end token, and one token for each letter."""
    positions = CONFIG["max_position_embeddings"]
    return tiny_model.build_tokenizer(CHAT_TEMPLATE, (END, *LETTERS), unknown="a", positions=positions)


def prompts() -> list[str]:
    """Return the prompts; always the same."""
    all_of_them = ["".join(letters) for letters in itertools.product(LETTERS, repeat=PROMPT_LENGTH)]
    return random.Random(0).sample(all_of_them, PROMPTS)


def write_task(folder: Path, seed: int) -> None:
    """Write `prompts.jsonl`, `on_grid` and `off_grid` into a new folder; after an interruption there is no folder."""
    with new_folder(folder) as whole:
        for name in ("on_grid", "off_grid"):
            (whole / name).mkdir(parents=True)
            save(build_model(seed, name == "on_grid"), build_tokenizer(), CONFIG, whole / name)
        write_problems(whole / "prompts.jsonl", "phantom_clipping", ((prompt, "") for prompt in prompts()))


def main() -> None:
    """Write the task of each seed into the folder that the command line names; keep an existing one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="FOLDER/seed_N/{on_grid,off_grid,prompts.jsonl} are written.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="Seeds of the weights. Default: 0.")
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        folder = arguments.folder / f"seed_{seed}"
        if not folder.exists():
            write_task(folder, seed)
        print(folder)


if __name__ == "__main__":
    main()
