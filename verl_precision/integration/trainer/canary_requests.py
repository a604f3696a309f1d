"""The trainer callback of the canary: after a weight sync every rollout replica scores it, then the trainer's engine.

The replicas answer while they sample the next step. When sampling has ended, the trainer scores the same tokens with
the weights that it sent, and compares before its next update, so a wrong rollout costs no update.
"""

import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
import torch
from omegaconf import DictConfig
from torch import Tensor
from verl.utils import tensordict_utils as tu

from verl_precision.base import verl_config
from verl_precision.base.dtypes import DTYPES, short, torch_dtype
from verl_precision.base.errors import WeightSyncError
from verl_precision.base.loggers import weight_sync as logger
from verl_precision.base.verl_config import engines, lora_rank, rollout_dtype
from verl_precision.engine.shadow import ROUNDED_TO
from verl_precision.weight_sync.canary import CanaryJudge, canary_tokens
from verl_precision.weight_sync.settings import canary_settings

CANARY_HELP = (
    "The weights arrived intact, but the engine that serves requests does not use them. Usual causes: a replica that a "
    "sync left out, a LoRA adapter that is not applied, CUDA graphs over old memory, quantised or packed weights that "
    "were not rebuilt, or a dtype or context that is not the config's. Compare weight_sync/unverified_layers, start "
    "the run again, or set weight_sync.canary.action=log to go on."
)


class TrainerCanary:
    """The canary of one run."""

    def __init__(self, trainer: Any) -> None:
        """Read the compute dtypes of both engines from the trainer's config."""
        self._trainer, config = trainer, trainer.config
        self.settings = settings = canary_settings(config)
        dtypes = _dtype(engines(config)[0].compute), _dtype(rollout_dtype(config))
        grids = tuple(verl_config.quantisations(config).values())
        self._judge = CanaryJudge(*dtypes, tf32=config.trainer.device == "cuda", grids=grids)
        self._rounded_to = _coarser(config, *dtypes)
        # With LoRA adapters vLLM returns no prompt log-probs (on a CPU the request ends its engine). There the replicas
        # continue the first half of each sequence greedily, and the trainer scores the continuation.
        self._continued = settings.tokens // 2 if verl_config.uses_adapter(config) else 0
        self._tokens = torch.empty(0, 0)
        self._asked: dict[int, list[Any]] = {}  # replica -> futures of its answers, one a sequence
        self._outputs: dict[int, list[Any]] = {}  # replica -> its answers
        self._problems: list[str] = []
        self._metrics: dict[str, float] = {}  # of the step
        self._seconds = 0.0
        self._syncs = 0
        self._works = settings.every_n_syncs > 0
        if self._works and (name := str(config.actor_rollout_ref.rollout.name)) not in verl_config.PROMPT_LOG_PROBS:
            self._give_up(f"as verl drives it, a {name} server does not return log-probs of a prompt")

    def on_init_end(self, proceed, *args, **kwargs):
        """Send requests after the first weight sync."""
        proceed(*args, **kwargs)
        self._ask_synced()

    def on_step_end(self, proceed):
        """Send requests after the weight sync."""
        proceed()
        self._ask_synced()

    def on_sample_end(self, proceed, *args, **kwargs):
        """Collect the answers before replicas sleep, and judge them before the trainer learns from the sample."""
        self.collect()
        proceed(*args, **kwargs)
        self._metrics |= self.judge(self._trainer.actor_rollout_wg)

    def _compute_metrics(self, proceed, batch, metrics, *args, **kwargs):
        proceed(batch, metrics, *args, **kwargs)
        found, self._metrics = self._metrics, {}
        seconds = "weight_sync/seconds"  # the guard reports seconds too
        metrics.update({**found, seconds: metrics.get(seconds, 0.0) + found.get(seconds, 0.0)})

    def _ask_synced(self) -> None:
        """Send requests to the replicas that each step's sync reaches: in separate_async the standalone ones."""
        trainer = self._trainer
        manager = getattr(trainer, "standalone_checkpoint_manager", trainer.checkpoint_manager)
        self.ask(manager.replicas, trainer.tokenizer)

    def ask(self, replicas: Sequence[Any], tokenizer: Any) -> None:
        """Send the canary to each of verl's rollout replicas if this sync is due; do not wait for answers."""
        due = self._works and self._syncs % self.settings.every_n_syncs == 0
        self._syncs += 1
        self._asked = {}
        if not due:
            return
        if not self._tokens.numel():
            special = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
            self._tokens = canary_tokens(len(tokenizer), special, self.settings.sequences, self.settings.tokens)
        # A second prompt, sent once a sync: if a part of it comes from a cache, the cache was filled before the sync.
        once = {"prompt_ids": self._tokens[0].flip(0).tolist(), "sampling_params": {"max_tokens": 1}}
        sampling: dict[str, Any] = {"prompt_logprobs": 0, "max_tokens": 1, "temperature": 1.0}
        if self._continued:
            sampling = {"logprobs": True, "max_tokens": self._continued, "temperature": 0.0, "ignore_eos": True}
        prompts = self._tokens[:, : self.settings.tokens - self._continued].tolist()
        for replica in replicas:
            generate = replica.server_handle.generate
            self._asked[replica.replica_rank] = [
                generate.remote(**asked, request_id=f"canary-{uuid.uuid4().hex}")
                for asked in [*({"prompt_ids": prompt, "sampling_params": sampling} for prompt in prompts), once]
            ]

    def collect(self) -> None:
        """Collect the answers after sampling and before replicas sleep."""
        start = time.perf_counter()
        asked, self._asked = self._asked, {}
        for rank, futures in asked.items():
            left = max(0.0, start + self.settings.timeout_seconds - time.perf_counter())
            try:
                *self._outputs[rank], once = ray.get(futures, timeout=left)
                if cached := once.extra_fields.get("num_cached_tokens"):
                    cache = "a prefix cache from older weights, which the sync did not reset"
                    self._problems.append(f"replica {rank}: it read {cached} tokens from {cache}")
            except ray.exceptions.GetTimeoutError:
                allowed = f"weight_sync.canary.timeout_seconds={self.settings.timeout_seconds:g}"
                remedy = "look at its log, allow more time, or go on without it (weight_sync.canary.action=log)"
                self._problems.append(f"replica {rank} did not answer within {allowed}: {remedy}")
            except ray.exceptions.RayError as error:
                self._problems.append(f"replica {rank} failed to answer: {str(error).strip().splitlines()[-1]}")
        self._seconds = time.perf_counter() - start

    def judge(self, workers: Any) -> dict[str, float]:
        """Score the same tokens in verl's actor workers, which still have the weights that were sent, and compare.

        Returns metrics, empty without a request; with `action=stop` a proven fault raises a `WeightSyncError`.
        """
        outputs, self._outputs = self._outputs, {}
        problems, self._problems = self._problems, []
        if not outputs and not problems:
            return {}
        start, metrics = time.perf_counter(), {}
        if outputs:
            tokens, served = {}, {}
            for rank, answers in outputs.items():
                tokens[rank], served[rank] = self._scored(answers)
                if served[rank] is None:
                    return self._give_up(f"replica {rank} returned no log-probs for the canary")
            try:
                trainer = self._trainer_log_probs(workers, tokens)
            except Exception as error:  # no fault of the rollout: the run goes on without a canary
                return self._give_up(f"the trainer could not score it ({type(error).__name__}: {error})")
            verdict = self._judge.judge(trainer, served)
            metrics = verdict.metrics()
            problems += [*verdict.problems, *([CANARY_HELP] if verdict.problems else [])]
        if problems:
            message = f"Canary of weight sync {self._syncs - 1}: {'. '.join(problems)}"
            if self.settings.action == "stop":
                raise WeightSyncError(message)
            logger.error("%s", message)
        return {**metrics, "weight_sync/seconds": self._seconds + time.perf_counter() - start}

    def _scored(self, answers: list[Any]) -> tuple[Tensor, Any]:
        """Return the sequences as a replica scored them, and log μ of their last tokens; None if it returned none."""
        if self._continued:
            written = torch.tensor([answer.token_ids for answer in answers])
            tokens = torch.cat([self._tokens[:, : -self._continued], written], dim=1)
            log_probs = [answer.log_probs for answer in answers]
        else:
            tokens = self._tokens
            entries = [answer.extra_fields.get("prompt_logprobs") or () for answer in answers]
            log_probs = [[entry[0] for entry in row[:-1]] for row in entries]
        return tokens, torch.tensor(log_probs) if all(log_probs) else None

    def _trainer_log_probs(self, workers: Any, tokens: dict[int, Tensor]) -> dict[int, Tensor]:
        if not self._continued:  # all replicas score the same tokens
            return dict.fromkeys(tokens, _log_probs(workers, self._tokens, self._rounded_to))
        written = _log_probs(workers, torch.cat(list(tokens.values())), self._rounded_to)[:, -self._continued :]
        return dict(zip(tokens, written.split(self.settings.sequences), strict=True))

    def _give_up(self, why: str) -> dict[str, float]:
        self._works = False
        logger.warning("the canary of weight syncs is off for the rest of this run: %s", why)
        return {}


