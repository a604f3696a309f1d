"""The model card of an export: its dtype, the gap of the step that it is of, and how it was made.

A card is published. So no folder of this machine is in it: of an absolute path only its last part.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from verl_precision.base.dtypes import long
from verl_precision.base.state import checked, read_state
from verl_precision.base.versions import installed_versions
from verl_precision.integration.trainer.run_identity import run_in
from verl_precision.integration.trainer.run_monitor import STEP_METRICS
from verl_precision.mismatch import metric_names as names
from verl_precision.tools.show.tables import markdown_table

CARD = "README.md"
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def model_card(checkpoint: Path, dtype: str, verdict: str) -> str:
    """Return the card of a `global_step_N` in a dtype; `verdict` says how its weights fit.

    What the folder does not say (a run without this package's trainer) is left out; k3 is then "not recorded".
    """
    run = run_in(checkpoint.parent)
    settings = dict(run.settings) if run is not None else {}
    numbers = partial(checked, dict[str, float])
    metrics = read_state(checkpoint / STEP_METRICS, numbers, "Remove it: the card then says less.") or {}
    name, step = checkpoint.parent.name, checkpoint.name.removeprefix("global_step_")
    rows = [
        ("dtype of the weights", f"{long(dtype)}, each rounded once; {verdict}"),
        ("trained in", settings.get(f"{_ACTOR}.fsdp_config.mixed_precision.param_dtype")),
        ("sampled from in", settings.get(f"{_ROLLOUT}.dtype")),
        ("loss", settings.get(f"{_ACTOR}.policy_loss.loss_mode")),
        (f"k3 between trainer and rollout at step {step}", _gap(metrics)),
        ("mean reward at that step", metrics.get("critic/score/mean")),
        ("versions", ", ".join(f"{package} {version}" for package, version in installed_versions().items())),
    ]
    table = markdown_table(["", ""], [[what, _text(value)] for what, value in rows if value is not None])
    lines = [f"# {name}, step {step}", "", *table, "", "Written by:", "", "```bash"]
    lines += [f"verl-precision export {name}/{checkpoint.name} --dtype {dtype}", "```", ""]
    lines += [
        f"Serve it in {long(dtype)}, as config.json says: in another dtype it is another policy by that dtype's gap."
    ]
    if run is not None:
        chosen = {key: _public(settings[key]) for key in sorted(run.chosen) if key in settings}
        lines += ["", "Settings of the run that are not verl's defaults:", "", "```yaml"]
        lines += [yaml.safe_dump(chosen, sort_keys=False, allow_unicode=True).rstrip(), "```"]
    return "---\n" + yaml.safe_dump(_front_matter(settings), sort_keys=False) + "---\n\n" + "\n".join(lines) + "\n"


def _front_matter(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the hub reads; a base model only where it has a name there."""
    base = str(settings.get("actor_rollout_ref.model.path", ""))
    named = {"base_model": base} if base.count("/") == 1 and not Path(base).exists() else {}
    tags = ["reinforcement-learning", "verl", "verl-precision"]
    return {"library_name": "transformers", "pipeline_tag": "text-generation", **named, "tags": tags}


def _gap(metrics: Mapping[str, Any]) -> str:
    k3 = metrics.get(names.K3_KL)
    return "not recorded" if k3 is None else f"{k3:.3g} nats per token"


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _public(value: Any) -> Any:
    return Path(value).name if isinstance(value, str) and value.startswith(("/", "~")) else value
