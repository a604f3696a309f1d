"""The equations, written as they stand in the papers, one response at a time; automatic differentiation does the rest.

Nothing of the package is imported here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

C_NORM = 24
SPREADS = {"gspo": 2e-3, "geo_mask": 2e-3, "dppo_tv": 0.8, "dppo_kl": 0.8, "icepop": 0.5, "kpop": 0.8}
SPREADS |= dict.fromkeys(("off_policy_sequence_mask", "off_policy_sequence_mask_decoupled"), 0.6)


@dataclass(frozen=True)
class Case:
    """A random mini-batch: log-probs of three policies, advantages [B], mask."""

    trainer: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    mask: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        """Return the same numbers in another type."""
        floats = {name: getattr(self, name).to(dtype) for name in ("trainer", "proximal", "rollout", "advantages")}
        return replace(self, **floats)

    def rows(self, index) -> "Case":
        """Return some of the responses."""
        return Case(*(getattr(self, name)[index] for name in ("trainer", "proximal", "rollout", "advantages", "mask")))

    @property
    def advantages_BT(self) -> Tensor:
        return self.advantages.unsqueeze(-1) * self.mask


def random_case(seed: int, responses: int = 16, width: int = 20, spread: float = 0.25) -> Case:
    """Ragged lengths (one empty), holes in the mask, both signs of A, junk where masked; numbers exact in float32.

    With the default spread about a third of the responses have ρ > 3 and half of the tokens are clipped.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(responses, width, generator=generator) * scale

    lengths = torch.randint(1, width + 1, (responses,), generator=generator)
    lengths[1] = 0
    lengths[2] = width
    mask = torch.arange(width) < lengths.unsqueeze(-1)
    mask &= torch.rand(responses, width, generator=generator) > 0.1
    rollout = normal(1.0) - 3
    proximal = rollout + normal(spread)
    trainer = proximal + normal(spread)
    junk = torch.tensor([torch.nan, -torch.inf, torch.inf, 1e30])
    for tensor in (rollout, proximal, trainer):
        filler = junk[torch.randint(4, mask.shape, generator=generator)]
        tensor[~mask] = filler[~mask]
    advantages = torch.randn(responses, generator=generator)
    return Case(trainer.double(), proximal.double(), rollout.double(), advantages.double(), mask)


def case_for(estimator: str, seed: int) -> Case:
    """Return a case that clips about as much in gspo, and has the finite numbers that verl's own losses need."""
    case = random_case(seed, spread=SPREADS.get(estimator, 0.25))
    if estimator.startswith("off_policy_sequence_mask"):  # π has left half of the responses
        case.trainer[::2] -= 0.75
    if estimator.startswith(("dppo", "kpop")):  # tokens likely enough that their probability can move
        for tensor in (case.trainer, case.proximal, case.rollout):
            tensor[case.mask] = (tensor[case.mask] + 1.5).clamp(max=-0.01)
    if estimator in ("dapo", "verl's default"):
        for tensor in (case.trainer, case.proximal, case.rollout):
            tensor[~case.mask] = -1.0
    return case


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL of "this token or another one"."""
    return p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()


def objective_of_response(name: str, pi: Tensor, proximal: Tensor, mu: Tensor, advantage: Tensor) -> Tensor:
    """J of one response from the log-probs of its valid tokens; weights are constants where the paper has constants."""
    c = 2.0 if name == "grpo_token_tis" else 3.0
    rho, log_pi = (pi - mu).sum().exp(), pi.sum()
    r, s = (pi - proximal).exp(), (pi - proximal).mean().exp()
    rho_t, rho_proximal = (proximal - mu).exp().detach(), (proximal - mu).sum().exp().detach()
    clipped = torch.minimum(r * advantage, r.clamp(1 - 0.2, 1 + 0.28) * advantage)
    if name in ("dppo_tv", "dppo_kl"):
        p, q = pi.exp().detach(), mu.exp()
        distance, limit = ((p - q).abs(), 0.15) if name == "dppo_tv" else (divergence(q, p), 0.05)
        kept = (distance <= limit) | ((p - q) * advantage <= 0)
        return ((p / q).clamp(max=20.0) * kept * pi * advantage).sum()
    if name.startswith("off_policy_sequence_mask"):
        r = r if name.endswith("_decoupled") else (pi - mu).exp()
        dropped = advantage < 0 and (mu - pi).mean() > 0.5
        return float(not dropped) * torch.minimum(r * advantage, r.clamp(1 - 0.2, 1 + 0.28) * advantage).sum()
    old, q = proximal.exp(), mu.exp()
    objectives = {
        "pg_seq_is": lambda: rho * advantage,
        "pg_seq_tis": lambda: rho.detach().clamp(max=c) * log_pi * advantage,
        "pg_seq_mis": lambda: rho.detach() * float(rho <= c) * log_pi * advantage,
        "grpo": lambda: clipped.sum(),
        "grpo_token_tis": lambda: (rho_t.clamp(max=c) * clipped).sum(),
        "grpo_seq_mis": lambda: rho_proximal * float(rho_proximal <= c) * clipped.sum(),
        "grpo_unclipped": lambda: (r * advantage).sum(),
        "ratio_one": lambda: log_pi * advantage,
        "gspo": lambda: torch.minimum(s * advantage, s.clamp(1 - 3e-4, 1 + 4e-4) * advantage),
        "cispo": lambda: (r.detach().clamp(0.0, 6.0) * pi * advantage).sum(),
        "cispo_rollout": lambda: ((pi - mu).exp().detach().clamp(0.0, 6.0) * pi * advantage).sum(),
        "icepop": lambda: (torch.where((rho_t >= 0.5) & (rho_t <= 5.0), rho_t, 0) * clipped).sum(),
        "kpop": lambda: (torch.where(divergence(old, q).max(divergence(q, old)) <= 0.1, rho_t, 0) * clipped).sum(),
        "trm": lambda: float((rho_t - 1 - rho_t.log()).max() <= 0.3) * clipped.sum(),
        "geo_mask": lambda: float(0.999 <= rho_proximal ** (1 / len(pi)) <= 1.001) * clipped.sum(),
        # with the dual clip of verl's vanilla loss at 10
        "dapo": lambda: (torch.maximum(clipped, 10.0 * advantage) if advantage < 0 else clipped).sum(),
    }
    return objectives[name]()


def plain_gradient(name: str, case: Case, normalizer: float = C_NORM) -> Tensor:
    """Gradient of the loss with respect to the trainer's log-probs, in float64."""
    case = case.to(torch.float64)
    trainer = torch.where(case.mask, case.trainer, 0).requires_grad_()
    responses, tokens = len(case.mask), int(case.mask.sum())
    total = torch.zeros((), dtype=torch.float64)
    for row in range(responses):
        valid = case.mask[row]
        if valid.any():
            policies = (tensor[row][valid] for tensor in (trainer, case.proximal, case.rollout))
            total = total + objective_of_response(name, *policies, case.advantages[row])
    scale = {"gspo": 1 / responses, **dict.fromkeys(("dapo", "cispo", "cispo_rollout"), 1 / tokens)}.get(
        name, 1 / (responses * normalizer)
    )
    (gradient,) = torch.autograd.grad(-total * scale, trainer)
    return gradient


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()
