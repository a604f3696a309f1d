"""The canary in a verl trainer: asks every rollout replica after a weight sync, and the trainer's engine for its view.

The replicas answer while they sample the next step. The trainer scores the same tokens once sampling has ended, with
the weights that it sent, when a colocated rollout has given its memory back, and judges before it learns from what was
sampled. So the canary costs the trainer one forward of a few tokens, and a wrong rollout costs no update.
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

from verl_precision.engine.settings import DTYPES
from verl_precision.errors import WeightSyncError
from verl_precision.rules.dtypes import engines, rollout_dtype, uses_adapter
from verl_precision.weight_sync.canary import CanaryJudge, canary_tokens
from verl_precision.weight_sync.settings import CanarySettings

logger = logging.getLogger("verl_precision.weight_sync")

_MEANING = (
    "The digests of this sync agree (where they were sent) and no verified layer is damaged, so the weights arrived; "
    "what serves requests does not use them. Usual causes: a replica that a sync left out, a LoRA adapter that is not "
    "applied, CUDA graphs over old memory, quantised or packed weights that were not made anew, or a rollout whose "
    "dtype or context differs from what the config says. Compare weight_sync/unverified_layers, start the run again, "
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
        # vLLM gives no prompt log-probs where it serves LoRA adapters (its engine dies of it on a CPU). There, replicas
        # continue the first half of each sequence greedily, and the trainer scores the continuations.
        self._continues = uses_adapter(config)
        self._tokens_to_continue_by = settings.tokens // 2
        self._tokens: Tensor | None = None
        self._pending: dict[int, list[Any]] = {}
        self._answers: dict[int, tuple[Tensor, Tensor]] = {}
        self._problems: list[str] = []
        self._seconds = 0.0
        self._syncs = 0
        self._works = settings.every_n_syncs > 0

    def ask(self, replicas: Sequence[Any], tokenizer: Any) -> None:
        """After a sync that is due: have every replica score the canary as it serves any request; does not wait.

        Args:
            replicas: verl's rollout replicas.
            tokenizer: of the run.
        """
        due = self._works and self._syncs % max(1, self.settings.every_n_syncs) == 0
        self._syncs += 1
        self._pending = {}
        if not due:
            return
        if self._tokens is None:
            special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
            self._tokens = canary_tokens(len(tokenizer), special, self.settings.sequences, self.settings.tokens)
        given, sampling = self._tokens, {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
        if self._continues:
            given = self._tokens[:, : -self._tokens_to_continue_by]
            sampling = {
                "logprobs": True,
                "max_tokens": self._tokens_to_continue_by,
                "temperature": 0.0,
                "ignore_eos": True,
            }
        self._pending = {
            replica.replica_rank: [
                replica.server_handle.generate.remote(
                    prompt_ids=row, sampling_params=dict(sampling), request_id=f"canary-{uuid.uuid4().hex}"
                )
                for row in given.tolist()
            ]
            for replica in replicas
        }

    def collect(self) -> None:
        """Take the answers, once the step has been sampled and before replicas sleep."""
        if not self._pending:
            return
        start = time.perf_counter()
        pending, self._pending = self._pending, {}
        every = [answer for answers in pending.values() for answer in answers]
        ready, _ = ray.wait(every, num_returns=len(every), timeout=self.settings.timeout_seconds)
        for rank, futures in pending.items():
            if not set(futures) <= set(ready):
                self._problems.append(
                    f"replica {rank} has not answered within weight_sync.canary.timeout_seconds="
                    f"{self.settings.timeout_seconds:g}: look at its log, allow more time, or go on without it "
                    "(weight_sync.canary.action=log)"
                )
                continue
            try:
                outputs = ray.get(futures)
            except ray.exceptions.RayError as error:
                self._problems.append(f"replica {rank} failed to answer: {str(error).strip().splitlines()[-1]}")
                continue
            rows = [self._scored(row, output) for row, output in zip(self._tokens.tolist(), outputs, strict=True)]  # type: ignore[union-attr]
            if None in rows:
                self._give_up(f"replica {rank} returns no log-probs for it")
                return
            tokens, log_probs = zip(*rows, strict=True)  # type: ignore[arg-type]
            self._answers[rank] = torch.tensor(tokens), torch.tensor(log_probs)
        self._seconds = time.perf_counter() - start

    def judge(self, workers: Any) -> dict[str, float]:
        """Score what the replicas scored with the trainer's weights, which are still those it sent, and compare.

        Args:
            workers: verl's worker group of the actor.

        Returns:
            `weight_sync/canary_gap`: largest trimmed mean |log π − log μ| of any replica, nats;
            `weight_sync/canary_bound`: what it has to stay below; `weight_sync/seconds`: time the canary took from the
            trainer. Empty when no replica was asked.

        Raises:
            WeightSyncError: if a replica's log-probs are not the trainer's, or one does not answer, and
                `action=stop`.
        """
        if not self._answers and not self._problems:
            return {}
        start = time.perf_counter()
        answers, self._answers = self._answers, {}
        problems, self._problems = self._problems, []
        metrics = {}
        if answers:
            try:
                trainer = self._trainer_log_probs(workers, {rank: tokens for rank, (tokens, _) in answers.items()})
            except Exception as error:  # says nothing of the rollout; somebody's run can go on without a canary
                self._give_up(f"the trainer could not score it ({type(error).__name__}: {error})")
                return {}
            verdict = self._judge.judge(trainer, {rank: log_probs for rank, (_, log_probs) in answers.items()})
            metrics = verdict.metrics()
            problems += [*verdict.problems, *([_MEANING] if verdict.problems else [])]
        if problems:
            message = f"Canary of weight sync {self._syncs - 1}: {'. '.join(problems)}"
            if self.settings.action == "stop":
                raise WeightSyncError(message)
            logger.error("%s", message)
        return {**metrics, "weight_sync/seconds": self._seconds + time.perf_counter() - start}

    def _scored(self, row: list[int], output: Any) -> tuple[list[int], list[float]] | None:
        """Return the tokens that a replica scored, the first ones only conditions, and their log-probs."""
        if self._continues:
            if not output.log_probs:
                return None
            return row[: self.settings.tokens - len(output.token_ids)] + list(output.token_ids), list(output.log_probs)
        entries = output.extra_fields.get("prompt_logprobs")
        return None if not entries else (row, [entry[0] for entry in entries[:-1]])

    def _trainer_log_probs(self, workers: Any, asked: dict[int, Tensor]) -> dict[int, Tensor]:
        if self._continues:
            every = _log_probs(workers, torch.cat(list(asked.values())))
            continued = every[:, -self._tokens_to_continue_by :]
            return dict(zip(asked, continued.split(self.settings.sequences), strict=True))
        return dict.fromkeys(asked, _log_probs(workers, next(iter(asked.values()))))

    def _give_up(self, why: str) -> None:
        self._works = False
        self._answers, self._problems = {}, []
        logger.warning("the canary of weight syncs is off for the rest of this run: %s", why)


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, DTYPES.get(name, "bfloat16"))  # auto, or 8 bits: the coarsest that is expected


def _log_probs(workers: Any, tokens: Tensor) -> Tensor:
    """Return the trainer's log π of tokens 1.. given those before, float32 [S, T - 1], at temperature 1.

    verl splits a batch evenly over its ranks, so that the sequences are repeated until every rank has as many; each
    rank scores its own in one forward.
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
        micro_batch_size_per_gpu=rows // workers.world_size,
    )
    output = workers.compute_log_prob(data)
    log_probs = tu.get(output, "log_probs").values().view(rows, length)
    return log_probs[:sequences, :-1].float().cpu()


def _nested(rows: Tensor) -> Tensor:
    return torch.nested.as_nested_tensor(list(rows.contiguous()), layout=torch.jagged)
