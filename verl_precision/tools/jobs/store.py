"""Samples and their scores, in a job's journal.

A sample is a line {rollout, problem, response, token_ids, log_probs, finish_reason}, a score a line {rollout, train,
problem, response, log_probs}. `rollout` names who sampled and `train` who scored; `problem` is the number of the
prompt. Log-probs have the nine digits that tell every FP32 number from its neighbours. Where experts are recorded, a
line has `routed_experts`, too: {shape, data}, int16 in base64.
"""

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from verl_precision.base.errors import CheckpointStateError
from verl_precision.base.seeds import response_seed
from verl_precision.base.settings import recorded
from verl_precision.tools.engines.engine import Response, SampleRequest
from verl_precision.tools.jobs.job import PROMPTS, Job, Tasks, recorded_versions
from verl_precision.tools.jobs.journal import START_AGAIN, Journal, Key
from verl_precision.tools.jobs.settings import PromptedJob

_FIELDS = {"rollout": str, "problem": str, "response": int, "log_probs": list}


class Store:
    """The samples and scores of a job."""

    def __init__(self, journal: Journal, job: PromptedJob, prompt_ids: Sequence[tuple[int, ...]]) -> None:
        """Read which samples and scores the journal has."""
        self.job, self.journal, self.prompt_ids = job, journal, prompt_ids
        self.keys: list[Key] = [(str(p), r) for p in range(len(prompt_ids)) for r in range(job.responses)]
        # (rollout dtype, train dtype, or None for the samples) -> what there is of that series
        self.series: dict[tuple[str, str | None], dict[Key, Response]] = defaultdict(dict)
        for record in journal.records(_FIELDS):
            response = _response(record)
            self.series[record["rollout"], record.get("train")][response.key] = response

    def log_probs(self, rollout: str, train: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return lengths [B] of all responses, log π [N] and log μ [N] of their tokens, in float64."""
        mu, pi = ([self.series[rollout, side][key].log_probs for key in self.keys] for side in (None, train))
        for (prompt, response), sampled, scored in zip(self.keys, mu, pi, strict=True):
            if len(sampled) != len(scored):
                problem = f"{self.journal.path}: response {response} to prompt {prompt} has {len(sampled)} tokens in "
                problem += f"{rollout}, and {len(scored)} scores in {train}"
                raise CheckpointStateError(problem, allowed="one score a token", remedy=START_AGAIN)
        lengths = np.array([len(values) for values in mu])
        return lengths, np.concatenate(pi).astype(np.float64), np.concatenate(mu).astype(np.float64)


def _response(record: dict[str, Any]) -> Response:
    log_probs, ids, experts = record["log_probs"], record.get("token_ids"), record.get("routed_experts")
    if experts is not None:
        experts = np.frombuffer(b64decode(experts["data"]), "<i2").reshape(experts["shape"])
    return Response(
        problem=record["problem"], response=record["response"], length=len(log_probs),
        log_probs=np.array(log_probs, np.float32), token_ids=ids and tuple(ids), routed_experts=experts,
        equal=record.get("equal"),
    )  # fmt: skip


@contextmanager
def open_store(
    job: Job, settings: PromptedJob, prompt_ids: Sequence[tuple[int, ...]], **fingerprints: Any
) -> Iterator[Store]:
    """Open the journal of samples and scores; it belongs to these prompts, fingerprints and versions."""
    with job.journal({**recorded(settings), **fingerprints, **recorded_versions(), PROMPTS: prompt_ids}) as journal:
        yield Store(journal, settings, prompt_ids)


class Series(Tasks):
    """The samples of a rollout, or with a trainer their scores."""

    def __init__(
        self, store: Store, rollout: str, train: str | None = None, what: str = "", keys: Sequence[Key] | None = None
    ) -> None:
        """Find what is missing; `what` says what the series is, where the names do not; `keys` are all by default."""
        self._store, self._rollout, self._train = store, rollout, train
        self._found = store.series[rollout, train]
        what = what or f"responses sampled in {rollout}" + (f", scored in {train}" if train else "")
        super().__init__(what, store.keys if keys is None else keys, self._found)

    def _request(self, problem: str, response: int) -> SampleRequest:
        store, prompt = self._store, self._store.prompt_ids[int(problem)]
        if self._train is None:
            seed = response_seed(store.job.seed, problem, response)
            return SampleRequest(problem, response, prompt, store.job.max_response_tokens, seed)
        drawn = store.series[self._rollout, None][problem, response].token_ids or ()
        return SampleRequest(problem, response, prompt, response_token_ids=drawn)

    def record(self, response: Response) -> None:
        """Write a sample or a score, then count it."""
        if (experts := response.routed_experts) is not None:
            experts = {"shape": experts.shape, "data": b64encode(experts.astype("<i2").tobytes()).decode()}
        record: dict[str, Any] = {
            "rollout": self._rollout,
            "train": self._train,
            "problem": response.problem,
            "response": response.response,
            "token_ids": response.token_ids,
            "log_probs": [float(f"{value:.9g}") for value in response.log_probs or ()],
            "finish_reason": response.finish_reason,
            "equal": response.equal,
            "routed_experts": experts,
        }
        self._store.journal.append(record)
        self._found[response.key] = _response(record)
