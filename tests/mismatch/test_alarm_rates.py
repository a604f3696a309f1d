"""The rates quoted in docs/alarm.md, in small: the benchmark's own functions with fewer seeds."""

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "alarm_rates.py"


@pytest.fixture(scope="module")
def rates() -> ModuleType:
    spec = importlib.util.spec_from_file_location("alarm_rates", BENCHMARK)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("noise", ["Gaussian", "Student t(2)", "AR(1), phi 0.8"])
def test_no_alarm_in_steady_runs(rates, noise):
    flat = np.zeros(rates.STEPS)
    runs = (rates.series(rates.NOISES[noise], 0.3, flat, np.random.default_rng(seed)) for seed in range(20))
    assert rates.false_alarms(runs) == (0, 0)


def test_correlated_noise_of_twice_that_size_stays_below_one_alarm_in_a_thousand_steps(rates):
    flat, noise = np.zeros(rates.STEPS), rates.NOISES["AR(1), phi 0.8"]
    per_thousand, _ = rates.false_alarms(rates.series(noise, 0.6, flat, np.random.default_rng(s)) for s in range(20))
    assert per_thousand < 1


def test_longer_responses_raise_no_alarm_but_would_if_summed(rates):
    assert rates.false_alarms([rates.longer_responses(np.random.default_rng(0), per_response=False)]) == (0, 0)
    assert rates.false_alarms([rates.longer_responses(np.random.default_rng(0), per_response=True)])[1] == 1


@pytest.mark.parametrize("noise", ["Gaussian", "Student t(2)", "AR(1), phi 0.8"])
@pytest.mark.parametrize(("doubling", "latest"), [(10, 45), (50, 130), (200, 450)])
def test_growth_is_found_in_time(rates, noise, doubling, latest):
    delays = [rates.growing(rates.NOISES[noise], 0.3, doubling, 100, seed)[0] for seed in range(10)]
    assert max(delays) <= latest


def test_growth_from_the_first_step_is_found_although_the_baseline_grows(rates):
    delays = [rates.growing(rates.gaussian, 0.3, doubling, 0, 0)[0] for doubling in (10, 50, 200)]
    assert delays[0] < 70 and delays[1] < 150 and delays[2] < 420
