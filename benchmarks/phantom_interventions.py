"""Phantom clipping and three interventions on it, in real runs on a CPU: reward and clipped share over steps.

    python benchmarks/phantom_interventions.py --output outputs/phantom_interventions
    python benchmarks/phantom_interventions.py --steps 30 --side-by-side 1

FP32 training, BF16 rollouts, PPO's ratio against the rollout's log-probs (bypass mode), the model whose weights are
rough enough for BF16 to reach the clip range. Then the same with the ratio from a shadow in BF16, with the ratio set to
1, without clipping, and with an FP32 rollout. Writes metrics of every run, summary.md and curves.png; runs that are
finished already are kept. 3 to 5 minutes a run of 12 steps.
"""

import argparse
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

from verl_precision.runs.launch import run_verl
from verl_precision.runs.read import read_metrics

RECIPE = Path("recipes/quickstart/quickstart.yaml")
SHADOW = "actor_rollout_ref.actor.fsdp_config.shadow"
COMMON = ("tiny_architecture=qwen3_rough", "algorithm.rollout_correction.bypass_mode=True", f"{SHADOW}.every_n_steps=1")
MISMATCHED, MATCHED = "precision=fp32_train_bf16_rollout", "precision=fp32"
RUNS = {
    "clipped (grpo)": ("estimator=grpo", MISMATCHED),
    "ratio_source=shadow": ("estimator=grpo", MISMATCHED, f"{SHADOW}.ratio_source=shadow"),
    "ratio_one": ("estimator=ratio_one", MISMATCHED),
    "grpo_unclipped": ("estimator=grpo_unclipped", MISMATCHED),
    "matched precision (fp32)": ("estimator=grpo", MATCHED),
}
CURVES = {
    "critic/score/mean": "reward",
    "phantom/fraction": "share of tokens phantom-clipped",
    "mismatch/log_prob_gap_abs_mean": "mean |log π - log μ|, nats",
}


def main() -> None:
    arguments = parse()
    shared = (f"trainer.total_training_steps={arguments.steps}", f"actor_rollout_ref.actor.optim.lr={arguments.lr}")

    def run(name: str) -> list[dict[str, float]]:
        folder = arguments.output / name.split(" ")[0].replace("=", "_")
        finished, metrics = folder / "finished", folder / "metrics.jsonl"
        if not finished.exists():
            shutil.rmtree(
                folder, ignore_errors=True
            )  # of a run that was interrupted: it has no checkpoint to go on from
            seconds = run_verl(RECIPE, (*COMMON, *RUNS[name], *shared), folder, lambda progress: None)
            finished.write_text(f"{seconds:.0f} s\n")
        print(f"{name}: {finished.read_text().strip()}", flush=True)
        return read_metrics(metrics)

    arguments.output.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(arguments.side_by_side) as pool:
        runs = dict(zip(RUNS, pool.map(run, RUNS), strict=True))
    text = table(runs, arguments.steps)
    (arguments.output / "summary.md").write_text(text)
    print(text)
    draw(runs, arguments.output / "curves.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("outputs/phantom_interventions"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--lr", type=float, default=3e-3, help="the quickstart's by default")
    parser.add_argument("--side-by-side", type=int, default=2, help="runs at a time; 8 GiB each (default 2)")
    return parser.parse_args()


def table(runs: dict[str, list[dict[str, float]]], steps: int) -> str:
    shown = sorted({1, 2, steps // 4, steps // 2, 3 * steps // 4, steps} - {0})
    lines = [
        "| run | " + " | ".join(f"reward, step {step}" for step in shown) + " | phantom-clipped | clipped by the loss |"
    ]
    lines.append("|---" * (len(shown) + 3) + "|")
    for name, rows in runs.items():
        reward = {row["step"]: row["critic/score/mean"] for row in rows}
        phantom = sum(row.get("phantom/fraction", 0.0) for row in rows) / len(rows)  # absent where none can be
        clipped = [
            row["actor/clip_fraction_low"] + row["actor/clip_fraction_high"]
            for row in rows
            if "actor/clip_fraction_low" in row
        ]
        by_loss = f"{sum(clipped) / len(clipped):.2%}" if clipped else "-"
        lines.append(
            f"| {name} | " + " | ".join(f"{reward[step]:.1f}" for step in shown) + f" | {phantom:.2%} | {by_loss} |"
        )
    return "\n".join(lines) + "\n"


def draw(runs: dict[str, list[dict[str, float]]], path: Path) -> None:
    matplotlib.use("Agg")
    figure, axes = plt.subplots(1, len(CURVES), figsize=(14, 4), layout="constrained")
    for axis, (metric, label) in zip(axes, CURVES.items(), strict=True):
        for name, rows in runs.items():
            axis.plot([row["step"] for row in rows], [row.get(metric, 0.0) for row in rows], label=name, marker=".")
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
