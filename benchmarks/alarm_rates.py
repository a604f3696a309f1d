"""False alarms of the mismatch alarm, and its delay when the mismatch grows.

    python benchmarks/alarm_rates.py
    python benchmarks/alarm_rates.py --runs 50

Synthetic runs of 1,000 steps with k3 and mean |gap| go through the whole alarm with its default settings. Seeds are 0
to runs - 1. A series is exp(noise) around a level. σ is the standard deviation of log k3 (Student's t: scaled to the
same median absolute deviation). The noise of log |gap| is independent and half as large. Two series are made of tokens,
with growing responses, 2,000 to 16,000 tokens a step: the gaps are from a Student t(3) of scale 0.005, and give k3 and
mean |gap|.
"""

import argparse
import math
from collections.abc import Callable, Iterator

import numpy as np

from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm import Alarm, MismatchAlarm

STEPS = 1000
K3, GAP = 1e-5, 3e-3
# Median absolute deviation of a standard normal over that of a Student t(2).
T2_TO_NORMAL = 0.6744898 / 0.8164966
TOKENS = 2000, 16000
COMES_BACK = {
    "k3 10,000 times its baseline": {keys.K3_KL: 1e4 * K3, keys.LOG_PROB_GAP: 100 * GAP},
    "k3 6 times its baseline": {keys.K3_KL: 6 * K3, keys.LOG_PROB_GAP: 6**0.5 * GAP},
    "an update is skipped": {keys.SKIPPED_STEPS: 1.0},
    "an effective sample of 0.1": {keys.WEIGHT_ESS: 0.1},
}
HEALTHY = {keys.SKIPPED_STEPS: 0.0, keys.WEIGHT_ESS: 0.8}
Noise = Callable[[np.random.Generator, int], np.ndarray]


def gaussian(rng: np.random.Generator, steps: int) -> np.ndarray:
    return rng.standard_normal(steps)


def heavy_tailed(rng: np.random.Generator, steps: int) -> np.ndarray:
    return rng.standard_t(2, steps) * T2_TO_NORMAL


def correlated(rng: np.random.Generator, steps: int, phi: float = 0.8) -> np.ndarray:
    """AR(1) with standard deviation 1, from its stationary distribution."""
    shocks = rng.standard_normal(steps) * math.sqrt(1 - phi**2)
    values = np.empty(steps)
    value = rng.standard_normal()
    for step, shock in enumerate(shocks):
        values[step] = value = phi * value + shock
    return values


NOISES: dict[str, Noise] = {"Gaussian": gaussian, "Student t(2)": heavy_tailed, "AR(1), phi 0.8": correlated}


def series(noise: Noise, sigma: float, level: np.ndarray, rng: np.random.Generator) -> Iterator[dict[str, float]]:
    """Yield the metrics of each step; `level` is log of k3 over its baseline."""
    k3 = K3 * np.exp(level + sigma * noise(rng, level.size))
    gap = GAP * np.exp((level + sigma * noise(rng, level.size)) / 2)
    for pair in zip(k3, gap, strict=True):
        yield HEALTHY | dict(zip((keys.K3_KL, keys.LOG_PROB_GAP), map(float, pair), strict=True))


def longer_responses(rng: np.random.Generator, per_response: bool) -> Iterator[dict[str, float]]:
    """Yield metrics of a growing number of tokens: means over tokens, or for comparison sums over a response."""
    for tokens in np.geomspace(*TOKENS, STEPS).astype(int):
        gaps = 0.005 * rng.standard_t(3, tokens)
        factor = tokens / TOKENS[0] if per_response else 1.0
        k3 = float(np.mean(np.expm1(gaps) - gaps)) * factor
        yield {keys.K3_KL: k3, keys.LOG_PROB_GAP: float(np.abs(gaps).mean()) * factor}


def alarms_of(metrics: Iterator[dict[str, float]]) -> list[Alarm]:
    alarm = MismatchAlarm()
    return [raised for step, row in enumerate(metrics, 1) for raised in alarm.update(step, row)]


