"""The time of keeping tokens in a step: choose, decide and write 16 of 32 responses, of 20,480 tokens each.

    python benchmarks/kept_tokens.py
    python benchmarks/kept_tokens.py --responses 16 --tokens 20480

The recorder of a run writes to a file on this machine's disk, with text. verl's transfer queue and tokenizer are
replaced: the fetched batch is small beside the batch of a verl step, and a run makes the text of each token only once.
The benchmark has one thread, as Ray gives to a driver.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from measure import Record, parser, record, report
from omegaconf import OmegaConf

from verl_precision.integration.trainer.run_monitor import RunMonitor
from verl_precision.mismatch.candidates import Candidates, lot_of
from verl_precision.mismatch.packing import flattened
from verl_precision.tools.kept_tokens import recorder as token_recorder

STEP_MS, PROMPT = 60_000.0, 1024
CONFIG = """
trainer: {logger: [console], default_local_dir: ""}
algorithm: {rollout_correction: {bypass_mode: true}, adv_estimator: rloo}
critic: {}
mismatch: {keep_tokens: 0}
actor_rollout_ref:
  actor:
    {strategy: fsdp2, use_kl_loss: false, fsdp_config: {}, policy_loss: {loss_mode: vp_grpo}, clip_ratio: 0.2,
    clip_ratio_low: 0.2, clip_ratio_high: 0.28}
  rollout: {name: vllm, dtype: bfloat16, prompt_length: 1024, response_length: 0}
"""


def parse() -> argparse.Namespace:
    made = parser(__doc__, repeats=7)
    made.add_argument("--responses", type=int, default=16, help="responses to keep, of twice as many")
    made.add_argument("--tokens", type=int, default=20_480, help="tokens of each response")
    return made.parse_args()


def batch_of(responses: int, tokens: int) -> dict[str, torch.Tensor]:
    """Return log-probs like a model's, with BF16's gap, and token ids like a text's, of which a few are common."""
    random = torch.Generator().manual_seed(0)
    mu = -torch.empty(responses, tokens).exponential_(2.5, generator=random)
    ids = torch.empty(responses, tokens + PROMPT).exponential_(0.7, generator=random).exp().clamp(max=150_000).long()
    return {
        "prompts": ids[:, :PROMPT],
        "responses": ids[:, PROMPT:],
        "response_mask": torch.ones(responses, tokens, dtype=torch.int64),
        "rollout_log_probs": mu,
        "log_probs": (mu + 0.02 * torch.randn(mu.shape, generator=random)).clamp(max=0),
        "advantages": torch.randn(responses, 1, generator=random).expand(-1, tokens).contiguous(),
        "rm_scores": torch.zeros(responses, tokens),
    }


def cpu_ms(call: Callable[[], object]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    torch.set_num_threads(1)
    keep, tokens = arguments.responses, arguments.tokens
    batch = batch_of(2 * keep, tokens)
    keys = [f"{row}_0_0" for row in range(2 * keep)]
    meta = SimpleNamespace(keys=keys, tags=[{"min_global_steps": 0}] * len(keys), partition_id="train")
    rows = {key: {name: values[row] for name, values in batch.items()} for row, key in enumerate(keys)}
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(f" {token:x}" for token in ids))

    def fetch_rows(keys: list[str], partition: str, *fields: str) -> dict[str, list[torch.Tensor]]:
        return {name: [rows[key][name] for key in keys] for name in fields}

    with TemporaryDirectory() as folder, patch.object(token_recorder, "fetch_rows", fetch_rows):
        config: Any = OmegaConf.create(CONFIG)
        config.trainer.default_local_dir, config.actor_rollout_ref.rollout.response_length = folder, tokens
        config.mismatch.keep_tokens = keep
        trainer = SimpleNamespace(config=config, tokenizer=tokenizer)
        trainer.monitor = RunMonitor(trainer)
        recorder = token_recorder.TokenRecorder(trainer)

        def keep_them() -> None:
            lots = [lot_of(1, key) for key in keys]
            pi, mu, mask = (batch[name] for name in ("log_probs", "rollout_log_probs", "response_mask"))
            trainer.monitor.candidates = Candidates.of_batch(keep, lots, flattened(pi, mu, mask=mask))
            recorder.write(meta, 1)

        times = [cpu_ms(keep_them) for _ in range(arguments.repeats + 1)][1:]
    what = f"{keep} responses of {tokens:,} tokens kept"
    growth, step = "with the tokens of the batch, and of what is kept", [STEP_MS] * len(times)
    yield record(f"{what}, CPU time", "a step of 60 s", "ms", times, step, at_most=0.005, growth=growth)


if __name__ == "__main__":
    report(records(given := parse()), given.json)
