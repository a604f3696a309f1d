"""Keeps the tokens of a few responses of each step beside the metrics file, for `watch`, `report` and `explain --run`.

Which responses: `mismatch/candidates.py`. The file: `kept_file.py`. Log-probs of the trainer are those that the
measurement has: verl's old ones, or, in bypass mode and with `ratio_source=shadow`, those of the first mini-batch of
the update, from the worker.
"""

import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from verl_precision.integration.trainer.batch_fields import fetch_rows, kept
from verl_precision.integration.trainer.kept_files import metrics_path
from verl_precision.losses.in_use import LossInUse
from verl_precision.mismatch.candidates import Candidate, lot_of
from verl_precision.mismatch.settings import MismatchSettings
from verl_precision.mismatch.turns import turns_of
from verl_precision.tools.kept_tokens import kept_file as kept_tokens
from verl_precision.tools.kept_tokens.decisions import LOST, Tokens, decide
from verl_precision.tools.kept_tokens.kept_file import KeptResponse

_LARGEST_GAP = 60.0  # nats; a larger one counts as this in the damage

logger = logging.getLogger("verl_precision.mismatch")


class TokenRecorder:
    """Writes one run's kept tokens."""

    def __init__(self, config: DictConfig, settings: MismatchSettings) -> None:
        """Read what decides where and how much is written; no file is touched before `begin`."""
        trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
        self.loss, self._text = LossInUse.from_config(config), settings.keep_text
        self.path = Path(trainer.default_local_dir) / kept_tokens.FILE
        if "file" in trainer.logger:
            self.path = kept_tokens.beside(metrics_path(trainer.project_name, trainer.experiment_name))
        actor = config.actor_rollout_ref.actor
        self.most = kept_tokens.largest_step(
            settings.keep_tokens, int(rollout.prompt_length), int(rollout.response_length), settings.keep_text,
            self.loss.settings(), bool(OmegaConf.select(actor, "fsdp_config.shadow.every_n_steps")),
        )  # fmt: skip
        self._keep = settings.keep_tokens
        self._masks: dict[str, Tensor] = {}
        self._pieces: dict[int, str] = {}

    def begin(self, step: int) -> None:
        """Cut off what is of steps after a checkpoint's (0: from scratch), as the metrics file does."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if damaged := kept_tokens.cut_after(self.path, step):
            logger.warning("%s did not begin as kept tokens of this version do: it is now %s", self.path, damaged)
        text = "mismatch.keep_tokens=%d: at most %.2f MB a step in %s"
        logger.warning(text, self._keep, self.most / 1e6, self.path)
        free = shutil.disk_usage(self.path.parent).free
        if free < 1000 * self.most:
            logger.warning(
                "the disk of %s has %.1f GB left, room for %d such steps", self.path, free / 1e9, free // self.most
            )

    def remember_mask(self, batch: Any, mask: Tensor) -> None:
        """Keep an update's mask, nested, as it is before verl's rejection."""
        self._masks |= dict(zip(kept(batch)[0], mask.bool().unbind(), strict=True))

    def write(
        self, batch: Any, step: int, chosen: Sequence[tuple[Candidate, str]], tokenizer: Any
    ) -> list[KeptResponse]:
        """Append and return the chosen responses; `batch` has keys and tags of all that the updates were made of."""
        masks, self._masks = self._masks, {}
        if not chosen:
            return []
        of_lot = {lot_of(step, key): (key, tag) for key, tag in zip(*kept(batch), strict=True)}
        known = [(one, reason, *of_lot[one.lot]) for one, reason in chosen]
        fields = ["prompts", "responses", "response_mask", "rollout_log_probs", "advantages", "rm_scores"]
        if self.loss.level is not None:
            fields.append("rollout_is_weights")
        rows = fetch_rows([key for _, _, key, _ in known], batch.partition_id, *fields)
        responses = [
            self._response(step, *each, {name: rows[name][row] for name in fields}, masks.get(each[2]), tokenizer)
            for row, each in enumerate(known)
        ]
        kept_tokens.append(self.path, responses)
        return responses

    def _response(
        self, step: int, one: Candidate, reason: str, key: str, tag: dict[str, Any], row: dict[str, Tensor],
        before: Tensor | None, tokenizer: Any,
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
        turn, prompt, response = turns_of(mask), row["prompts"], row["responses"]
        return KeptResponse(
            step=step, identity=key, reason=reason, length=len(response), reward=float(row["rm_scores"].double().sum()),
            log_weight=one.log_weight, largest_gap=one.largest_gap, lost=int(np.isin(decided.codes, LOST).sum()),
            damage=float(np.nan_to_num(moved, nan=np.inf, posinf=np.inf).sum()), turns=int(turn.max()),
            version=int(tag["min_global_steps"]), prompt_ids=prompt.numpy(), token_ids=response.numpy(),
            rollout_log_probs=rollout.numpy(), log_probs=one.log_probs.numpy(),
            shadow_log_probs=None if one.shadow_log_probs is None else one.shadow_log_probs.numpy(),
            advantages=advantage, weights=factors, mask=ours, turn=turn.numpy(), decisions=decided.codes, behind=behind,
            estimator=self.loss.name, estimator_settings=self.loss.settings(),
            prompt_text=tokenizer.decode(prompt.tolist()) if self._text else None,
            pieces=self._texts(response, tokenizer) if self._text else None,
        )  # fmt: skip

    def _texts(self, response: Tensor, tokenizer: Any) -> dict[int, str]:
        """Return token id -> its text; a token of some bytes of a character has U+FFFD."""
        used = np.unique(response.numpy()).tolist()
        for token in used:
            if token not in self._pieces:
                self._pieces[token] = tokenizer.decode([token])
        return {token: self._pieces[token] for token in used}
