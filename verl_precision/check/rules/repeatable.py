"""Rules of a run that repeats bit for bit: what would let chance in is refused before Ray starts."""

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.verl_config import BUFFER, ROLLOUT, SEEDED, is_repeatable
from verl_precision.check.rules.rule import Environment, Fault, Faults, rule

# Setting, what it may be, what would differ between two runs.
_FIXED = {
    f"{ROLLOUT}.max_num_seqs": ((1,), "a batch of other sequences rounds a sequence's logits differently"),
    f"{ROLLOUT}.enable_prefix_caching": (
        (False,),
        "a prompt is computed in whole or in part, as requests happen to come",
    ),
    "trainer.v1.trainer_mode": (
        ("sync", "vp_sync"),
        "which weights a response was drawn with depends on the machine's speed",
    ),
    "mismatch.enabled": ((True,), "verl's own trainer names prompts at random"),
    BUFFER: (("SortedReplayBuffer",), "a batch is in the order in which responses arrive"),
}


@rule("not-repeatable")
def not_repeatable(config: DictConfig, environment: Environment) -> Faults:
    """A run that seeds each request is meant to repeat: everything else that chance decides must be fixed too."""
    if not is_repeatable(config):
        return
    for setting, (needed, differs) in _FIXED.items():
        if (value := OmegaConf.select(config, setting)) not in needed:
            yield Fault(
                setting=setting,
                value=value,
                problem=f"{SEEDED}=True asks for a run that repeats bit for bit, but {differs}",
                allowed=" or ".join(map(str, needed)),
                remedy=f"Set {setting}={needed[-1]}, as +repeatable=bitwise does.",
            )
    if config.data.shuffle and config.data.seed is None:
        problem = f"{SEEDED}=True asks for a run that repeats bit for bit, but prompts are shuffled at random"
        yield Fault(setting="data.seed", problem=problem, allowed="a number", remedy="Set data.seed=0.")