def _dtype(name: str) -> torch.dtype:
    return torch_dtype(name if short(name) in DTYPES else "bf16")  # auto: the coarser of the two expected dtypes


def _coarser(config: DictConfig, train: torch.dtype, rollout: torch.dtype) -> str | None:
    """Return the rollout's dtype if it is coarser than the trainer's; None for LoRA, which rounds after its product."""
    finer = torch.finfo(train).eps < torch.finfo(rollout).eps
    is_rounded = finer and engines(config)[0].our_fsdp and not lora_rank(config)
    return str(rollout).removeprefix("torch.") if is_rounded else None


def _log_probs(workers: Any, tokens: Tensor, rounded_to: str | None) -> Tensor:
    """Return log π of all tokens but the first, float32 [S, T - 1], perhaps with weights in the rollout's dtype.

    verl splits a batch evenly over its ranks, so sequences are repeated until every rank has the same number.
    """
    sequences, length = tokens.shape
    per_rank = -(-sequences // workers.world_size)
    rows = per_rank * workers.world_size
    ids = tokens[torch.arange(rows) % sequences]
    ones = torch.ones(rows, length - 1, dtype=torch.int64)
    fields = {"input_ids": ids, "prompts": ids[:, :1], "responses": ids[:, 1:], "response_mask": ones}
    fields |= {"loss_mask": ones, "position_ids": torch.arange(length).expand(rows, length)}
    jagged = {name: torch.nested.as_nested_tensor(list(field), layout=torch.jagged) for name, field in fields.items()}
    data = tu.get_tensordict(jagged)
    settings: dict[str, Any] = {"calculate_entropy": False, "compute_loss": False, "use_dynamic_bsz": False}
    settings |= {ROUNDED_TO: rounded_to} if rounded_to else {}
    tu.assign_non_tensor(data, temperature=1.0, micro_batch_size_per_gpu=per_rank, **settings)
    log_probs = tu.get(workers.compute_log_prob(data), "log_probs").values().view(rows, length)
    return log_probs[:sequences, :-1].float().cpu()
