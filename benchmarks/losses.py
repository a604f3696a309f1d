"""Time and memory of each loss, forward and backward, beside verl's nearest own loss, in one process.

    python benchmarks/losses.py
    python benchmarks/losses.py --rows 8 --tokens 1024 --repeats 5

Both losses are called as verl calls them, with the config of the preset, in turns. Memory is the peak of one forward
and backward without the inputs, as torch's profiler counts it on a CPU, and the allocator on a GPU.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from measure import MIB, Record, actor_config, alternate, bandwidth, growth, parser, peak_memory, record, report

NEAREST = {
    "pg_seq_is": "bypass_mode",
    "pg_seq_tis": "bypass_mode",
    "pg_seq_mis": "bypass_mode",
    "grpo": "vanilla",
    "grpo_unclipped": "vanilla",
    "ratio_one": "vanilla",
    "gspo": "gspo",
}
# Three float32 arrays and the mask are read, the gradient is written.
BYTES_A_TOKEN = 4 * 4 + 1


def parse() -> argparse.Namespace:
    arguments = parser(__doc__, repeats=15)
    arguments.add_argument("--rows", type=int, default=64, help="responses (default 64)")
    arguments.add_argument("--tokens", type=int, default=8192, help="tokens of the longest response (default 8192)")
    arguments.add_argument("--device", default="cpu", help="torch device (default cpu)")
    return arguments.parse_args()


def records(arguments: argparse.Namespace) -> Iterator[Record]:
    rows, tokens, device = arguments.rows, arguments.tokens, arguments.device
    speed, size = bandwidth(device), f"{rows} x {tokens} float32"
    for estimator, native in NEAREST.items():
        config, native_config = configured(estimator, None, tokens), configured(estimator, native, tokens)
        calls = {
            "ours": prepare(config, None, rows, tokens, device),
            "theirs": prepare(native_config, native, rows, tokens, device),
            "half the tokens": prepare(config, None, rows, tokens // 2, device),
            "half the responses": prepare(config, None, rows // 2, tokens, device),
        }
        times = alternate(calls, arguments.repeats)
        halves = {"tokens": "half the tokens", "responses": "half the responses"}
        yield record(
            f"loss {estimator}, {size}",
            f"verl's {native}",
            "ms",
            times["ours"],
            times["theirs"],
            limit="one pass over memory",
            least=rows * tokens * BYTES_A_TOKEN / speed,
            growth=growth(times, "ours", halves),
        )
        ours, theirs = ([peak_memory(calls[side]) / MIB] for side in ("ours", "theirs"))
        yield record(f"memory of loss {estimator}, {size}", f"verl's {native}", "MiB", ours, theirs)


def configured(estimator: str, native: str | None, tokens: int) -> Any:
    """Return the preset's actor config; with `native`, the config that this loss of verl needs."""
    correction = "++actor_rollout_ref.actor.policy_loss.rollout_correction"
    overrides = [f"{correction}.loss_type=reinforce", f"{correction}.rollout_is=sequence"]
    # these typed settings choose verl's importance-weighted policy gradient
    return actor_config(estimator, tokens, *(overrides if native == "bypass_mode" else ()))


def prepare(config: Any, native: str | None, rows: int, tokens: int, device: str) -> Callable[[], None]:
    """Return a function for one forward and backward of the config's loss, or instead of verl's `native`."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn

    generator = torch.Generator().manual_seed(0)
    shape = (rows, tokens)
    old = torch.randn(shape, generator=generator) - 3
    new = old + 1e-3 * torch.randn(shape, generator=generator)
    lengths = torch.randint(tokens // 4, tokens + 1, (rows, 1), generator=generator)
    mask = torch.arange(tokens) < lengths
    advantages = torch.randn(rows, 1, generator=generator).expand(shape).contiguous()
    old, new, mask, advantages = (tensor.to(device) for tensor in (old, new, mask, advantages))
    information = {
        "dp_size": 1,
        "batch_num_tokens": int(mask.sum()),
        "global_batch_size": rows,
        "loss_scale_factor": config.loss_scale_factor,
    }
    loss_function = get_policy_loss_fn(native or config.policy_loss.loss_mode)

    def step() -> None:
        config.global_batch_info.update(information)
        log_probs = new.detach().requires_grad_()
        loss, _ = loss_function(
            old_log_prob=old,
            log_prob=log_probs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=config.loss_agg_mode,
            config=config,
            rollout_is_weights=None,
        )
        loss.backward()

    return step


if __name__ == "__main__":
    report(records(given := parse()), given.json)
