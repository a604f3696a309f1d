"""Tasks of reasoning_gym in verl's format: questions from a seed, at a level of a task's curriculum."""

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow

from verl_precision.base.content import response_seed
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.settings import require_each_once
from verl_precision.base.versions import installed_version
from verl_precision.tools.jobs.problems import read_rows, write_table
from verl_precision.tools.rewards.reasoning_gym_answer import build, compute_score, require_reasoning_gym
from verl_precision.tools.tiny_model import verl_row

# System messages for an answer of one line, and of several. Without one, some chat templates add their own.
INSTRUCTIONS = ('Answer in one line: "Answer: ..."', 'Give the answer alone after "Answer:".')


def write_tasks(path: Path, tasks: Sequence[str], levels: Sequence[int], size: int, seed: int) -> str:
    """Write `size` questions of each task and level as parquet in verl's format; return one line about them.

    The file's ground truths are for the reward `reasoning_gym_answer`; a task is refused if that reward rejects the
    task's own answers. A file with the same content stays as it is, and another file at this path is refused.
    """
    require_each_once("--task", tasks)
    require_each_once("--level", levels)
    for task, level in product(tasks, levels):
        _require_level(task, level)
    rows = [row for task, level in product(tasks, levels) for row in _rows(task, level, size, seed)]
    kept = [*{row["prompt"][-1]["content"]: row for row in reversed(rows)}.values()][::-1]  # first of equal questions
    for index, row in enumerate(kept):
        row["extra_info"]["index"] = index
    counted = f"{len(kept)} questions of {', '.join(tasks)} at level {', '.join(map(str, levels))}, seed {seed}"
    counted += f"; {len(rows) - len(kept)} repeated ones were left out" if len(kept) < len(rows) else ""
    if not path.exists():
        write_table(path, pyarrow.Table.from_pylist(kept))
        return f"wrote {path}: {counted}"
    if read_rows(path, "--output") == kept:
        return f"{path} has these questions already: {counted}"
    problem, remedy = f"its {path.name} is another data set", "Name another folder, or move the file away."
    raise ConfigurationError(problem, setting="--output", value=path.parent, remedy=remedy)


def _require_level(task: str, level: int) -> None:
    """Refuse a level that a task of reasoning_gym does not have."""
    require_reasoning_gym()
    from reasoning_gym.factory import CURRICULA

    levels = [len(each.levels) for each in CURRICULA[task]().attributes.values()] if task in CURRICULA else []
    highest = max(levels, default=1) - 1
    if level > highest:
        problem = f"{task} has no such level"
        raise ConfigurationError(problem, setting="--level", value=level, allowed=f"0 to {highest}" if highest else "0")


def _rows(task: str, level: int, size: int, seed: int) -> list[dict[str, Any]]:
    def refusal(problem: str) -> ConfigurationError:
        remedy = "Choose another task, or another level."
        return ConfigurationError(problem, setting="--task", value=task, remedy=remedy)

    # reasoning_gym's question i has the seed `seed` + i: sets of consecutive seeds would share nearly all questions.
    sizes = {"size": size, "seed": response_seed(seed, task, level)}
    try:
        entries = [*build(task, level, **sizes)]
        truths = [json.dumps({"task": task, "level": level, "entry": entry}) for entry in entries]
    except (AssertionError, ValueError, TypeError) as error:
        if isinstance(error, ConfigurationError):  # `build` refuses this task by name
            raise
        raise refusal(f"reasoning_gym cannot make it at level {level} ({error})") from error
    rows, source = [], f"reasoning_gym/{task}"
    origin = f"reasoning_gym {installed_version('reasoning-gym')}"
    for entry, truth in zip(entries, truths, strict=True):
        if not isinstance(entry["answer"], str):
            raise refusal("reasoning_gym gives no answer for this task, so its reward cannot be tested")
        if compute_score(source, f"Answer: {entry['answer']}", truth)["acc"] != 1:
            raise refusal("its scorer rejects its own answer, written to a file and read from a response")
        if compute_score(source, "Answer: ?", truth)["acc"] == 1:
            raise refusal("its scorer accepts ? as an answer, so a model would learn nothing")
        system = {"role": "system", "content": INSTRUCTIONS["\n" in entry["answer"].strip()]}
        prompt = [system, {"role": "user", "content": entry["question"]}]
        rows.append(verl_row(source, prompt, "reasoning", truth, task=task, level=level, seed=seed, origin=origin))
    return rows
