"""The canary in a verl trainer: asks the trainer's engine before a weight sync, and every rollout replica after it.

The replicas answer while they sample the next step, and are judged before the trainer learns from what they sampled.
So the canary costs the trainer one forward of a few tokens, and a wrong rollout costs no update.
"""

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_precision.check.dtypes import engines, rollout_dtype
from verl_precision.engine.settings import DTYPES
from verl_precision.errors import WeightSyncError
from verl_precision.weight_sync.canary import CanaryJudge, CanaryVerdict, canary_tokens
from verl_precision.weight_sync.settings import CanarySettings

logger = logging.getLogger("verl_precision.weight_sync")

_MEANING = (
    "The digests of this sync agree (where they were sent) and no verified layer is damaged, so the weights arrived; "
    "what serves requests does not use them. Usual causes: a replica that a sync left out, a LoRA adapter that is not "
    "applied, CUDA graphs over old memory, quantised or packed weights that were not made anew, or a rollout whose "
    "dtype or context differs from what the config says. Compare weight_sync/unverified_layers, restart the replica, "
    "or set weight_sync.canary.action=log to go on."
)


class TrainerCanary:
    """One run's canary."""

    def __init__(self, config: DictConfig, settings: CanarySettings) -> None:
        """Read the dtypes that the two engines compute in.

        Args:
            config: the composed config.
            settings: its block `weight_sync.canary`.
        """
        self.settings = settings
        self._judge = CanaryJudge(_dtype(engines(config)[0].compute), _dtype(rollout_dtype(config)))
        self._tokens: Tensor | None = None
        self._trainer: Tensor | None = None
        self._pending: dict[int, Any] = {}
        self._seconds = 0.0
        self._syncs = 0
        self._works = settings.every_n_syncs > 0

    def score_trainer(self, workers: Any, tokenizer: Any) -> None:
        """Before a sync that is due: score the canary with the weights that are about to be sent.

        Args:
            workers: verl's worker group of the actor.
            tokenizer: of the run.
        """
        due = self._works and self._syncs % max(1, self.settings.every_n_syncs) == 0
        self._syncs += 1
        self._trainer = None
        if not due:
            return
        start = time.perf_counter()
        try:
            if self._tokens is None:
                special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
                shape = self.settings.sequences, self.settings.tokens
                self._tokens = canary_tokens(len(tokenizer), special, *shape)
            self._trainer = _trainer_log_probs(workers, self._tokens)
        except Exception:  # somebody's run is under way, and can go on without a canary
            self._give_up("the trainer could not score it")
        self._seconds += time.perf_counter() - start

    def ask_replicas(self, replicas: Sequence[Any]) -> None:
        """After the sync: have every replica score the canary as it serves any request; does not wait.

        Args:
            replicas: verl's rollout replicas.
        """
        if self._trainer is None or self._tokens is None:
            return
        self._pending = {
            replica.replica_rank: [
                replica.server_handle.generate.remote(
                    prompt_ids=row,
                    sampling_params={"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0},
                    request_id=f"canary-{uuid.uuid4().hex}",
                )
                for row in self._tokens.tolist()
            ]
            for replica in replicas
        }

    def collect(self) -> dict[str, float]:
        """Take the answers and judge them; an empty result when none are pending.

        Returns:
            `weight_sync/canary_gap`: largest mean |log π − log μ| of any replica, nats; `weight_sync/canary_bound`:
            what it has to stay below; `weight_sync/seconds`: time the canary took from the trainer.

        Raises:
            WeightSyncError: if a replica's log-probs are not the trainer's, or one does not answer, and
                `action=stop`.
        """
        if not self._pending or self._trainer is None:
            return {}
        start = time.perf_counter()
        answers, problems = self._answers()
        verdict = self._judge.judge(self._trainer, answers) if answers else None
        problems += verdict.problems if verdict is not None else ()
        seconds, self._seconds = self._seconds + time.perf_counter() - start, 0.0
        if problems:
            message = f"Canary of weight sync {self._syncs - 1}: {'; '.join(problems)}. {_MEANING}"
            if self.settings.action == "stop":
                raise WeightSyncError(message)
            logger.error("%s", message)
        return {**_metrics(verdict), "weight_sync/seconds": seconds}

    def _answers(self) -> tuple[dict[int, Tensor], list[str]]:
        """Return each replica's log-probs, and a sentence for each that has none."""
        pending, self._pending = self._pending, {}
        every = [answer for answers in pending.values() for answer in answers]
        ready, _ = ray.wait(every, num_returns=len(every), timeout=self.settings.timeout_seconds)
        found: dict[int, Tensor] = {}
        problems: list[str] = []
        for rank, futures in pending.items():
            if not set(futures) <= set(ready):
                problems.append(
                    f"replica {rank} has not answered within weight_sync.canary.timeout_seconds="
                    f"{self.settings.timeout_seconds:g}: look at its log, or allow more time"
                )
                continue
            try:
                outputs = ray.get(futures)
            except ray.exceptions.RayError as error:
                problems.append(f"replica {rank} failed to answer: {str(error).strip().splitlines()[-1]}")
                continue
            rows = [output.extra_fields.get("prompt_logprobs") for output in outputs]
            if None in rows:
                self._give_up(f"replica {rank} returns no prompt log-probs")
                return {}, []
            found[rank] = torch.tensor([[entry[0] for entry in row[:-1]] for row in rows])
        return found, problems

    def _give_up(self, why: str) -> None:
        self._works = False
        logger.warning("the canary of weight syncs is off for the rest of this run: %s", why, exc_info=True)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES.get(name, "bfloat16"))  # auto, or 8 bits: the coarsest that is expected


def _metrics(verdict: CanaryVerdict | None) -> dict[str, float]:
    if verdict is None:
        return {}
    return {"weight_sync/canary_gap": verdict.gap, "weight_sync/canary_bound": verdict.bound}


def _trainer_log_probs(workers: Any, tokens: Tensor) -> Tensor:
    """Return log π of tokens 1.. given those before, float32 [S, T - 1], at temperature 1.

    verl splits a batch evenly over its ranks, so that the sequences are repeated until every rank has one.
    """
    sequences, length = tokens.shape
    rows = -(-sequences // workers.world_size) * workers.world_size
    repeated = tokens[torch.arange(rows) % sequences]
    ones, places = torch.ones(rows, length - 1, dtype=torch.int64), torch.arange(length).expand(rows, length)
    data = tu.get_tensordict(
        {
            "input_ids": _nested(repeated),
            "position_ids": _nested(places),
            "prompts": _nested(repeated[:, :1]),
            "responses": _nested(repeated[:, 1:]),
            "response_mask": _nested(ones),
            "loss_mask": _nested(ones),
        }
    )
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        calculate_entropy=False,
        compute_loss=False,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
    )
    output = workers.compute_log_prob(data)
    log_probs = tu.get(output, "log_probs").values().view(rows, length)
    return log_probs[:sequences, :-1].float().cpu()


def _nested(rows: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows.contiguous()), layout=torch.jagged)
