"""The tokens that a run kept, in place of a rollout that draws anew: prompts, responses, and what it said of them."""

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines.engine import Response
from verl_precision.tools.engines.model import Model
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.jobs.store import Series
from verl_precision.tools.kept_tokens.kept_file import KeptResponse, index_of, response_at


class KeptRollout(NamedTuple):
    """Responses to score."""

    prompt_ids: list[tuple[int, ...]]
    responses: list[Response]  # of problem "0", "1", ..., one each

    @property
    def fingerprint(self) -> str:
        """A digest of tokens and log-probs."""
        return hashlib.sha256(repr(self).encode()).hexdigest()[:16]

    def record(self, rollout: Series) -> None:
        """Write into the journal, as if it were drawn, what is not there yet."""
        missing = {key for key, _ in rollout.missing}
        for response in self.responses:
            if response.problem in missing:
                rollout.record(response)


def kept_rollout(job: Explanation, model: Model) -> KeptRollout:
    """Return the responses of the job's step, each cut at `max_response_tokens`.

    Tool output is scored as part of its response, and has no log-prob to compare with.

    Raises:
        ConfigurationError: If the file or the step is not there, or the tokens are not the model's.
    """
    assert job.tokens is not None
    path = Path(job.tokens)
    if not path.is_dir():
        raise _refused(job, "there is no such folder", "Set mismatch.keep_tokens=4 for a run to keep some.")
    summaries = index_of(path)
    steps = list(dict.fromkeys(summary.step for summary in summaries))
    if not steps:
        raise _refused(job, "there is no response in it", "Name another folder.")
    step = steps[0] if job.step is None else job.step
    if step not in steps:
        allowed = ", ".join(map(str, steps[:10])) + ", ..." * (len(steps) > 10)
        raise ConfigurationError("no response of it was kept", setting="--step", value=step, allowed=allowed)
    chosen = [one for one in summaries if one.step == step][: job.max_prompts]
    kept = [response_at(path, one.offset) for one in chosen]
    size = model.config.get("vocab_size")
    largest = max(int(ids.max(initial=-1)) for one in kept for ids in (one.prompt_ids, one.token_ids))
    if size is not None and largest >= size:
        problem = f"token {largest} is in it, and {model.name} has {size}: another model has written them"
        raise _refused(job, problem, "Name the run's model with --model.")
    longest = max(len(one.prompt_ids) + min(one.length, job.max_response_tokens) for one in kept)
    if model.context is not None and longest + 1 > model.context:
        problem = f"a response has {longest} tokens with its prompt, and the model's context {model.context}"
        raise _refused(job, problem, "Lower --max-response-tokens.")
    prompts = [tuple(one.prompt_ids.tolist()) for one in kept]
    return KeptRollout(prompts, [_response(number, one, job) for number, one in enumerate(kept)])


def _response(number: int, one: KeptResponse, job: Explanation) -> Response:
    ids = one.token_ids[: job.max_response_tokens].tolist()
    mu = np.where(one.mask.astype(bool), one.rollout_log_probs, math.nan)[: job.max_response_tokens]
    return Response(str(number), 0, len(ids), token_ids=tuple(ids), log_probs=tuple(mu.tolist()))


def _refused(job: Explanation, problem: str, remedy: str) -> ConfigurationError:
    return ConfigurationError(problem, setting="--tokens", value=job.tokens, remedy=remedy)
