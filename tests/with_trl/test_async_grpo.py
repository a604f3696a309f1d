"""AsyncGRPOTrainer with examples/trl_grpo.py: our losses, the shadow's ratio, and TRL's own loss unchanged."""

import sys

import pytest
import torch
from composer import ROOT

pytestmark = pytest.mark.trl
sys.path.insert(0, str(ROOT / "recipes" / "phantom_clipping_trl"))

CLIP = {"clip_low": 0.2, "clip_high": 0.2}


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    """A trainer of the arm `clipped` whose first batch is sampled, with its first micro-batch as `inputs`."""
    import run_arms
    from make_task import write_task

    output = tmp_path_factory.mktemp("trl")
    write_task(output / "task" / "seed_0", 0)
    made = run_arms.make_trainer("clipped", 0, 1, output)
    made.rollout_worker.start()
    made.model.train()
    made.current_gradient_accumulation_steps = 8
    made.inputs = next(iter(made.get_train_dataloader()))
    return made


def gradients(trainer, moved=0.0, **precision):
    """Return loss, gradients and metrics of the micro-batch, after a step of size `moved` in every weight."""
    trainer.use_precision(shadow=torch.bfloat16, **precision)
    generator = torch.Generator().manual_seed(0)
    before = [weight.detach().clone() for weight in trainer.model.parameters()]
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight += moved * torch.randn(weight.shape, generator=generator)
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, trainer.inputs)
    loss.backward()
    found = [weight.grad.clone() for weight in trainer.model.parameters() if weight.grad is not None]
    with torch.no_grad():
        for weight, old in zip(trainer.model.parameters(), before, strict=True):
            weight.copy_(old)
    return loss.item(), found, trainer.vp_monitor.take_metrics()


def differ(one, other):
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("moved", [0.0, 3e-3])
def test_our_grpo_has_the_loss_and_the_gradient_of_trls(trainer, moved):
    loss, expected, metrics = gradients(trainer, moved)
    ours, found, _ = gradients(trainer, moved, loss="vp_grpo", options=CLIP)
    assert ours == pytest.approx(loss, abs=1e-6)
    largest = max(float(each.abs().max()) for each in expected)
    assert differ(found, expected) < 1e-5 * largest
    assert (metrics["phantom/clipped_fraction"] > 0.01) == (moved > 0), "weights that moved reach the clip"


def test_the_gap_is_that_of_trls_ratio(trainer):
    gradients(trainer)
    trainer._metrics["train"].clear()
    _, _, metrics = gradients(trainer, 3e-3)
    assert metrics["mismatch/chi_square"] > 0 and metrics["mismatch/k3_kl"] > 1e-4
    (kl,), (clipped,) = (trainer._metrics["train"][name] for name in ("kl", "clip_ratio/region_mean"))
    assert metrics["mismatch/k3_kl"] == pytest.approx(kl, rel=1e-3)
    assert metrics["phantom/clipped_fraction"] == pytest.approx(clipped, abs=1e-6)


def test_the_shadows_ratio_has_no_beta_and_the_trainers_gradient(trainer):
    _, _, plain = gradients(trainer, 3e-3)
    _, found, metrics = gradients(trainer, 3e-3, ratio="shadow")
    assert metrics["phantom/avoided_fraction"] > 0 and "phantom/avoided_fraction" not in plain
    _, again, _ = gradients(trainer, 3e-3, ratio="shadow", loss="vp_grpo", options=CLIP)
    assert differ(found, again) < 1e-5 * max(float(each.abs().max()) for each in found)


def test_what_cannot_work_is_refused(trainer):
    with pytest.raises(ValueError, match="needs a shadow"):
        trainer.use_precision(ratio="shadow")


def test_attention_of_segments_is_the_attention_of_each_alone():
    import trl_on_cpu

    generator, scale = torch.Generator().manual_seed(0), 0.3
    lengths = [(3, 5), (1, 4), (4, 4)]  # queries and keys: a path is longer than its segment
    q, k = (torch.tensor([0, *(pair[side] for pair in lengths)]).cumsum(0) for side in (0, 1))
    query = torch.randn(int(q[-1]), 4, 8, generator=generator)
    key, value = torch.randn(2, int(k[-1]), 2, 8, generator=generator)
    found = trl_on_cpu.varlen_attention(
        query, key, value, q, k, 4, 5, softmax_scale=scale, causal=True, window_size=(-1, -1)
    )
    for n, (queries, keys) in enumerate(lengths):
        of_q, of_k = slice(q[n], q[n + 1]), slice(k[n], k[n + 1])
        scores = torch.einsum("qhd,khd->hqk", query[of_q], key[of_k].repeat_interleave(2, dim=1)) * scale
        future = torch.arange(keys) > torch.arange(queries)[:, None] + keys - queries
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, value[of_k].repeat_interleave(2, dim=1))
        torch.testing.assert_close(found[of_q], expected)
