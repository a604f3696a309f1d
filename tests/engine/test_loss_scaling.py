"""The scaler in one process: bounds, static mode, underflow, state, refusals; and the report on its steps."""

import contextlib
import json
import math

import pytest
import torch
from rubbish import FOREIGN, cut, flipped
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from verl_precision.base.errors import CheckpointStateError, EnvironmentMismatchError
from verl_precision.engine import loss_scaling
from verl_precision.engine.loss_scaling import FILE_NAME, LossScaler, StepReport, load_scaler, save_scaler
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.tools.engines.fsdp_scorer import make_group_of_one

INF = float("inf")


@pytest.fixture(autouse=True, scope="module")
def group():
    make_group_of_one("cpu")
    yield
    torch.distributed.destroy_process_group()


def scaler_with(**settings):
    return LossScaler(LossScaleSettings(**settings), "cpu")


def run(scaler, gradients):
    """One optimizer step per given gradient; return the scale after each and the parameter."""
    parameter = torch.nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    scales = []
    for gradient in gradients:
        optimizer.zero_grad()
        scaler.scale((parameter * gradient).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, parameter.detach()


def test_dynamic_scale_backs_off_grows_and_stays_within_bounds():
    """Start 8, bounds [2, 16], growth after 2 good steps."""
    scaler = scaler_with(initial=8.0, minimum=2.0, maximum=16.0, growth_interval=2)
    scales, parameter = run(scaler, [INF, INF, INF, INF, 1, 1, 1, 1, 1, 1, 1, 1])
    assert scales == [4, 2, 2, 2, 2, 4, 4, 8, 8, 16, 16, 16]
    assert parameter.tolist() == [-8.0] * 3, "eight applied updates of the unscaled gradient 1"


def test_static_scale_stays_and_still_skips():
    scaler = scaler_with(mode="static", initial=8.0, growth_interval=1, stop_after_steps_at_minimum=2)
    scales, parameter = run(scaler, [1, INF, 1, INF])
    assert scales == [8] * 4 and parameter.tolist() == [-2.0] * 3
    assert not scaler.exhausted
    run(scaler, [INF])
    assert scaler.exhausted


def test_loss_in_16_bits_is_scaled_in_fp32():
    """10 * 65536 is beyond FP16's 65504; torch's own scaler returns inf."""
    loss = torch.tensor(10.0, dtype=torch.float16)
    assert scaler_with().scale(loss).item() == 655360.0
    assert ShardedGradScaler("cpu").scale(loss).item() == INF


def test_device_without_scaling_is_refused():
    if torch.cuda.is_available():
        pytest.skip("needs a machine without CUDA")
    with pytest.warns(UserWarning, match="CUDA is not available"), pytest.raises(EnvironmentMismatchError) as error:
        LossScaler(LossScaleSettings(), "cuda")
    assert "trainer.device='cuda'" in str(error.value) and "precision=bf16" in str(error.value)


def test_underflow_fraction_by_hand():
    """FP16's smallest normal number is 2^-14. Of four non-zero elements one is below."""
    assert loss_scaling.underflow_fraction([torch.tensor([0.0, 2**-14, -(2**-15)]), torch.tensor([[1.0, INF]])]) == 0.25
    assert loss_scaling.underflow_fraction([torch.zeros(5)]) == 0.0
    assert loss_scaling.underflow_fraction([]) == 0.0
    large = torch.full((1 << 20,), 2.0**-20)  # of which every 16th is sampled
    assert loss_scaling.underflow_fraction([large, torch.ones(1)]) == pytest.approx(1 - 1 / 65537)


class BusyDevice(torch.Tensor):
    """A tensor of a GPU that has work queued: what is copied from it without waiting arrives when it is asked to.

    It stands for CUDA's documented order, on a machine without it. tests/gpu does the same on a real one.
    """

    under_way = []

    @staticmethod
    def __new__(cls, value):
        return torch.Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, device="cuda:0")

    def __init__(self, value):
        self.value = value

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        assert operation is torch.ops.aten._to_copy.default and kwargs["device"].type == "cpu"
        if not kwargs.get("non_blocking"):
            return args[0].value.clone()
        cls.under_way.append((on_the_host := torch.full(args[0].shape, torch.nan), args[0].value))
        return on_the_host


