"""The plug-ins, called as their frameworks call them, have the gradient that is written by hand, in float64."""

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import plug_ins

RANDOM = torch.Generator().manual_seed(1)
LENGTHS = (5, 9, 1)
B, T = len(LENGTHS), max(LENGTHS)
LOG_PROBS = torch.rand(2, B, T, generator=RANDOM, dtype=torch.float64)
PI, OLD = -LOG_PROBS
MU = (PI + 0.3 * torch.randn(B, T, generator=RANDOM, dtype=torch.float64)).clamp(max=0)
ADVANTAGES = torch.tensor([1.5, -0.5, 2.0], dtype=torch.float64)[:, None].expand(B, T)
MASK = torch.arange(T) < torch.tensor(LENGTHS)[:, None]
MASK[1, 3] = False


def by_hand(name, other):
    """The gradient of the sum over tokens: -ρ A, or with GRPO -rA where the clip does not act."""
    gap = torch.where(MASK, PI - other, 0)
    if name == "vp_pg_seq_is":
        return torch.where(MASK, -gap.sum(1, keepdim=True).exp() * ADVANTAGES, 0)
    ratio = gap.exp()
    clipped = ((ratio > 1.28) & (ADVANTAGES > 0)) | ((ratio < 0.8) & (ADVANTAGES < 0))
    assert clipped[MASK].any() and not clipped[MASK].all()
    return torch.where(MASK & ~clipped, -ratio * ADVANTAGES, 0)


OPTIONS = {"vp_pg_seq_is": {}, "vp_grpo": {"clip_low": 0.2, "clip_high": 0.28}}


@pytest.mark.parametrize("name", OPTIONS)
def test_prime_rl_sums_samples_and_divides_by_its_scale(name):
    weights, scale, leaf = torch.tensor([1.0, 0.5, 2.0]).double(), 7, PI.clone().requires_grad_()
    samples = [
        SimpleNamespace(trainer_logprobs=leaf[n, :T], inference_logprobs=MU[n], ref_logprobs=None, loss_mask=MASK[n],
                        advantages=ADVANTAGES[n], loss_weights=None if n == 0 else weights[n].expand(T))
        for n in range(B)
    ]  # fmt: skip
    outputs = [plug_ins.prime_rl_loss(inputs, name=name, **OPTIONS[name]) for inputs in samples]
    (sum(output.loss for output in outputs) / scale).backward()
    torch.testing.assert_close(leaf.grad, by_hand(name, MU) * weights[:, None] / scale, rtol=1e-12, atol=1e-15)
    assert outputs[0].metrics and all(metric.dim() == 0 for metric in outputs[0].metrics.values())


@pytest.mark.parametrize("name", OPTIONS)
def test_skyrl_gives_advantages_that_are_divided(name):
    leaf, tokens = PI.clone().requires_grad_(), MASK.sum()
    function = partial(plug_ins.skyrl_loss, name=name, **OPTIONS[name])
    loss, metrics = function(leaf, OLD, ADVANTAGES / tokens, config=None, loss_mask=MASK.double(), rollout_logprobs=MU)
    loss.backward()
    expected = by_hand(name, MU if name == "vp_pg_seq_is" else OLD) / tokens
    torch.testing.assert_close(leaf.grad, expected, rtol=1e-12, atol=1e-15)
    assert metrics and all(isinstance(value, float) for value in metrics.values())


@pytest.fixture
def slime(monkeypatch):
    """slime's function for log-probs, where the logits are the log-probs."""
    module = ModuleType("slime.backends.megatron_utils.loss")
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}

    def log_probs(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy):
        return None, {"log_probs": [row[:n] for row, n in zip(logits, response_lengths, strict=True)]}

    module.get_log_probs_and_entropy = log_probs
    for name in ("slime", "slime.backends", "slime.backends.megatron_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize("name", OPTIONS)
def test_slime_takes_the_mean_of_each_sample(slime, name):
    def cut(rows):
        return [row[:n] for row, n in zip(rows, LENGTHS, strict=True)]

    def sum_of_sample_mean(values):
        parts = zip(values.split(LENGTHS), cut(MASK), strict=True)
        return sum((part * mask).sum() / mask.sum() for part, mask in parts)

    logits = PI.clone().requires_grad_()
    lengths = {"unconcat_tokens": None, "total_lengths": LENGTHS, "response_lengths": LENGTHS}
    batch = {"log_probs": cut(OLD), "rollout_log_probs": cut(MU), "advantages": cut(ADVANTAGES)} | lengths
    batch["loss_masks"] = cut(MASK)
    function = partial(plug_ins.slime_loss, name=name, **OPTIONS[name])
    loss, log = function(SimpleNamespace(context_parallel_size=1), batch, logits, sum_of_sample_mean)
    loss.backward()
    expected = by_hand(name, MU if name == "vp_pg_seq_is" else OLD) / MASK.sum(1, keepdim=True)
    torch.testing.assert_close(logits.grad, expected, rtol=1e-12, atol=1e-15)
    assert all(torch.is_tensor(value) for value in log.values())
    with pytest.raises(ValueError, match="context_parallel_size"):
        function(SimpleNamespace(context_parallel_size=2), batch, logits, sum_of_sample_mean)
