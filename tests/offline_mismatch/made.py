"""A made-up job: settings, and gaps whose ranking is known."""

import numpy as np

from verl_precision.offline_mismatch.settings import MismatchJob
from verl_precision.offline_mismatch.store import Store
from verl_precision.sampling.engine import Response

DTYPES = ("fp16", "bf16")
# Standard deviation of a token's gap: the ranking that the figures and the table must show.
GAPS = {("fp16", "fp16"): 1e-4, ("bf16", "fp16"): 1e-3, ("fp16", "bf16"): 2e-3, ("bf16", "bf16"): 4e-3}
VERSIONS = {"verl": "1"}
PROMPTS = [(5, 6), (7,)]


def job_of(**changes) -> MismatchJob:
    values = {"model": "tiny:qwen3", "prompts": "built-in", "responses": 3, "max_response_tokens": 40}
    return MismatchJob(**{**values, **changes})


def fill(store: Store, lengths=(3, 40, 7, 0, 12, 25)) -> None:
    """Make up every sample and score."""
    drawing = np.random.default_rng(1)
    for rollout in store.job.rollout_dtypes:
        mu = [drawing.uniform(-6, -0.01, length) for length in lengths]
        for (problem, response), log_probs in zip(store.keys, mu, strict=True):
            ids = (9,) * len(log_probs)
            store.add(rollout, None, Response(problem, response, len(ids), token_ids=ids, log_probs=tuple(log_probs)))
        for train in store.job.train_dtypes:
            for (problem, response), log_probs in zip(store.keys, mu, strict=True):
                pi = log_probs + drawing.normal(0, GAPS[rollout, train], len(log_probs))
                store.add(rollout, train, Response(problem, response, len(pi), log_probs=tuple(np.minimum(pi, 0))))