def false_alarms(runs: Iterator[Iterator[dict[str, float]]]) -> tuple[float, float]:
    """Return alarms per 1,000 steps, and the share of runs with an alarm."""
    counts = [len(alarms_of(run)) for run in runs]
    return 1000 * sum(counts) / (STEPS * len(counts)), float(np.mean([count > 0 for count in counts]))


def growing(noise: Noise, sigma: float, doubling: int, start: int, seed: int) -> tuple[float, float]:
    """Return steps from the start of growth to the first alarm (inf if none), and growth of k3 by then."""
    steps = start + 12 * doubling + 100
    level = np.maximum(0, np.arange(1, steps + 1) - start) * math.log(2) / doubling
    raised = alarms_of(series(noise, sigma, level, np.random.default_rng(seed)))
    after = [alarm.step - start for alarm in raised if alarm.step > start]
    return (after[0], 2 ** (after[0] / doubling)) if after else (math.inf, math.inf)


def coming_back(change: dict[str, float], every: int, seed: int) -> float:
    """Return the steps from step 40 to the first alarm (inf if none in 200); one step of every `every` is changed."""
    rows = series(gaussian, 0.3, np.zeros(240), np.random.default_rng(seed))
    changed = (row | (change if step >= 40 and step % every == 0 else {}) for step, row in enumerate(rows, 1))
    return min((raised.step - 40 for raised in alarms_of(changed)), default=math.inf)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=400, help="synthetic runs of each kind (default 400)")
    parser.add_argument("--token-runs", type=int, default=20, help="runs made of tokens (default 20)")
    runs, token_runs = (arguments := parser.parse_args()).runs, arguments.token_runs
    print(f"nothing grows: {runs} runs of {STEPS} steps each, {token_runs} of those made of tokens\n")
    print("| series | σ of log k3 | alarms per 1,000 steps | runs with any |\n|---|---|---|---|")
    flat = np.zeros(STEPS)
    for name, noise in NOISES.items():
        for sigma in (0.3, 0.6):
            found = false_alarms(series(noise, sigma, flat, np.random.default_rng(seed)) for seed in range(runs))
            print(f"| {name} | {sigma} | {found[0]:.4f} | {found[1]:.1%} |", flush=True)
    for name, summed in (("responses 8x longer, per token", False), ("the same, summed over a response", True)):
        found = false_alarms(longer_responses(np.random.default_rng(seed), summed) for seed in range(token_runs))
        print(f"| {name} | of the tokens | {found[0]:.4f} | {found[1]:.1%} |", flush=True)

    runs = max(1, runs // 4)
    print(f"\nevery so many steps are bad: {runs} runs each, delay in steps, median (largest)\n")
    print("| what | every 2nd | 3rd | 4th | 5th |\n|---|---|---|---|---|")
    for name, change in COMES_BACK.items():
        found = np.array([[coming_back(change, every, seed) for every in (2, 3, 4, 5)] for seed in range(runs)])
        cells = [f"{np.median(delays):.0f} ({delays.max():.0f})" for delays in found.T]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)

    print(f"\nk3 doubles every so many steps: {runs} runs each, delay in steps, median (95th percentile)\n")
    print("| series | doubles every | growth from | delay | k3 by then, times its start | missed |")
    print("|---|---|---|---|---|---|")
    for name, noise in NOISES.items():
        for start in (100, 0):
            for doubling in (10, 50, 200):
                found = np.array([growing(noise, 0.3, doubling, start, seed) for seed in range(runs)])
                (delay, factor), (late, _) = (np.percentile(found, q, axis=0, method="higher") for q in (50, 95))
                missed = np.isinf(found[:, 0]).mean()
                print(
                    f"| {name} | {doubling} | step {start} | {delay:.0f} ({late:.0f}) | {factor:.1f} | {missed:.0%} |"
                )


if __name__ == "__main__":
    main()
