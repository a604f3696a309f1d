"""What tests of rules plant their faults in: verl's own config, with words of a command in short forms."""

import functools
import re
from pathlib import Path

from composer import compose_verl

SHORT = dict(line.split(" ", 1) for line in Path(__file__).with_name("short_forms.txt").read_text().splitlines())


def in_full(words: str) -> list[str]:
    """Return words of a command, from their short forms."""
    for word, meant in SHORT.items():
        words = words.replace(word, meant)
    words = re.sub(r"(?<!\S)(\+?)fsdp\.", r"\1actor.fsdp_config.", words)
    words = re.sub(r"(?<!\S)(\+?)(actor|rollout|ref|model)\.", r"\1actor_rollout_ref.\2.", words)
    words = re.sub(r"(?<!\S)correction\.", "algorithm.rollout_correction.", words)
    return re.sub("=FP(16|32)", r"={param_dtype:fp\1,reduce_dtype:fp32,buffer_dtype:fp32}", words).split()


@functools.cache
def composed(words: str = ""):
    """Compose verl's own config with the rollout's log-probs, so that rules about them have something to look at."""
    rollout = (f"actor_rollout_ref.rollout.{setting}" for setting in ("name=vllm", "n=8", "calculate_log_probs=True"))
    advantage = () if "+estimator=" in words else ("algorithm.adv_estimator=grpo",)
    return compose_verl(*advantage, *rollout, *in_full(words), return_hydra_config=True)
