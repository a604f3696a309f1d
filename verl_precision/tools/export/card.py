"""The model card of an export, from card.txt: its dtype, the gap of the step that it is of, and how it was made.

A card is published. So no folder of this machine is in it: of an absolute path only its last part.
"""

from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Template

from verl_precision.base.dtypes import long
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.integration.trainer.run_identity import run_in
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.mismatch import metric_names as names

CARD = "README.md"


def model_card(checkpoint: Path, dtype: str, verdict: str) -> str:
    """Return the card of a `global_step_N` in a dtype; `verdict` says how its weights fit.

    What the folder does not say (a run without this package's trainer) is left out; k3 is then "not recorded".
    """
    run = run_in(checkpoint.parent)
    settings: dict[str, Any] = dict(run.settings) if run is not None else {}
    numbers = partial(checked, dict[str, float])
    metrics = read_state(checkpoint / STEP_METRICS, numbers, "Remove it: the card then says less.") or {}
    k3, base = metrics.get(names.K3_KL), str(settings.get("actor_rollout_ref.model.path", ""))
    text = Path(__file__).with_name("card.txt").read_text(encoding="utf-8")
    return Template(text, keep_trailing_newline=True).render(
        name=checkpoint.parent.name,
        step=checkpoint.name.removeprefix("global_step_"),
        base=base if base.count("/") == 1 and not Path(base).exists() else "",  # a name on the hub
        trained_in=settings.get("actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype"),
        sampled_in=settings.get("actor_rollout_ref.rollout.dtype"),
        loss=settings.get("actor_rollout_ref.actor.policy_loss.loss_mode"),
        k3="not recorded" if k3 is None else f"{k3:.3g} nats per token",
        reward=metrics.get("critic/score/mean"),
        dtype=dtype,
        dtype_name=long(dtype),
        verdict=verdict,
        chosen={key: _public(settings[key]) for key in sorted(run.chosen) if key in settings} if run else {},
        versions=", ".join(f"{package} {version}" for package, version in installed_versions().items()),
    )


def _public(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
