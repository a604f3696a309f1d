"""Responses as a run keeps them, made up."""

from pathlib import Path

import numpy as np

from verl_precision.losses.registry import LossInUse
from verl_precision.tools.kept_tokens.kept_file import DECISIONS, KeptResponse, KeptSummary, files_in, summaries_in

GRPO = LossInUse("grpo, bypass mode", "vp_grpo", {"clip_low": 0.2, "clip_high": 0.28})


def response(step: int = 1, tokens: int = 5, text: bool = True, seed: int = 0, **changes) -> KeptResponse:
    """A response of random numbers, every bit of which is noise: the worst that there is to keep."""
    noise = np.random.default_rng(seed)

    def floats() -> np.ndarray:
        return noise.integers(0, 0x7F000000, tokens, dtype=np.uint32).view(np.float32)

    def ids(count: int) -> np.ndarray:
        return noise.integers(0, 2**31, count).astype(np.int32)

    token_ids = changes.get("token_ids", ids(tokens))
    fields = {
        **{"step": step, "identity": f"u{seed}_0_0", "reason": "random", "length": tokens, "reward": 0.5},
        **{"log_weight": -0.25, "largest_gap": 0.125, "lost": 2, "damage": 1.5, "turns": 1, "version": step - 1},
        "prompt_ids": ids(3), "token_ids": token_ids, "rollout_log_probs": floats(), "log_probs": floats(),
        "shadow_log_probs": floats(), "advantages": floats(), "weights": floats(),
        "mask": noise.integers(0, 256, tokens).astype(np.uint8), "turn": noise.integers(0, 2**16, tokens).astype("u2"),
        "decisions": noise.integers(0, len(DECISIONS), tokens).astype(np.uint8), "behind": 0,
        "estimator": GRPO.name, "estimator_settings": vars(GRPO), "prompt_text": "1 + 1 =" if text else None,
        "texts": [f" {token}" for token in token_ids.tolist()] if text else None,
    }  # fmt: skip
    return KeptResponse(**{**fields, **changes})


def index_of(folder: Path) -> list[KeptSummary]:
    """The summaries of all responses of a run."""
    return [summary for file in files_in(folder).values() for summary in summaries_in(file)]
