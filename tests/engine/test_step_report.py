import pytest

from verl_precision.engine.loss_scaling import LossScaler, ScalerStep
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.engine.step_report import StepReport

INF = float("inf")


def test_report_adds_up_the_updates_of_a_step():
    scaler, report = LossScaler(LossScaleSettings(), "cpu"), StepReport()
    assert not report.take_applied(), "nothing happened yet"
    for ranks, underflow in ((0, 0.1), (3, 0.2), (2, 0.3)):
        scaler.last_step = ScalerStep(ranks, underflow)
        report.add(INF if ranks else 1.0, scaler)
    assert report.last_skipped and report.take_applied() and not report.take_applied()
    assert report.metrics(scaler) == {
        "precision/skipped_steps": 2.0,
        "precision/loss_scale": 65536.0,
        "precision/overflow_rank_count": 3.0,
        "precision/grad_underflow_fraction": pytest.approx(0.2),
    }
    assert report.metrics(None) == {"precision/skipped_steps": 0.0}, "a new step"
