"""Time and memory of each loss, forward and backward, beside verl's nearest own loss, in one process.

    python benchmarks/losses.py
    python benchmarks/losses.py --rows 8 --tokens 1024 --repeats 5

Both are called as verl calls them, with the config of the preset, and alternate, so that a busy machine slows both.
Time: median over the repeats. Memory: what one forward and backward allocates beyond the inputs at its peak, as counted
by torch's profiler on a CPU and by the allocator on a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

NEAREST = {
    "pg_seq_is": "bypass_mode",
    "pg_seq_tis": "bypass_mode",
    "pg_seq_mis": "bypass_mode",
    "grpo": "vanilla",
    "grpo_unclipped": "vanilla",
    "ratio_one": "vanilla",
    "gspo": "gspo",
}
MIB = 1 << 20


def main() -> None:
    arguments = parse()
    threads = torch.get_num_threads()
    print(f"{arguments.rows} x {arguments.tokens} float32, {arguments.repeats} repeats, {threads} threads")
    print(f"| loss | verl's | ours, ms | verl's, ms | ratio | ours, MiB | verl's, MiB |\n|{'---|' * 7}")
    for estimator, native in NEAREST.items():
        ours, theirs = prepare(estimator, None, arguments), prepare(estimator, native, arguments)
        ours(), theirs()
        times = [(clock(ours), clock(theirs)) for _ in range(arguments.repeats)]
        our_ms, their_ms = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
        ratio = statistics.median(a / b for a, b in times)
        memory = [peak_memory(step) / MIB for step in (ours, theirs)]
        columns = [f"{our_ms:.1f}", f"{their_ms:.1f}", f"{ratio:.2f}", *(f"{mib:.1f}" for mib in memory)]
        print("| " + " | ".join([estimator, native, *columns]) + " |")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="responses (default 64)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of the longest response (default 8192)")
    parser.add_argument("--repeats", type=int, default=15, help="timed calls of each (default 15)")
    parser.add_argument("--device", default="cpu", help="torch device (default cpu)")
    return parser.parse_args()


def prepare(estimator: str, native: str | None, arguments: argparse.Namespace) -> Callable[[], None]:
    """Return one forward and backward of the preset's loss, or of verl's `native` in its place."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.utils.config import omega_conf_to_dataclass

    overrides = [
        "hydra.searchpath=[pkg://verl_precision.presets]",
        f"+estimator={estimator}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        f"data.max_response_length={arguments.tokens}",
    ]
    if native == "bypass_mode":  # verl's importance-weighted policy gradient, reached by its typed settings
        correction = "actor_rollout_ref.actor.policy_loss.rollout_correction"
        overrides += [f"++{correction}.loss_type=reinforce", f"++{correction}.rollout_is=sequence"]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    OmegaConf.resolve(config)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    generator = torch.Generator().manual_seed(0)
    shape = (arguments.rows, arguments.tokens)
    old = torch.randn(shape, generator=generator) - 3
    new = old + 1e-3 * torch.randn(shape, generator=generator)
    lengths = torch.randint(arguments.tokens // 4, arguments.tokens + 1, (arguments.rows, 1), generator=generator)
    mask = torch.arange(arguments.tokens) < lengths
    advantages = torch.randn(arguments.rows, 1, generator=generator).expand(shape).contiguous()
    old, new, mask, advantages = (tensor.to(arguments.device) for tensor in (old, new, mask, advantages))
    actor.global_batch_info.update(
        dp_size=1,
        batch_num_tokens=int(mask.sum()),
        global_batch_size=arguments.rows,
        loss_scale_factor=actor.loss_scale_factor,
    )
    loss_function = get_policy_loss_fn(native or actor.policy_loss.loss_mode)

    def step() -> None:
        log_probs = new.detach().requires_grad_()
        loss, _ = loss_function(
            old_log_prob=old,
            log_prob=log_probs,
            advantages=advantages,
            response_mask=mask,
            loss_agg_mode=actor.loss_agg_mode,
            config=actor,
            rollout_is_weights=None,
        )
        loss.backward()

    return step


def clock(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_memory(step: Callable[[], None]) -> int:
    """Return the largest number of bytes alive at once that the call allocated."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    alive = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            alive += event.nbytes()
            peak = max(peak, alive)
    return peak


if __name__ == "__main__":
    main()
