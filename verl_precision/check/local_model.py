"""The `config.json` of the model a config names, if it is on this machine. Nothing is downloaded."""

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig


def model_config(config: DictConfig) -> dict[str, Any]:
    """Return the model's own `config.json`; empty where it is not on this machine.

    Args:
        config: the composed config of `ppo_trainer`.
    """
    name = str(config.actor_rollout_ref.model.path)
    path = Path(name).expanduser() / "config.json"
    if not path.is_file():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        try:
            cached = try_to_load_from_cache(name, "config.json")
        except HFValidationError:  # no hub name either; the preflight names it
            return {}
        if not isinstance(cached, str):
            return {}
        path = Path(cached)
    return json.loads(path.read_text())
