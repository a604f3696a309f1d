"""Losses of this package in prime-rl, SkyRL and slime: one function for each framework's own hook.

    prime-rl   [trainer.loss]  type = "custom", import_path = "plug_ins.prime_rl_loss", kwargs = {name = "vp_pg_seq_is"}
    SkyRL      register_policy_loss("vp_pg_seq_is")(skyrl_loss), and trainer.algorithm.policy_loss_type=vp_pg_seq_is
    slime      --loss-type custom_loss --custom-loss-function-path plug_ins.slime_loss

Another loss is a name of `POLICY_LOSSES`, with its options: functools.partial(skyrl_loss, name="vp_grpo",
clip_high=0.28). Each framework divides by its own counts, so that a loss gives a sum over tokens here.
docs/other_frameworks.md names the versions whose signatures these are; none was run inside its framework.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from verl_precision.losses import POLICY_LOSSES, Aggregation

DEFAULT, SUM = "vp_pg_seq_is", Aggregation("token-sum")


class LossOutputs(NamedTuple):
    """What prime-rl reads of a loss."""

    loss: Tensor
    metrics: dict[str, Tensor]


def prime_rl_loss(inputs: Any, name: str = DEFAULT, **options: Any) -> LossOutputs:
    """Return the loss of one sample; prime-rl has no log-probs of the trainer at θ', so the rollout's replace them."""
    weights = 1 if inputs.loss_weights is None else inputs.loss_weights  # positive: they scale the advantages
    rollout = inputs.inference_logprobs[None]
    tensors = {"trainer_log_probs": inputs.trainer_logprobs[None], "rollout_log_probs": rollout}
    tensors["proximal_log_probs"] = rollout
    tensors |= {"advantages": (inputs.advantages * weights)[None], "response_mask": inputs.loss_mask[None]}
    output = POLICY_LOSSES[name](tensors, SUM, **options)
    return LossOutputs(output.loss, {each: torch.tensor(value) for each, value in output.values().items()})


def skyrl_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, config: Any, loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None, name: str = DEFAULT, **options: Any,
) -> tuple[Tensor, dict[str, float]]:  # fmt: skip
    """Return the loss of a micro-batch, whose advantages SkyRL has divided by its counts, and the loss's metrics."""
    tensors = {"trainer_log_probs": log_probs, "proximal_log_probs": old_log_probs, "advantages": advantages}
    tensors |= {} if rollout_logprobs is None else {"rollout_log_probs": rollout_logprobs}
    tensors["response_mask"] = torch.ones_like(log_probs) if loss_mask is None else loss_mask
    output = POLICY_LOSSES[name](tensors, SUM, **options)
    return output.loss, output.values()


def slime_loss(
    args: Any, batch: Any, logits: Tensor, sum_of_sample_mean: Any, name: str = DEFAULT, **options: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a micro-batch, reduced by slime; a response must be whole on its rank."""
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs

    if args.context_parallel_size > 1:
        raise ValueError("context_parallel_size > 1 splits responses, and their ratios need all tokens. Allowed: 1")
    lengths = {each: batch[each] for each in ("unconcat_tokens", "total_lengths", "response_lengths")}
    of_top_p = get_rollout_top_p_logprob_kwargs(args, batch)
    _, found = get_log_probs_and_entropy(logits, args=args, with_entropy=False, **lengths, **of_top_p)
    log_probs = found["log_probs"]
    rows = {"rollout_log_probs": batch["rollout_log_probs"], "advantages": batch["advantages"]}
    rows |= {"proximal_log_probs": batch.get("log_probs") or log_probs, "response_mask": batch["loss_masks"]}
    tensors = {each: pad_sequence([row.detach() for row in of_each], True) for each, of_each in rows.items()}
    leaf = pad_sequence([row.detach() for row in log_probs], True).requires_grad_()
    output = POLICY_LOSSES[name]({**tensors, "trainer_log_probs": leaf}, SUM, **options)
    (slope,) = torch.autograd.grad(output.loss, leaf)  # of each token, before slime's mean over samples
    values = [row * of_row[: len(row)] for row, of_row in zip(log_probs, slope, strict=True)]
    loss = sum_of_sample_mean(torch.cat(values))
    return loss, {"loss": loss.detach()}  # slime divides each number by its count of samples
