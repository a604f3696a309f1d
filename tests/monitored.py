"""A run's config as small as a monitor takes it, and what stands for verl's trainer around its callbacks."""

from types import SimpleNamespace

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from verl_precision.integration.trainer.run_monitor import RunMonitor

ACTOR = {"strategy": "fsdp2", "use_kl_loss": False, "fsdp_config": {}, "policy_loss": {"loss_mode": "vp_grpo"}}
CLIP = {"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": 0.28}
ROLLOUT = {"name": "vllm", "dtype": "bfloat16", "response_length": 4}
MINIMAL = {
    **{"algorithm": {"adv_estimator": "rloo"}, "critic": {}},
    "actor_rollout_ref": {"actor": {**ACTOR, **CLIP}, "rollout": ROLLOUT},
}


def trainer_of(*changes: dict, **attributes) -> SimpleNamespace:
    """Return a trainer of this config that has its monitor."""
    trainer = SimpleNamespace(config=OmegaConf.merge(MINIMAL, *changes), **attributes)
    trainer.monitor = RunMonitor(trainer)
    return trainer


class Queue(dict):
    """verl's transfer queue: name -> one tensor a row."""

    def get(self, keys, partition_id, select_fields):
        rows = [int(key.split("_")[1]) for key in keys]
        fields = {name: [self[name][row] for row in rows] for name in select_fields}
        nested = {name: torch.nested.as_nested_tensor(some, layout=torch.jagged) for name, some in fields.items()}
        return TensorDict(nested, batch_size=len(rows))

    def put(self, keys, partition_id, fields):
        self.update(dict(fields.items()))
        return SimpleNamespace(fields=list(self))
