"""Samples and scores, in the job's journal.

A sample is a line {rollout, problem, response, token_ids, log_probs, finish_reason}, a score a line {rollout, train,
problem, response, log_probs}. `problem` is the number of the prompt. Log-probs have the nine digits that tell every
FP32 number from its neighbours.
"""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from verl_precision.errors import CheckpointStateError
from verl_precision.offline_mismatch.settings import MismatchJob
from verl_precision.sampling.draw import Key
from verl_precision.sampling.engine import Request, Response, response_seed
from verl_precision.sampling.journal import Journal

_FIELDS = {"rollout": str, "problem": str, "response": int, "log_probs": list}
Series = tuple[str, str | None]  # (rollout dtype, train dtype); without the latter they are samples


class Store:
    """The samples and scores of a job."""

    def __init__(self, journal: Journal, job: MismatchJob, prompt_ids: Sequence[tuple[int, ...]]) -> None:
        """Read which samples and scores the journal has.

        Args:
            journal: Journal of the job.
            job: Settings of the job.
            prompt_ids: Token ids of each prompt.

        Raises:
            CheckpointStateError: If the journal is damaged.
        """
        self.job = job
        self.prompt_ids = prompt_ids
        self.keys: list[Key] = [(str(p), r) for p in range(len(prompt_ids)) for r in range(job.responses)]
        self._journal = journal
        self._positions: dict[Series, dict[Key, int]] = defaultdict(dict)
        for position, record in journal.records(_FIELDS):
            series = record["rollout"], record.get("train")
            self._positions[series][record["problem"], record["response"]] = position

    def count(self, rollout: str, train: str | None) -> int:
        """Return how many responses are sampled, or with a train dtype scored."""
        return len(self._positions[rollout, train])

    def complete(self, rollout: str, train: str | None) -> bool:
        """Return whether every response is sampled, or with a train dtype scored."""
        return self.count(rollout, train) == len(self.keys)

    def missing(self, rollout: str, train: str | None) -> list[Key]:
        """Return the responses that are not sampled yet, or with a train dtype not scored."""
        done = self._positions[rollout, train]
        return [key for key in self.keys if key not in done]

    def add(self, rollout: str, train: str | None, response: Response) -> None:
        """Write a sample, or with a train dtype a score."""
        record = {
            "rollout": rollout,
            "train": train,
            "problem": response.problem,
            "response": response.response,
            "token_ids": response.token_ids,
            "log_probs": [float(f"{value:.9g}") for value in response.log_probs or ()],
            "finish_reason": response.finish_reason,
        }
        key = response.problem, response.response
        self._positions[rollout, train][key] = self._journal.append(record)

    def request(self, rollout: str, train: str | None, problem: str, response: int) -> Request:
        """Return the request of a sample, or with a train dtype of a score."""
        prompt = self.prompt_ids[int(problem)]
        if train is None:
            seed = response_seed(self.job.seed, problem, response)
            return Request(problem, response, prompt, self.job.max_response_tokens, seed)
        sample = self._journal.read(self._positions[rollout, None][problem, response])
        return Request(problem, response, prompt, response_token_ids=tuple(sample["token_ids"]))

    def log_probs(self, rollout: str, train: str, keys: Sequence[Key]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return log-probs, response after response, in float64.

        Args:
            rollout: Dtype of vLLM.
            train: Dtype of the trainer's forward.
            keys: Responses.

        Returns:
            Lengths [B], log π [N], log μ [N], with N = Σ lengths.

        Raises:
            CheckpointStateError: If a score has another length than its sample.
        """
        mu, pi = (
            [np.array(self._journal.read(self._positions[series][key])["log_probs"], np.float32) for key in keys]
            for series in ((rollout, None), (rollout, train))
        )
        for key, sampled, scored in zip(keys, mu, pi, strict=True):
            if len(sampled) != len(scored):
                raise CheckpointStateError(
                    f"{self._journal.path}: response {key[1]} to prompt {key[0]} has {len(sampled)} tokens in "
                    f"{rollout}, and {len(scored)} scores in {train}. Allowed: one score a token. Start again in a new "
                    "--output."
                )
        lengths = np.array([len(values) for values in mu])
        return lengths, np.concatenate(pi).astype(np.float64), np.concatenate(mu).astype(np.float64)
