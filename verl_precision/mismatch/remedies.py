"""What each alarm means, whether it may end a run, and what to try, strongest first; the words are in remedies.yaml."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from typing_extensions import Self

from verl_precision.base.files import table_of

_KNOWN = table_of(__file__)
REMEDIES: Mapping[str, str] = _KNOWN["remedies"]


@dataclass(frozen=True)
class Advice:
    """The advice that one alarm gives."""

    meaning: str  # for the run
    try_first: tuple[str, ...]  # strongest fix first
    severe: bool  # `on_alarm=stop` ends the run: the gradient is wrong, or there is none

    def without(self, in_use: Collection[str]) -> Self:
        """Return the advice without the remedies that a run has already."""
        return replace(self, try_first=tuple(remedy for remedy in self.try_first if remedy not in in_use))


def remedies_in_use(train: str, rollout: str, weighs_sequences: bool, verifies_syncs: bool) -> frozenset[str]:
    """Return the remedies that a run has already.

    It has them by the dtypes of trainer and rollout (bf16, fp16 or fp32), by weighing or rejecting responses by their
    ratio to the rollout, and by the package's rollout, which verifies syncs.
    """
    has = {
        REMEDIES["match_precisions"]: train == rollout != "bf16",
        REMEDIES["train_bf16"]: train == "bf16",
        REMEDIES["sample_bf16"]: rollout == "bf16",
        REMEDIES["weigh_sequences"]: weighs_sequences,
        REMEDIES["verify_syncs"]: verifies_syncs,
    }
    return frozenset(remedy for remedy, on in has.items() if on)


ADVICE = {
    name: Advice(known["meaning"], tuple(known["try_first"]), known["severe"])
    for name, known in _KNOWN["advice"].items()
}
