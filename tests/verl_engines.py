"""verl's FSDP engine around a tiny model, as our config makes it or verl's own."""

from typing import Any

import torch
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry

from verl_precision.base.dtypes import long
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.tools.tiny_model import cached_tiny_model


def make_engine(
    dtype="fp16", plain=False, cls=None, model_type="language_model", lora=None, rate=1e-2,
    save=("model", "optimizer", "extra"), strategy="fsdp2", packed=False, attention="sdpa",
    architecture="qwen3", **settings,
) -> Any:  # fmt: skip
    """Build an engine with further settings; `plain`: with verl's config; `packed`: as on a GPU."""
    settings |= {"strategy": strategy, "use_torch_compile": False, "dtype": long(dtype)}
    settings["mixed_precision"] = {"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    options = {"use_remove_padding": packed, "enable_gradient_checkpointing": packed, **(lora or {})}
    options["override_config"] = {"attn_implementation": attention}
    model = HFModelConfig(path=str(cached_tiny_model(architecture)), **options)
    model.model_type = model_type
    torch.manual_seed(0)  # the value head is drawn
    engine = (cls or EngineRegistry.get_engine_cls(model_type, strategy))(
        model_config=model,
        engine_config=(FSDPEngineConfig if plain else PrecisionFSDPConfig)(**settings),
        optimizer_config=FSDPOptimizerConfig(lr=rate, lr_scheduler_type="cosine", total_training_steps=100),
        checkpoint_config=CheckpointConfig(save_contents=list(save)),
    )
    engine.initialize()
    return engine