@pytest.mark.parametrize(("ours", "found", "unscaled"), [(True, 1.0, 0.25), (False, 0.0, math.nan)])
@pytest.mark.filterwarnings("ignore:.*GradScaler is enabled")
def test_overflow_of_an_offloaded_gradient_is_found_while_the_device_is_busy(ours, found, unscaled):
    """With `offload_policy` the scale is on the device and the gradients are on the CPU; pytorch#176429."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.full((2,), 1.0), torch.full((2,), INF)
    scaler = scaler_with(initial=4.0) if ours else ShardedGradScaler("cpu", init_scale=4.0)
    factor, flag = BusyDevice(torch.tensor(0.25)), BusyDevice(torch.tensor([0.0]))
    flags = scaler._unscale_grads_(torch.optim.SGD(parameters), factor, flag)
    while BusyDevice.under_way:
        on_the_host, value = BusyDevice.under_way.pop()
        on_the_host.copy_(value)
    assert {device.type: float(flag) for device, flag in flags.items()} == {"cpu": found}
    assert parameters[0].grad.tolist() == pytest.approx([unscaled] * 2, nan_ok=True)


def test_state_continues_and_settings_stay_those_of_the_config(tmp_path):
    """That a whole run continues exactly: `ranks.py`."""
    scaler = scaler_with(initial=64.0, growth_interval=4)
    run(scaler, [INF, 1, 1])
    save_scaler(scaler, str(tmp_path))
    other = scaler_with(initial=16.0, maximum=16.0, growth_interval=3, growth_factor=1.5)
    run(other, [1])
    load_scaler(other, str(tmp_path))
    assert other.state_dict() == {"scale": 16, "growth_tracker": 2, "steps_at_minimum": 0}, "32, but for the maximum"
    assert other.get_growth_interval() == 3 and other.get_growth_factor() == 1.5


GOOD = {"scale": 64.0, "growth_tracker": 3, "steps_at_minimum": 0}
CHANGES = {"scale": ("large", None, True, 0, math.nan, INF, 10**400), "growth_tracker": (-5, 1.5, 2**31, math.nan)}
CHANGES |= {"steps_at_minimum": (-5, 10, 0.5), "version": (2,)}
CHANGED = [json.dumps(GOOD | {name: value}).encode() for name, values in CHANGES.items() for value in values]


@pytest.mark.parametrize("content", [*FOREIGN.values(), b'{"scale": 1.0}', *CHANGED])
def test_damaged_state_is_refused_and_changes_nothing(tmp_path, content):
    (tmp_path / FILE_NAME).write_bytes(content)
    scaler = scaler_with()
    before = scaler.state_dict()
    with pytest.raises(CheckpointStateError, match=r"loss_scale\.json.* cannot be read .*delete it"):
        load_scaler(scaler, str(tmp_path))
    assert scaler.state_dict() == before


def test_a_state_cut_short_or_with_another_bit_is_refused_or_within_the_bounds(tmp_path):
    content, scaler = json.dumps(GOOD).encode(), scaler_with(growth_interval=5)
    for damaged in (*cut(content), *flipped(content)):
        (tmp_path / FILE_NAME).write_bytes(damaged)
        with contextlib.suppress(CheckpointStateError):
            load_scaler(scaler, str(tmp_path))
        state = scaler.state_dict()
        assert 1 <= state["scale"] <= 2**32 and 0 <= state["growth_tracker"] < 5 and 0 <= scaler.steps_at_minimum < 10


def test_an_interval_that_was_shortened_is_over_at_the_next_good_update():
    """torch grows where the counter equals the interval: beyond it the scale would never grow again."""
    scaler = scaler_with(growth_interval=2)
    scaler.load_state_dict(GOOD)
    assert run(scaler, [1])[0] == [128]


def test_state_of_torchs_scaler_is_understood():
    """A verl patched to save its scaler (patches/verl-0.9.1) hands this over when a run goes on with the plugin."""
    theirs = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=100)
    run(theirs, [INF, 1, 1, 1])
    scaler = scaler_with()
    scaler.load_state_dict(theirs.state_dict())
    assert scaler.state_dict() == {"scale": 64, "growth_tracker": 3, "steps_at_minimum": 0}


def test_report_adds_up_the_updates_of_a_step():
    scaler, report = scaler_with(), StepReport()
    for ranks, underflow in ((0, 0.1), (3, 0.2), (2, 0.3)):
        report.add(ranks > 0, loss_scaling.ScalerStep(ranks, underflow))
    assert report.skipped[-1] and report.take_applied() and not report.take_applied()
    found = dict(skipped_steps=2, loss_scale=65536, overflow_rank_count=3, grad_underflow_fraction=pytest.approx(0.2))
    assert report.metrics(scaler) == {f"precision/{name}": value for name, value in found.items()}
    assert report.metrics(None) == {"precision/skipped_steps": 0.0}, "a new step"
