"""The trainer callback that keeps the tokens of a few responses of each step, for `watch` and `report`.

`mismatch/candidates.py` chooses the responses, and `kept_file.py` writes the files. The trainer's log-probs are those
of the mismatch metrics: verl's old log-probs or, in bypass mode and with `ratio_source=shadow`, the log-probs of the
update's first mini-batch, from the worker.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_precision.base.loggers import mismatch as logger
from verl_precision.integration.trainer.metrics_file import metrics_path
from verl_precision.integration.trainer.run_monitor import fetch_rows, real_rows
from verl_precision.losses.registry import LossInUse
from verl_precision.mismatch.candidates import Candidate, lot_of
from verl_precision.mismatch.groups import turns_of
from verl_precision.tools.kept_tokens import kept_file
from verl_precision.tools.kept_tokens.decisions import LOST, Tokens, decide
from verl_precision.tools.kept_tokens.kept_file import KeptResponse

_LARGEST_GAP = 60.0  # nats; in the damage, a larger gap counts as this gap


class TokenRecorder:
    """Writes one run's kept tokens."""

    def __init__(self, trainer: Any) -> None:
        """Read the settings for the files and their folder; no file is changed before `fit`."""
        self._trainer, config = trainer, trainer.config
        self.loss = LossInUse.from_config(config)
        self.path = Path(config.trainer.default_local_dir) / kept_file.FOLDER
        if "file" in config.trainer.logger:
            self.path = kept_file.beside(metrics_path(config.trainer.project_name, config.trainer.experiment_name))
        # A token that is a part of a character decodes to U+FFFD.
        self._text_of = functools.cache(lambda token: trainer.tokenizer.decode([token]))

    def fit(self, proceed, *args, **kwargs):
        """Move aside the files of steps after the checkpoint's (0: a new run), as is done in the metrics file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept_file.cut_after(self.path, self._trainer.global_steps)
        kept = self._trainer.monitor.settings.keep_tokens
        logger.warning("%d responses of each step are kept in %s", kept, self.path)
        proceed(*args, **kwargs)

    def _compute_metrics(self, proceed: Any, batch: Any, metrics: Any, *args: Any, **more: Any) -> None:
        """Write the step's tokens before the alarm judges the step, because an alarm may end the run."""
        with self._trainer.monitor.guarded():
            self.write(batch, more["global_steps"])
        proceed(batch, metrics, *args, **more)

    def write(self, batch: Any, step: int) -> list[KeptResponse]:
        """Write and return the chosen responses; `batch` has the keys and tags of all responses of the updates."""
        candidates, masks = self._trainer.monitor.take_candidates()
        if not (chosen := candidates.chosen()):
            return []
        of_lot = {lot_of(step, key): (key, tag) for key, tag in zip(*real_rows(batch), strict=True)}
        known = [(one, reason, *of_lot[one.lot]) for one, reason in chosen]
        names = ["prompts", "responses", "response_mask", "rollout_log_probs", "advantages", "rm_scores"]
        if self.loss.level is not None:
            names.append("rollout_is_weights")
        rows = fetch_rows([key for _, _, key, _ in known], batch.partition_id, *names)
        responses = [
            self._response(step, *each, {name: rows[name][row] for name in names}, masks.get(each[2]))
            for row, each in enumerate(known)
        ]
        kept_file.append(self.path, responses)
        return responses

    def _response(
        self, step: int, one: Candidate, reason: str, key: str, tag: dict[str, Any], row: dict[str, Tensor],
        before: Tensor | None,
    ) -> KeptResponse:  # fmt: skip
        left = row["response_mask"].bool()
        mask = left if before is None else before
        advantages, rollout = row["advantages"].float(), row["rollout_log_probs"].float()
        tokens = Tokens(one.log_probs, rollout, advantages, mask, one.shadow_log_probs)
        behind = max(step - 1 - tag["min_global_steps"], 0)
        weights = row.get("rollout_is_weights")
        decided = decide(self.loss, tokens, not behind, weights, None if before is None else left)
        advantage, ours = advantages.numpy(), mask.numpy()
        with np.errstate(divide="ignore", invalid="ignore"):
            factors = np.where(ours & (advantage != 0), decided.slopes / advantage, np.nan)
        ratio = np.expm1(np.clip(one.log_probs.numpy() - rollout.numpy(), None, _LARGEST_GAP), dtype=np.float64)
        moved = (np.abs(decided.slopes - advantage) + np.abs(advantage * ratio))[ours]
        turn, prompt, response = turns_of(mask, torch.tensor([0, len(mask)])), row["prompts"], row["responses"]
        prompt_text = texts = None
        if self._trainer.monitor.settings.keep_text:
            prompt_text = self._trainer.tokenizer.decode(prompt.tolist())
            texts = [self._text_of(token) for token in response.tolist()]
        return KeptResponse(
            step=step, identity=key, reason=reason, length=len(response), reward=float(row["rm_scores"].double().sum()),
            log_weight=one.log_weight, largest_gap=one.largest_gap, lost=int(np.isin(decided.codes, LOST).sum()),
            damage=float(np.nan_to_num(moved, nan=np.inf, posinf=np.inf).sum()), turns=int(turn.max()),
            version=int(tag["min_global_steps"]), prompt_ids=prompt.numpy(), token_ids=response.numpy(),
            rollout_log_probs=rollout.numpy(), log_probs=one.log_probs.numpy(),
            shadow_log_probs=None if one.shadow_log_probs is None else one.shadow_log_probs.numpy(),
            advantages=advantage, weights=factors, mask=ours, turn=turn.numpy(), decisions=decided.codes, behind=behind,
            estimator=self.loss.name, estimator_settings=vars(self.loss),
            prompt_text=prompt_text, texts=texts,
        )  # fmt: skip
