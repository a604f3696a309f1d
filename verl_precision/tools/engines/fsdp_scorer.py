"""Scores responses with verl's FSDP engine: log π(yₜ) of each token, by a trainer's forward pass.

One rank, FP32 master weights, the engine and the settings of `precision=<dtype>`. The environment variables of verl
are set before its import, so functions import it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_precision.base.dtypes import long
from verl_precision.tools.engines.engine import Response, SampleRequest, ScorerSettings, prepare_process
from verl_precision.tools.engines.model import model_location


class TrainerEngine:
    """verl's engine of an actor, with this package's precision config."""

    def __init__(self, settings: ScorerSettings) -> None:
        """Load a model."""
        on_gpu = prepare_process(settings.arithmetic)
        from verl.trainer.config import CheckpointConfig
        from verl.workers.config import EngineRouterReplayConfig, FSDPOptimizerConfig, HFModelConfig
        from verl.workers.engine import EngineRegistry

        from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig

        make_group_of_one("cuda" if on_gpu else "cpu")
        dtype, self._settings = settings.dtype, settings
        self._engine = EngineRegistry.get_engine_cls("language_model", "fsdp2")(
            model_config=HFModelConfig(
                path=model_location(settings.model),
                use_remove_padding=settings.packed,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": settings.attention},
            ),
            engine_config=PrecisionFSDPConfig(
                strategy="fsdp2",
                use_torch_compile=False,
                dtype=long(dtype),
                mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
                fp32_log_probs=settings.fp32_log_probs,
                fp32_output_head=settings.fp32_output_head,
                router_replay=EngineRouterReplayConfig(mode=settings.router_replay),
            ),
            # The optimizer makes its state at the first step, and there is none.
            optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=1),
            checkpoint_config=CheckpointConfig(),
        )
        self._engine.sends_weights = False
        self._engine.initialize()
        self._waiting: list[SampleRequest] = []

    def submit(self, requests: Sequence[SampleRequest]) -> None:
        """Queue requests."""
        self._waiting += requests

    def poll(self) -> list[Response]:
        """Score all queued requests; an empty response has no log-probs."""
        requests, self._waiting = self._waiting, []
        empty = [Response(*r.key, 0, log_probs=()) for r in requests if not r.response_token_ids]
        filled = [request for request in requests if request.response_token_ids]
        return empty + (self._scored(filled) if filled else [])

    def _scored(self, requests: list[SampleRequest]) -> list[Response]:
        """Return log π of each response's tokens in FP32, with R2 also the experts that the routers chose."""
        from verl_precision.integration.engine.router_replay import CHOICES

        sequences = [torch.tensor(r.prompt_token_ids + r.response_token_ids, dtype=torch.long) for r in requests]
        data = engine_batch(
            sequences,
            max_token_len_per_gpu=max(self._settings.micro_batch_tokens, *map(len, sequences)),
            use_remove_padding=self._settings.packed,
            calculate_entropy=False,
        )
        data["temperature"] = torch.full((len(sequences),), self._settings.temperature)
        if self._settings.router_replay == "R3":
            choices = [torch.from_numpy(request.routed_experts) for request in requests]
            # The last token gets a row of zeros: its experts affect no log-prob.
            data[CHOICES] = nested([torch.cat([each, torch.zeros_like(each[:1])]) for each in choices])
        with self._engine.eval_mode():
            outputs = self._engine.infer_batch(data)["model_output"]
        recorded: Any = outputs[CHOICES].unbind() if self._settings.router_replay == "R2" else [None] * len(requests)
        # At position t the engine gives the log-prob of token t + 1.
        return [
            Response(
                *request.key,
                len(request.response_token_ids),
                log_probs=tuple(log_probs.float().cpu()[len(request.prompt_token_ids) - 1 : -1].tolist()),
                routed_experts=None if experts is None else experts[:-1].cpu().numpy(),
            )
            for request, log_probs, experts in zip(requests, outputs["log_probs"].unbind(), recorded, strict=True)
        ]


def make_group_of_one(device: str) -> None:
    """Make the default process group with only this process."""
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "cpu:gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)


def engine_batch(sequences: list[Tensor], **settings: object) -> Any:
    """Return token ids, [T] each, as a micro-batch for verl's engine; every token counts, the temperature is 1.

    `settings` are the other entries of the batch that the engine needs, such as `use_remove_padding`.
    """
    from verl.utils import tensordict_utils as tu

    tensors = {
        "input_ids": nested(sequences),
        "position_ids": nested([torch.arange(len(sequence)) for sequence in sequences]),
        "loss_mask": nested([torch.ones(len(sequence)) for sequence in sequences]),
        "temperature": torch.ones(len(sequences)),
    }
    return tu.get_tensordict(tensors, {"use_dynamic_bsz": True, "use_fused_kernels": False, **settings})


def nested(tensors: list[Tensor]) -> Tensor:
    """Return tensors of different lengths as one nested tensor, the form that verl's engine takes."""
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
