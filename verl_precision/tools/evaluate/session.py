"""A job from end to end: what is missing is drawn and judged, then the tables are written."""

import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown

from verl_precision.base.files import write_file
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.model import Model, find_model, load_tokenizer, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate.accuracy import Accuracy, accuracies, differences
from verl_precision.tools.evaluate.responses import Drawing, Task, read_outcomes
from verl_precision.tools.evaluate.settings import Evaluation, check_model
from verl_precision.tools.evaluate.table import markdown, summary
from verl_precision.tools.jobs.journal import open_journal
from verl_precision.tools.jobs.problems import DataSet, read_data_set
from verl_precision.tools.jobs.reward import Reward, load_reward
from verl_precision.tools.jobs.work import complete, start_engine
from verl_precision.tools.show.tables import write_json

OUTPUTS = ("table.md", "summary.json")


def evaluate(
    evaluation: Evaluation,
    folder: Path,
    console: Console,
    ray_address: str | None = None,
    in_flight: int = 256,
    keep_text: bool = False,
) -> list[Accuracy]:
    """Do what is missing in the folder, and write the results.

    Args:
        evaluation: What is evaluated.
        folder: A new or empty folder, or that of an earlier job with the same settings.
        console: Where progress and tables are shown.
        ray_address: Address of a Ray cluster whose GPUs share the work; None for this machine.
        in_flight: Responses that each engine draws at a time.
        keep_text: Whether the journal keeps the text of the responses.

    Returns:
        One entry for each context, data set and dtype.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was drawn is kept.
    """
    data = {path.stem: read_data_set(path) for path in evaluation.data}
    reward = load_reward(evaluation.reward, evaluation.pass_score)
    problems, left_out = {}, {}
    for name, each in data.items():
        unreadable = {problem.identifier for problem in reward.unreadable(each.problems)}
        problems[name] = [problem for problem in each.problems if problem.identifier not in unreadable]
        left_out[name] = len(unreadable)
    distinct = {problem.identifier: problem for each in problems.values() for problem in each}
    model = find_model(evaluation.model)
    prompts = tokenize([problem.prompt for problem in distinct.values()], model)
    check_model(evaluation, model, max(map(len, prompts)))
    # A problem that is in several data sets is drawn once.
    tasks = {name: Task(distinct[name], prompt) for name, prompt in zip(distinct, prompts, strict=True)}

    settings = _recorded_settings(evaluation, data, reward, model)
    with closing(open_journal(folder, settings, OUTPUTS)) as journal:
        outcomes = read_outcomes(journal, evaluation, tasks)
        journal.show_resumed(sum(map(len, outcomes.values())), console)
        decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        for dtype in evaluation.dtypes:
            work = Drawing(evaluation, dtype, tasks, outcomes, journal, reward, decode, keep_text)
            build = partial(
                VllmEngine,
                model=evaluation.model,
                dtype=dtype,
                max_model_len=evaluation.longest_context,
                temperature=evaluation.temperature,
                top_p=evaluation.top_p,
            )
            start = partial(start_engine, build, f"sample-{dtype}", folder, ray_address)
            complete([work], start, in_flight, console)

    sets = {name: [problem.identifier for problem in each] for name, each in problems.items()}
    found = accuracies(evaluation, sets, tasks, outcomes)
    changes = differences(found)
    table = markdown(evaluation, found, changes, left_out, installed_versions())
    write_file(folder / "table.md", table, replace=True)
    write_json(folder / "summary.json", summary(found, changes, sets, left_out, settings, sys.argv))
    console.print(Markdown(table))
    console.print(f"wrote {' and '.join(OUTPUTS)} to {folder}", highlight=False, soft_wrap=True)
    return found


def _recorded_settings(
    evaluation: Evaluation, data: dict[str, DataSet], reward: Reward, model: Model
) -> dict[str, Any]:
    """Return everything that decides which responses are drawn and how they are judged."""
    as_given = ("model", "contexts", "dtypes", "responses", "temperature", "top_p", "seed")
    return {
        **{name: getattr(evaluation, name) for name in as_given},
        "correct_at": evaluation.pass_score,
        "reward": reward.name,
        "data": {name: each.digest for name, each in data.items()},
        "model_fingerprint": model.fingerprint,
        **{f"version of {name}": version for name, version in installed_versions().items()},
    }
