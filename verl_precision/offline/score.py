"""One process: verl's FSDP engine in one dtype gives log π(yₜ) of sampled tokens: the forward a trainer does.

`python -m verl_precision.offline.score FOLDER DTYPE ROLLOUT/SHARD...`; ends with its parent. One rank, FP32 master
weights, the engine and the settings of `precision=<dtype>`.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from verl_precision.engine.settings import DTYPES
from verl_precision.offline.entry import Task, entry
from verl_precision.offline.settings import OfflineSettings, model_folder
from verl_precision.offline.store import Store, read_rows, write_rows


def score(task: Task) -> None:
    """Write every shard of the task."""
    import torch.distributed as dist

    with TemporaryDirectory() as scratch:
        backend = "cpu:gloo,cuda:nccl" if task.on_gpu else "cpu:gloo"
        dist.init_process_group(backend, init_method=f"file://{Path(scratch) / 'rendezvous'}", rank=0, world_size=1)
        engine = build_engine(task.store.settings, task.dtype)
        for rollout, shard in task.shards:
            rows = read_rows(task.store.sample_file(rollout, shard))
            found = score_rows(engine, task.store, rows)
            write_rows(task.store.score_file(task.dtype, rollout, shard), found)
        dist.destroy_process_group()


def build_engine(settings: OfflineSettings, dtype: str) -> Any:
    """Return verl's engine of an actor, in our precision config.

    Args:
        settings: of the analysis.
        dtype: of the forward: bf16, fp16 or fp32.
    """
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    from verl_precision.engine.config import PrecisionFSDPConfig

    model = HFModelConfig(
        path=model_folder(settings.model),
        use_remove_padding=settings.attention == "flash_attention_2",
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": settings.attention},
    )
    config = PrecisionFSDPConfig(
        strategy="fsdp2",
        use_torch_compile=False,
        dtype=DTYPES[dtype],
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")(
        model_config=model,
        engine_config=config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),  # its state is made at the first step
        checkpoint_config=CheckpointConfig(),
    )
    engine.initialize()
    return engine


def score_rows(engine: Any, store: Store, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return log π of each response's tokens, FP32; an empty response has none.

    Args:
        engine: verl's.
        store: the analysis.
        rows: samples.
    """
    import torch
    from verl.utils import tensordict_utils as tu

    found: list[list[float]] = [[] for _ in rows]
    scored = [i for i, row in enumerate(rows) if row["response_ids"]]
    if scored:
        sequences = [
            torch.tensor(store.prompt_ids[rows[i]["prompt"]] + rows[i]["response_ids"], dtype=torch.long)
            for i in scored
        ]

        def nested(tensors: list[torch.Tensor]) -> torch.Tensor:
            return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

        data = tu.get_tensordict(
            {
                "input_ids": nested(sequences),
                "position_ids": nested([torch.arange(len(s)) for s in sequences]),
                "loss_mask": nested([torch.ones(len(s)) for s in sequences]),
                "temperature": torch.ones(len(sequences)),
            },
            non_tensor_dict={
                "use_dynamic_bsz": True,
                "max_token_len_per_gpu": max(store.settings.micro_batch_tokens, *map(len, sequences)),
                "use_remove_padding": store.settings.attention == "flash_attention_2",
                "use_fused_kernels": False,
                "calculate_entropy": False,
            },
        )
        with engine.eval_mode():
            outputs = engine.infer_batch(data)["model_output"]["log_probs"]
        for i, log_probs in zip(scored, outputs.unbind(), strict=True):
            # at position t the engine gives the log-prob of token t + 1
            start = len(store.prompt_ids[rows[i]["prompt"]]) - 1
            found[i] = log_probs.float().cpu()[start:-1].tolist()
    return [{"response": row["response"], "trainer_log_probs": values} for row, values in zip(rows, found, strict=True)]


if __name__ == "__main__":
    entry("score", score)
