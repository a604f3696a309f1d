"""The loop: draw, judge, write down, count, until every verdict is decided."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from verl_precision.errors import ConfigurationError
from verl_precision.sanity_set.journal import Journal, Sample
from verl_precision.sanity_set.problems import Problem
from verl_precision.sanity_set.reward import Reward
from verl_precision.sanity_set.schedule import Schedule
from verl_precision.sanity_set.source import Request, Response, Source, response_seed


@dataclass(frozen=True)
class Prompts:
    """The prompts in tokens, and how a response to one is drawn.

    Attributes:
        token_ids: problem -> its prompt; those that are too long are not in it.
        max_tokens: the most to generate.
        seed: of the whole run.
    """

    token_ids: Mapping[str, tuple[int, ...]]
    max_tokens: int
    seed: int

    def request(self, problem: str, response: int) -> Request:
        """Return the request for one response."""
        seed = response_seed(self.seed, problem, response)
        return Request(problem, response, self.token_ids[problem], self.max_tokens, seed)


def tokenize(problems: Sequence[Problem], model: str, max_prompt_length: int) -> dict[str, tuple[int, ...]]:
    """Return the prompts as the model's chat template makes them, without those that are too long.

    Args:
        problems: to tokenize.
        model: folder or hub name.
        max_prompt_length: in tokens.

    Raises:
        ConfigurationError: without chat template, or if no prompt is short enough.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.chat_template is None:
        raise ConfigurationError(
            f"--model {model}: its tokenizer has no chat template, which turns the messages of `prompt` into tokens. "
            "Add chat_template to its tokenizer_config.json, as verl needs one too."
        )
    found, longest = {}, 0
    for problem in problems:
        ids = tokenizer.apply_chat_template(problem.prompt, add_generation_prompt=True, return_dict=False)
        longest = max(longest, len(ids))
        if len(ids) <= max_prompt_length:
            found[problem.identifier] = tuple(ids)
    if not found:
        raise ConfigurationError(
            f"--max-prompt-length {max_prompt_length}: every prompt is longer, up to {longest} tokens. Raise it."
        )
    return found


def draw(
    schedule: Schedule,
    source: Source,
    prompts: Prompts,
    problems: Mapping[str, Problem],
    reward: Reward,
    journal: Journal,
    in_flight: int,
    keep_text: bool = False,
    on_progress: Callable[[Schedule], None] = lambda schedule: None,
) -> None:
    """Draw responses until every verdict is decided.

    A response is on disk before it counts. What is still being drawn when the last verdict falls is left unfinished.

    Args:
        schedule: what is known already.
        source: draws.
        prompts: the prompts in tokens.
        problems: identifier -> problem.
        reward: judges.
        journal: receives every response.
        in_flight: responses drawn at a time; enough to keep the engines full.
        keep_text: write the responses themselves too.
        on_progress: called after each batch of responses.
    """
    while not schedule.finished:
        wanted = schedule.next_requests(in_flight - schedule.in_flight)
        if wanted:
            source.submit([prompts.request(problem, response) for problem, response in wanted])
        for response in source.poll():
            sample = _judged(response, problems[response.problem], reward, keep_text)
            journal.append(sample)
            schedule.record(sample.problem, sample.response, sample.correct, sample.tokens)
        on_progress(schedule)


def _judged(response: Response, problem: Problem, reward: Reward, keep_text: bool) -> Sample:
    correct = response.correct
    if correct is None:
        correct = reward.is_correct(problem, response.text or "")
    text = response.text if keep_text else None
    return Sample(response.problem, response.response, correct, response.tokens, text)
