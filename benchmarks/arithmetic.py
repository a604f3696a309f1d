"""Time of exact arithmetic beside operations rounded once in FP32, and beside native operations, on a CPU.

    python benchmarks/arithmetic.py
    python benchmarks/arithmetic.py --repeats 3

A training step: this package's FSDP2 engine as `engine.py` builds it, packed and with gradient checkpointing; all three
in one process. Sampled responses: vLLM draws four at a time, each arithmetic in a separate process; none ends early.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine import SHAPE, batch, engine, mean_log_prob, update
from measure import Record, alternate, parser, record, report
from verl.workers.config import EngineRouterReplayConfig

from verl_precision.base.dtypes import HALF
from verl_precision.engine.arithmetic_choice import INNER, VARIABLE
from verl_precision.engine.settings import ShadowSettings
from verl_precision.tools import tiny_model
from verl_precision.tools.engines.engine import SampleRequest, SamplerSettings
from verl_precision.tools.engines.engine_process import EngineProcess
from verl_precision.tools.engines.fsdp_scorer import make_group_of_one
from verl_precision.tools.engines.vllm_sampler import VllmEngine

TOKENS = 512  # of each of the two sequences of a step
REQUESTS = [SampleRequest(str(row), 0, (5,) * 16, max_tokens=64, seed=row) for row in range(4)]
NO_END = {"skip_tokenizer_init": True, "generation_config": "vllm"}  # nothing tells vLLM which token ends a response


def parse() -> argparse.Namespace:
    return parser(__doc__, repeats=9).parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    make_group_of_one("cpu")
    with TemporaryDirectory() as folder:
        tiny_model.ARCHITECTURES["benchmark"] = ("qwen3", SHAPE)
        model = Path(folder) / "benchmark"
        tiny_model.build_tiny_model("benchmark", model)
        for dtype in HALF:
            calls = {arithmetic: step(model, dtype, arithmetic) for arithmetic in INNER}
            size = f"{dtype}, 2 x {TOKENS} tokens"
            yield from compared("training step", size, calls, arguments.repeats, {"rounded_once": 2.5})
            with ExitStack() as ends:
                servers = {name: ends.enter_context(closing(server(model, dtype, name))) for name in INNER}
                calls = {name: partial(draw, one) for name, one in servers.items()}
                size = f"{dtype}, {len(REQUESTS)} x {REQUESTS[0].max_tokens} tokens"
                yield from compared("sampled responses", size, calls, arguments.repeats, {})


def compared(
    what: str, size: str, calls: dict[str, Callable], repeats: int, at_most: dict[str, float]
) -> Iterator[Record]:
    """Compare exact arithmetic with the two others; the three take turns."""
    times = alternate(calls, repeats, seconds=15)
    for peer in ("rounded_once", "native"):
        name = f"{what}, exact beside {peer}, {size}"
        yield record(name, peer, "ms", times["exact"], times[peer], at_most=at_most.get(peer))


def step(model: Path, dtype: str, arithmetic: str) -> Callable[[], None]:
    """Return a step of an engine; the engine reads the arithmetic when it is built, and in each step."""
    os.environ[VARIABLE] = arithmetic
    one = engine(model, dtype, ShadowSettings(), True, EngineRouterReplayConfig(mode="disabled"))

    def run() -> None:
        os.environ[VARIABLE] = arithmetic
        update(one, batch(TOKENS, packed=True), mean_log_prob)

    return run


def server(model: Path, dtype: str, arithmetic: str) -> EngineProcess:
    own = {"log_probs": True, "arithmetic": arithmetic, "more": NO_END}
    settings = SamplerSettings(model=str(model), dtype=dtype, max_model_len=512, **own)
    return EngineProcess(partial(VllmEngine, settings), f"{dtype}-{arithmetic}", model.parent / "logs")


def draw(one: EngineProcess) -> None:
    """Sample all responses; the first call also waits for the model to load."""
    one.submit(REQUESTS)
    responses: list[Any] = []
    while ready := one.poll():
        responses += ready
    assert [response.length for response in responses] == [request.max_tokens for request in REQUESTS]


if __name__ == "__main__":
    report(records(given := parse()), given.json)
