"""The whole of verl's `ppo_loss`, on nested tensors as engines hand them over: loss, gradient and metrics arrive."""

import pytest
import torch
from composer import actor_config
from conftest import composed
from plain_equations import plain_gradient, random_case, relative_error
from tensordict import TensorDict

PROMPT = 3


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(case, trainer):
    """Return responses with their prompts; log-probs are shifted by one against the sequence, as by a model."""
    from verl.utils import tensordict_utils as tu

    rows = range(len(case.mask))
    lengths = [int(row.nonzero().max()) + 1 for row in case.mask]

    def unpadded(values):
        return nested([values[row][: lengths[row]] for row in rows])

    data = {
        "prompts": nested([torch.ones(PROMPT, dtype=torch.long) for _ in rows]),
        "responses": unpadded(torch.ones_like(case.mask, dtype=torch.long)),
        "response_mask": unpadded(case.mask),
        "old_log_probs": unpadded(case.rollout),
        "advantages": unpadded(case.advantages.unsqueeze(-1).expand_as(case.mask).clone()),
    }
    batch = TensorDict(data, batch_size=len(rows))
    counts = {"batch_num_tokens": int(case.mask.sum()), "global_batch_size": len(rows)}
    tu.assign_non_tensor(batch, dp_size=1, max_response_len=-1, **counts)
    before, after = torch.zeros(PROMPT - 1), torch.zeros(1)
    return {"log_probs": nested([torch.cat([before, trainer[row][: lengths[row]], after]) for row in rows])}, batch


@pytest.mark.parametrize("estimator", ["pg_seq_is", "pg_seq_tis", "pg_seq_mis"])
def test_policy_gradient_through_ppo_loss(estimator):
    from verl.workers.utils.losses import ppo_loss

    case = random_case(3)
    case = case.rows(case.mask.any(dim=-1)).to(torch.float32)
    trainer = case.trainer.clone().requires_grad_()
    loss, metrics = ppo_loss(actor_config(composed(estimator)), *micro_batch(case, trainer))
    loss.backward()
    assert relative_error(trainer.grad, plain_gradient(estimator, case)) < 1e-5
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(loss.item())
    log_ratios = torch.where(case.mask, case.trainer - case.rollout, 0).sum(dim=-1)
    assert metrics["actor/seq_log_ratio_q50"].aggregate() == pytest.approx(log_ratios.quantile(0.5).item(), rel=1e-5)
