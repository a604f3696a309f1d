"""Time of a training step of this package's FSDP2 engine beside verl's, in one process; and memory of FP32 log-probs.

    python benchmarks/engine.py
    python benchmarks/engine.py --dtype bf16 --repeats 5

One rank over gloo on a CPU, a Qwen3 of random weights, micro-batches of one sequence. The engines take turns. An engine
with a shadow runs a second, no-grad forward in the rollout's dtype; "every 10th" adds one such step and nine without.
On a CPU verl's own loss scaler is off, so verl's FP16 steps do less work than this package's.

A policy gradient beside `grpo`: verl computes log-probs at θ' with entropy for `grpo`, and then an update with its
`ppo_loss`; the policy gradients need only the update. Gradient checkpointing is on, as in all our scales, in FP32 also
off. A CPU without 16-bit kernels takes longer for a gradient than for a forward pass. The saved forward pass is then a
smaller part than on a GPU; FP32 has the right proportions.

Router replay: a Qwen3-MoE of the same size, 2 of 8 experts, packed. The replayed experts are those that the routers
would choose, so both steps compute the same.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ["VERL_PLATFORM"] = "cpu"

import torch
import verl  # noqa: F401 - loads the plugin
from measure import MIB, Record, actor_config, alternate, growth, matmul_peak, parser, peak_memory, record, report
from torch.utils.flop_counter import FlopCounterMode
from verl.trainer.config import CheckpointConfig
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.losses import ppo_loss

from verl_precision.base.dtypes import DTYPES, long, torch_dtype
from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.settings import ShadowSettings
from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.tools import tiny_model
from verl_precision.tools.engines.fsdp_scorer import engine_batch, make_group_of_one

SHAPE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "vocab_size": 2048}
SEQUENCES = 2
PROMPT = 16
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}
TOKENS = {"fp32": 512}  # otherwise 64, since a CPU's 16-bit products are slow
ARITHMETIC = "its matrix products at the speed of torch's largest"


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, repeats=9)
    both = ["fp16", "fp32"]
    arguments.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=both, help="default fp16 fp32")
    arguments.add_argument("--tokens", type=int, help="tokens of each of 2 sequences (default 64, in fp32 512)")
    return arguments.parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    yield log_prob_memory()
    make_group_of_one("cpu")
    with TemporaryDirectory() as folder:
        for name, layers in (("benchmark", SHAPE["num_hidden_layers"]), ("half", SHAPE["num_hidden_layers"] // 2)):
            tiny_model.ARCHITECTURES[name] = ("qwen3", {**SHAPE, "num_hidden_layers": layers})
            tiny_model.build_tiny_model(name, Path(folder) / name)
        tiny_model.ARCHITECTURES["experts"] = ("qwen3_moe", {**SHAPE, **EXPERTS})
        tiny_model.build_tiny_model("experts", Path(folder) / "experts")
        for dtype in arguments.dtype:
            setting = dtype, arguments.tokens or TOKENS.get(dtype, 64), arguments.repeats
            yield from engine_steps(Path(folder), *setting)
            for checkpointing in (True, False) if dtype == "fp32" else (True,):
                yield estimators(Path(folder), checkpointing, *setting)
            if dtype == "fp32":
                yield router_replay(Path(folder), *setting)


def engine_steps(folder: Path, dtype: str, tokens: int, repeats: int) -> Iterator[Record]:
    """Compare this package's engine, without a shadow and with one, with verl's."""

    def step(one: Any, tokens: int = tokens) -> None:
        update(one, batch(tokens), mean_log_prob)

    ours = engine(folder / "benchmark", dtype, ShadowSettings())
    calls = {
        "ours": partial(step, ours),
        "verl's": partial(step, engine(folder / "benchmark", dtype, None)),
        "shadow": partial(step, engine(folder / "benchmark", dtype, ShadowSettings(dtype, ratio_source="shadow"))),
        "half the tokens": partial(step, ours, tokens // 2),
        "half the layers": partial(step, engine(folder / "half", dtype, ShadowSettings())),
    }
    least = least_time(calls["ours"], dtype), least_time(calls["shadow"], dtype)
    times = alternate(calls, repeats, seconds=30)
    tenth = [(9 * a + b) / 10 for a, b in zip(times["ours"], times["shadow"], strict=True)]
    size = f"{dtype}, {SEQUENCES} x {tokens} tokens"
    grown = growth(times, "ours", {"tokens": "half the tokens", "layers": "half the layers"})
    for what, found, at_most, floor in (
        ("step of the engine", times["ours"], 1.02, least[0]),
        ("step with a shadow at every 10th", tenth, 1.04, 0.9 * least[0] + 0.1 * least[1]),
        ("step with a shadow at every step", times["shadow"], None, least[1]),
    ):
        fields = {"at_most": at_most, "limit": ARITHMETIC, "least": floor, "growth": grown}
        yield record(f"{what}, {size}", "verl's engine", "ms", found, times["verl's"], **fields)


def estimators(folder: Path, checkpointing: bool, dtype: str, tokens: int, repeats: int) -> Record:
    """Compare log-probs at θ' and update of `grpo` with the update of a policy gradient."""
    one = engine(folder / "benchmark", dtype, ShadowSettings(), checkpointing)

    def log_probs(**settings: bool) -> torch.Tensor:
        with one.eval_mode():
            whole = one.infer_batch(batch(tokens, **settings))["model_output"]["log_probs"]
        return nested([row[PROMPT - 1 : -1] for row in whole.unbind()])

    rollouts = log_probs()

    def estimator(name: str) -> Callable[[], None]:
        config = actor_config(name, tokens, "actor_rollout_ref.actor.strategy=fsdp2")
        loss = partial(ppo_loss, config=config)

        def step() -> None:
            data = batch(tokens)
            data["old_log_probs"] = log_probs(calculate_entropy=True) if name == "grpo" else rollouts
            update(one, data, loss)

        return step

    ours, theirs = estimator("pg_seq_is"), estimator("grpo")
    least = least_time(ours, dtype)
    times = alternate({"ours": ours, "theirs": theirs}, repeats, seconds=20)
    how = "gradient checkpointing" if checkpointing else "no gradient checkpointing"
    what = f"log-probs at θ' and update of pg_seq_is, {how}, {dtype}, {SEQUENCES} x {tokens} tokens"
    fields = {"at_most": 0.8, "limit": ARITHMETIC, "least": least, "growth": "as a step of the engine"}
    return record(what, "grpo", "ms", times["ours"], times["theirs"], **fields)


