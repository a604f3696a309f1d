"""The whole of verl's `ppo_loss`, on nested tensors as engines hand them over: loss, gradient and metrics arrive."""

import pytest
import torch
from conftest import actor_config
from plain_equations import plain_gradient, random_case
from tensordict import TensorDict

PROMPT = 3


def nested(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def micro_batch(case, trainer):
    """Responses with their prompts; log-probs are shifted by one against the sequence, as a model returns them."""
    from verl.utils import tensordict_utils as tu

    lengths = [int(row.nonzero().max()) + 1 for row in case.mask]
    log_probs = [
        torch.cat([torch.zeros(PROMPT - 1), row[:n], torch.zeros(1)]) for row, n in zip(trainer, lengths, strict=True)
    ]
    data = {
        "prompts": nested([torch.ones(PROMPT, dtype=torch.long) for _ in lengths]),
        "responses": nested([torch.ones(n, dtype=torch.long) for n in lengths]),
        "response_mask": nested([row[:n] for row, n in zip(case.mask, lengths, strict=True)]),
        "old_log_probs": nested([row[:n] for row, n in zip(case.rollout, lengths, strict=True)]),
        "advantages": nested([a.expand(n).clone() for a, n in zip(case.advantages, lengths, strict=True)]),
    }
    batch = TensorDict(data, batch_size=len(lengths))
    tu.assign_non_tensor(
        batch, dp_size=1, batch_num_tokens=int(case.mask.sum()), global_batch_size=len(lengths), max_response_len=-1
    )
    return {"log_probs": nested(log_probs)}, batch


@pytest.mark.parametrize("estimator", ["pg_seq_is", "pg_seq_tis", "pg_seq_mis"])
def test_policy_gradient_through_ppo_loss(estimator):
    from verl.workers.utils.losses import ppo_loss

    case = random_case(3)
    case = case.rows(case.mask.any(dim=-1)).to(torch.float32)
    trainer = case.trainer.clone().requires_grad_()
    model_output, data = micro_batch(case, trainer)
    loss, metrics = ppo_loss(actor_config(estimator), model_output, data)
    loss.backward()
    expected = plain_gradient(estimator, case).float()
    torch.testing.assert_close(trainer.grad, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert metrics["actor/pg_loss"].aggregate() == pytest.approx(loss.item())
    assert metrics["actor/seq_log_ratio_q50"].aggregate() == pytest.approx(
        torch.where(case.mask, case.trainer - case.rollout, 0).sum(dim=-1).double().quantile(0.5).item(), rel=1e-5
    )
