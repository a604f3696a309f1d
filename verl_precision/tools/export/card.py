"""The model card of an export, from card.txt: its dtype, the gap of the step that it is of, and how it was made.

A card is published. So no folder of this machine is in it: of an absolute path only its last part.
"""

from functools import partial
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from verl_precision.base.dtypes import long
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.integration.trainer.run_identity import run_in
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.mismatch import metric_names as names

CARD = "README.md"
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model.path"))


def model_card(checkpoint: Path, dtype: str, verdict: str) -> str:
    """Return the card of a `global_step_N` in a dtype; `verdict` says how its weights fit.

    What the folder does not say (a run without this package's trainer) is left out; k3 is then "not recorded".
    """
    run = run_in(checkpoint.parent)
    settings: dict[str, Any] = dict(run.settings) if run is not None else {}
    numbers = partial(checked, dict[str, float])
    metrics = read_state(checkpoint / STEP_METRICS, numbers, "Remove it: the card then says less.") or {}
    step, k3 = checkpoint.name.removeprefix("global_step_"), metrics.get(names.K3_KL)
    base = str(settings.get(_MODEL, ""))
    on_the_hub = {"base_model": base} if base.count("/") == 1 and not Path(base).exists() else {}
    tags = ["reinforcement-learning", "verl", "verl-precision"]
    front = {"library_name": "transformers", "pipeline_tag": "text-generation", **on_the_hub, "tags": tags}
    known = {
        "trained in": settings.get(f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype"),
        "sampled from in": settings.get(f"{_ROLLOUT}.dtype"),
        "loss": settings.get(f"{_ACTOR}.policy_loss.loss_mode"),
        f"k3 between trainer and rollout at step {step}": "not recorded" if k3 is None else f"{k3:.3g} nats per token",
        "mean reward at that step": metrics.get("critic/score/mean"),
    }
    chosen = None
    if run is not None:
        named = {key: _public(settings[key]) for key in sorted(run.chosen) if key in settings}
        chosen = yaml.safe_dump(named, sort_keys=False, allow_unicode=True)
    text = Path(__file__).with_name("card.txt").read_text(encoding="utf-8")
    return Template(text, keep_trailing_newline=True).render(
        front=yaml.safe_dump(front, sort_keys=False), name=checkpoint.parent.name, step=step, known=known,
        dtype=dtype, dtype_name=long(dtype), verdict=verdict, chosen=chosen,
        versions=", ".join(f"{package} {version}" for package, version in installed_versions().items()),
    )  # fmt: skip


def _public(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