def router_replay(folder: Path, dtype: str, tokens: int, repeats: int) -> Record:
    """Compare a step with recorded experts with a step in which the routers choose the experts."""

    def step(one: Any, with_choices: bool) -> None:
        data = batch(tokens, packed=True)
        if with_choices:
            data["routed_experts"] = chosen
        update(one, data, mean_log_prob)

    modes = {"ours": "R2", "theirs": "disabled"}
    engines = {
        name: engine(folder / "experts", dtype, ShadowSettings(), True, EngineRouterReplayConfig(mode=mode))
        for name, mode in modes.items()
    }
    with engines["ours"].eval_mode():
        chosen = engines["ours"].infer_batch(batch(tokens, packed=True))["model_output"]["routed_experts"]
    calls = {name: partial(step, one, name == "ours") for name, one in engines.items()}
    least = least_time(calls["ours"], dtype)
    times = alternate(calls, repeats, seconds=20)
    what = f"step with router replay, {dtype}, {SEQUENCES} x {tokens} tokens"
    fields = {"limit": ARITHMETIC, "least": least, "growth": "as a step of the engine"}
    return record(what, "the same engine, whose routers choose", "ms", times["ours"], times["theirs"], **fields)


def engine(
    model_path: Path,
    dtype: str,
    shadow: ShadowSettings | None,
    checkpointing: bool = False,
    replay: EngineRouterReplayConfig | None = None,
) -> Any:
    """Return an initialised engine: with `shadow` this package's, otherwise verl's; `replay` packs sequences."""
    settings = dict(
        strategy="fsdp2",
        use_torch_compile=False,
        dtype=long(dtype),
        mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        **({} if replay is None else {"router_replay": replay}),
    )
    model = HFModelConfig(
        path=str(model_path),
        use_remove_padding=replay is not None,
        enable_gradient_checkpointing=checkpointing,
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


def nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch(tokens: int, calculate_entropy: bool = False, packed: bool = False) -> Any:
    """Return sequences of prompt and response, with the fields of verl's `ppo_loss` except `old_log_probs`."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(SHAPE["vocab_size"], (tokens,), generator=generator) for _ in range(SEQUENCES)]
    data = engine_batch(
        sequences,
        use_dynamic_bsz=False,
        micro_batch_size_per_gpu=1,
        use_remove_padding=packed,
        calculate_entropy=calculate_entropy,
        update_lr_scheduler=True,
        global_batch_size=SEQUENCES,
    )
    ones = [torch.ones(tokens - PROMPT) for _ in sequences]
    data["prompts"] = nested([sequence[:PROMPT] for sequence in sequences])
    data["responses"] = nested([sequence[PROMPT:] for sequence in sequences])
    data["response_mask"] = nested(ones)
    data["advantages"] = nested([float((-1) ** row) * one for row, one in enumerate(ones)])
    return data


def update(one: Any, data: Any, loss: Callable) -> None:
    with one.train_mode():
        one.train_batch(data, loss)


def mean_log_prob(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict]:
    """Return a loss that uses only log-probs."""
    return -model_output["log_probs"].values().float().mean(), {}


def least_time(step: Callable[[], None], dtype: str) -> float:
    """Return the least time of a step's matrix products, in milliseconds."""
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops() / matmul_peak(torch_dtype(dtype))


def log_prob_memory(tokens: int = 4096, vocabulary: int = 32768, chunk: int = 512) -> Record:
    """Compare the memory of FP32 log-probs of FP16 logits, without the logits and their gradient."""

    def peak(function: Callable) -> list[float]:
        logits = torch.randn(tokens, vocabulary).half().requires_grad_()
        labels = torch.randint(vocabulary, (tokens,))
        return [(peak_memory(lambda: function(logits, labels).sum().backward()) - 2 * logits.numel()) / MIB]

    def ours(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return log_probs_and_entropy(logits, labels, torch.ones(tokens), chunk_tokens=chunk, with_entropy=False)[0]

    return record(
        f"memory of FP32 log-probs, {tokens} x {vocabulary} FP16 logits, {chunk} at a time",
        "verl's of FP32 logits",
        "MiB",
        peak(ours),
        peak(lambda logits, labels: logprobs_from_logits(logits.float(), labels)),
        limit="one chunk in FP32",
        least=chunk * vocabulary * 4 / MIB,
        growth="with the chunk and the vocabulary, not with the tokens",
    )


if __name__ == "__main__":
    report(records(given := parse()), given.json)
