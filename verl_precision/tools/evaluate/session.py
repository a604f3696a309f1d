"""A job from end to end: what is missing is drawn and judged, then the tables are written."""

from functools import partial

from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.versions import installed_versions
from verl_precision.tools.engines.model import Model, find_model, load_tokenizer, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.evaluate.accuracy import Accuracy, accuracies, differences, markdown, summary
from verl_precision.tools.evaluate.responses import ResponseJob, Task, read_outcomes
from verl_precision.tools.evaluate.settings import Evaluation
from verl_precision.tools.jobs.frame import Frame, recorded_versions
from verl_precision.tools.jobs.problems import read_data_set
from verl_precision.tools.jobs.reward import load_reward, recorded_judgement

OUTPUTS = ("table.md", "summary.json")


def evaluate(evaluation: Evaluation, console: Console) -> list[Accuracy]:
    """Do what is missing in the job's folder, and write the results, one for each context, data set and dtype.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was drawn is kept.
    """
    frame = Frame(evaluation, console)
    data = {path.stem: read_data_set(path) for path in evaluation.data}
    reward = load_reward(evaluation.reward, evaluation.pass_score)
    problems = {name: reward.readable(each.problems) for name, each in data.items()}
    left_out = {name: len(each.problems) - len(problems[name]) for name, each in data.items()}
    # A problem that is in several data sets is drawn once.
    distinct = {problem.identifier: problem for each in problems.values() for problem in each}
    model = find_model(evaluation.model)
    prompts = tokenize([problem.prompt for problem in distinct.values()], model)
    _require_room(evaluation, model, max(map(len, prompts)))
    tasks = {name: Task(distinct[name], prompt) for name, prompt in zip(distinct, prompts, strict=True)}

    settings = {
        **recorded_judgement(evaluation, reward),
        "data": {name: each.digest for name, each in data.items()},
        "model_fingerprint": model.fingerprint,
        **recorded_versions(),
    }
    with frame.journal(settings, OUTPUTS) as journal:
        outcomes = read_outcomes(journal, evaluation, tasks)
        decode = partial(load_tokenizer(evaluation.model).decode, skip_special_tokens=True)
        for dtype in evaluation.dtypes:
            work = ResponseJob(evaluation, dtype, tasks, outcomes, journal, reward, decode)
            build = partial(VllmEngine, evaluation.model, dtype, evaluation.longest_context)
            drawing = {"temperature": evaluation.temperature, "top_p": evaluation.top_p}
            frame.complete(f"sample-{dtype}", [work], partial(build, **drawing))

    sets = {name: [problem.identifier for problem in each] for name, each in problems.items()}
    found = accuracies(evaluation, sets, tasks, outcomes)
    changes = differences(found)
    table = markdown(evaluation, found, changes, left_out, installed_versions())
    frame.write(summary(found, changes, sets, left_out), table)
    frame.show_written(OUTPUTS)
    return found


def _require_room(evaluation: Evaluation, model: Model, longest_prompt: int) -> None:
    """Refuse a dtype that vLLM refuses, and a context that is too long, or has no token for some response."""
    model.require_dtypes("--dtype", evaluation.dtypes)
    most = model.context or evaluation.longest_context
    for context in evaluation.contexts:
        if not longest_prompt < context <= most:
            problem = f"the longest prompt has {longest_prompt} tokens, and the model's context {model.context}"
            allowed = f"{longest_prompt + 1} to {most}"
            raise ConfigurationError(problem, setting="--context", value=context, allowed=allowed)
