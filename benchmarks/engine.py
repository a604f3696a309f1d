"""Time of a training step of this package's FSDP2 engine beside verl's, in one process; and memory of FP32 log-probs.

    python benchmarks/engine.py
    python benchmarks/engine.py --dtype bf16 --repeats 5

One rank over gloo on a CPU, a Qwen3 of random weights, micro-batches of one sequence. The engines alternate, so that a
busy machine slows all of them; ratios are medians over the repeats. `shadow` engines run a second, no-grad forward in
the rollout's dtype; every 10th: one such step and nine without, added up. On a CPU verl's own loss scaler is off, so
that its FP16 steps leave out work that ours do.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["VERL_PLATFORM"] = "cpu"

import torch
import torch.distributed as dist
import verl  # noqa: F401 - loads the plugin
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_precision import tiny_model
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.settings import DTYPES, ShadowSettings
from verl_precision.integration.engine_config import PrecisionFSDPConfig

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 4096}
SHADOW = "ours, shadow at every step"


def main() -> None:
    arguments = parse()
    log_prob_memory()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("cpu:gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        tiny_model.ARCHITECTURES["benchmark"] = ("qwen3", SHAPE)
        tiny_model.build_tiny_model("benchmark", Path(folder) / "model")
        engines = {
            "verl's": engine(folder, arguments.dtype, None),
            "ours": engine(folder, arguments.dtype, ShadowSettings()),
            SHADOW: engine(folder, arguments.dtype, ShadowSettings(arguments.dtype, ratio_source="shadow")),
        }
        times: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(arguments.repeats + 1):
            for name, one in engines.items():
                seconds = step(one, arguments.tokens)
                if repeat:  # the first warms up
                    times[name].append(seconds)
        dist.destroy_process_group()
    times["ours, shadow at every 10th"] = [(9 * a + b) / 10 for a, b in zip(times["ours"], times[SHADOW], strict=True)]
    print(f"\n{arguments.dtype}, 4 x {arguments.tokens} tokens, {torch.get_num_threads()} threads, {SHAPE}")
    print(f"| engine | step, s | ratio to verl's |\n|{'---|' * 3}")
    for name, seconds in times.items():
        ratio = statistics.median(a / b for a, b in zip(seconds, times["verl's"], strict=True))
        print(f"| {name} | {statistics.median(seconds):.3f} | {ratio:.3f} |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp16", help="compute dtype (default fp16)")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each of 4 sequences (default 256)")
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of each engine (default 9)")
    return parser.parse_args()


def engine(folder: str, dtype: str, shadow: ShadowSettings | None):
    """Return an initialised engine: verl's without `shadow`, else ours."""
    settings = dict(
        strategy="fsdp2",
        use_torch_compile=False,
        dtype=DTYPES[dtype],
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
    )
    model = HFModelConfig(
        path=f"{folder}/model",
        use_remove_padding=False,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    model.model_type = "language_model"
    ours = EngineRegistry.get_engine_cls("language_model", "fsdp2")
    built = (FSDPEngineWithLMHead if shadow is None else ours)(
        model_config=model,
        engine_config=FSDPEngineConfig(**settings)
        if shadow is None
        else PrecisionFSDPConfig(**settings, shadow=shadow),
        optimizer_config=FSDPOptimizerConfig(lr=1e-5, total_training_steps=1000),
        checkpoint_config=CheckpointConfig(),
    )
    built.initialize()
    return built


def step(one, tokens: int) -> float:
    """Return the seconds of a training step of 4 micro-batches."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(SHAPE["vocab_size"], (tokens,), generator=generator) for _ in range(4)]

    def nested(tensors):
        return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)

    data = tu.get_tensordict(
        {
            "input_ids": nested(sequences),
            "position_ids": nested([torch.arange(tokens) for _ in sequences]),
            "loss_mask": nested([torch.ones(tokens) for _ in sequences]),
            "temperature": torch.ones(4),
        },
        non_tensor_dict=dict(
            use_dynamic_bsz=False,
            micro_batch_size_per_gpu=1,
            use_remove_padding=False,
            use_fused_kernels=False,
            calculate_entropy=False,
            update_lr_scheduler=True,
        ),
    )

    def loss(model_output, data, dp_group):
        return -model_output["log_probs"].values().float().mean(), {}

    start = time.perf_counter()
    with one.train_mode():
        one.train_batch(data, loss)
    return time.perf_counter() - start


def log_prob_memory(tokens: int = 4096, vocabulary: int = 32768) -> None:
    """Print what log-probs of FP16 logits allocate beyond the logits and their gradient, forward and backward."""

    def peak(function) -> float:
        logits = torch.randn(tokens, vocabulary).half().requires_grad_()
        labels = torch.randint(vocabulary, (tokens,))
        with torch.profiler.profile(profile_memory=True) as profile:
            function(logits, labels).sum().backward()
        alive = largest = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                alive += event.nbytes()
                largest = max(largest, alive)
        assert logits.grad is not None
        return (largest - 2 * logits.grad.numel()) / 2**20

    ones = torch.ones(tokens)
    print(f"log-probs of {tokens} x {vocabulary} FP16 logits ({tokens * vocabulary * 2 / 2**20:.0f} MiB)")
    print("extra MiB, verl's in FP16:", f"{peak(lambda x, y: logprobs_from_logits(x, y)):.0f}")
    print("extra MiB, verl's in FP32:", f"{peak(lambda x, y: logprobs_from_logits(x.float(), y)):.0f}")
    for chunk in (128, 512, 2048):

        def ours(x, y, chunk=chunk):
            return log_probs_and_entropy(x, y, ones, chunk_tokens=chunk, with_entropy=False)[0]

        one = chunk * vocabulary * 4 / 2**20
        print(f"extra MiB, ours with chunks of {chunk} tokens ({one:.0f} MiB of FP32 logits each): {peak(ours):.0f}")


if __name__ == "__main__":
    main()
