"""The whole loop in one file: prompt, rollout, trainer, mismatch, loss, scaled backward, step, weight sync, canary.

    python examples/one_loop.py

It needs torch, this package, a CPU and ten seconds. Losses, statistics, loss scaler, digests and canary come from the
package. Two small classes replace verl, vLLM and Ray: `Trainer` and `Rollout` compute the same policy, but add in a
different order, as two engines do, and round to `dtype` at each step. A number in a comment is a station of
docs/architecture.md, "Follow one response and one weight".

Task: count upwards. The prompt is a token. The reward is the share of tokens that are the previous token plus one.
Shapes: B responses, T tokens, V vocabulary, H hidden size.
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_precision.engine.log_probs import log_probs_and_entropy
from verl_precision.engine.loss_scaling import LossScaler
from verl_precision.engine.settings import LossScaleSettings
from verl_precision.losses import POLICY_LOSSES, Aggregation
from verl_precision.mismatch import MismatchMonitor
from verl_precision.weight_sync.canary import CanaryJudge, canary_tokens
from verl_precision.weight_sync.manifest import StreamDigest, differences

PROMPTS, SAMPLES, T, V, H = 16, 8, 24, 12, 64
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Weights = dict[str, Tensor]


def advance(weights: Weights, state_BH: Tensor, token_B: Tensor) -> Tensor:
    """Return the state after one more token: a decaying sum of embeddings."""
    return state_BH * 0.5 + weights["embedding"][token_B]


class Trainer:
    """FP32 master weights, a forward pass in `dtype`, log-probs in FP32."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        generator = torch.Generator().manual_seed(0)
        shapes = {"embedding": (V, H), "hidden": (H, H), "head": (H, V)}
        self.weights = {
            name: (torch.randn(shape, generator=generator) * shape[0] ** -0.5).requires_grad_()
            for name, shape in shapes.items()
        }
        self.optimizer = torch.optim.Adam(self.weights.values(), lr=3e-3)
        self.scaler = LossScaler(LossScaleSettings(), "cpu") if dtype == torch.float16 else None

    def log_probs(self, prompt_B: Tensor, response_BT: Tensor) -> Tensor:
        """Score all positions at once. FP32 [B, T]."""
        weights = {name: weight.to(self.dtype) for name, weight in self.weights.items()}
        state = torch.zeros(len(prompt_B), H, dtype=self.dtype)
        states = []
        for token_B in (prompt_B, *response_BT.unbind(1)[:-1]):
            state = advance(weights, state, token_B)
            states.append(state)
        logits_BTV = torch.tanh(torch.stack(states, 1) @ weights["hidden"]) @ weights["head"]
        labels_N = response_BT.flatten()
        log_probs_N, _ = log_probs_and_entropy(
            logits_BTV.flatten(0, 1), labels_N, torch.ones(len(labels_N)), chunk_tokens=512, with_entropy=False
        )
        return log_probs_N.view_as(response_BT)

    def update(self, loss: Tensor) -> None:
        """Run backward and one step; in FP16 scale the loss, and skip a step whose gradients overflow."""
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()


class Rollout:
    """The sampling engine: weights in `dtype`, one token at a time, each hidden sum in two halves."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.weights: Weights = {}

    def load(self, stream: Weights) -> None:
        """Take the weights of a sync, and round each once."""
        self.weights = {name: weight.detach().to(self.dtype) for name, weight in stream.items()}

    def run(self, prompt_B: Tensor, response_BT: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens and their log-probs (FP32), [B, T], of a sampled response or of a given one."""
        state = torch.zeros(len(prompt_B), H, dtype=self.dtype)
        token, tokens, log_probs = prompt_B, [], []
        hidden, half = self.weights["hidden"], H // 2
        for t in range(T if response_BT is None else response_BT.shape[1]):
            state = advance(self.weights, state, token)
            summed = state[:, :half] @ hidden[:half] + state[:, half:] @ hidden[half:]
            log_p = (torch.tanh(summed) @ self.weights["head"]).float().log_softmax(-1)
            token = torch.multinomial(log_p.exp(), 1)[:, 0] if response_BT is None else response_BT[:, t]
            tokens.append(token)
            log_probs.append(log_p.gather(1, token[:, None])[:, 0])
        return torch.stack(tokens, 1), torch.stack(log_probs, 1)


def sync_weights(trainer: Trainer, rollout: Rollout) -> None:
    """Send the FP32 weights and compare the digests of both ends; one changed bit stops the run."""
    sent, received = StreamDigest(), StreamDigest()
    for name, weight in trainer.weights.items():
        sent.add(name, weight.detach())
    stream = {name: weight.detach().clone() for name, weight in trainer.weights.items()}  # the transfer
    for name, weight in stream.items():
        received.add(name, weight)
    if problems := differences(sent.fetch(), received.fetch()):
        raise RuntimeError("\n".join(problems))
    rollout.load(stream)


def train(dtype: str, steps: int) -> list[dict[str, Any]]:
    """Run the loop and return the metrics of each step."""
    torch.manual_seed(0)
    trainer, rollout = Trainer(DTYPES[dtype]), Rollout(DTYPES[dtype])
    judge, probe = CanaryJudge(DTYPES[dtype], DTYPES[dtype]), canary_tokens(V, (), 4, T + 1)
    monitor, mask, rows = MismatchMonitor(), torch.ones(PROMPTS * SAMPLES, T), []
    for step in range(1, steps + 1):
        # 9 the weights reach the rollout bit for bit. 10 canary: are both engines' log-probs of fixed tokens the same?
        sync_weights(trainer, rollout)
        with torch.no_grad():
            scored = trainer.log_probs(probe[:, 0], probe[:, 1:])
        canary = judge.judge({0: scored}, {0: rollout.run(probe[:, 0], probe[:, 1:])[1]})
        if canary.problems:
            raise RuntimeError("\n".join(canary.problems))
        # 1 prompts. 2 responses, with the rollout's log-probs.
        prompt = torch.randint(V, (PROMPTS,)).repeat_interleave(SAMPLES)
        response, rollout_log_probs = rollout.run(prompt)
        # 3 reward; advantage: the reward minus the mean of the other rewards of the group.
        before = torch.cat([prompt[:, None], response[:, :-1]], 1)
        reward = (response == (before + 1) % V).float().mean(1)
        group = reward.view(PROMPTS, SAMPLES)
        advantage = ((group - group.mean(1, keepdim=True)) * SAMPLES / (SAMPLES - 1)).flatten()
        # 4 the trainer's log-probs of the same tokens. 5 the mismatch. 6 the loss. 7 scaled backward. 8 step.
        log_probs = trainer.log_probs(prompt, response)
        monitor.measure(log_probs, rollout_log_probs, mask, advantage)
        batch = {"trainer_log_probs": log_probs, "rollout_log_probs": rollout_log_probs, "response_mask": mask}
        batch["advantages"] = advantage
        trainer.update(POLICY_LOSSES["vp_pg_seq_is"](batch, Aggregation(normalizer=T)).loss)
        # the step's metrics, the alarms it raised, and the verdict on the run: healthy, or what to do
        report = monitor.end_of_step(step, {"critic/score/mean": reward.mean().item()})
        k3 = report.metrics["mismatch/k3_kl"]
        rows.append({"reward": reward.mean().item(), "k3": k3, "canary": canary.gap, "verdict": report.verdict})
    return rows


def main() -> None:
    """Train in each dtype and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    steps = parser.parse_args().steps
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the loss scaler uses all ranks
    print(f"{'dtype':6}{'reward, first 10':>18}{'last 10':>10}{'k3':>10}{'canary, nats':>14}  verdict")
    for dtype in DTYPES:
        rows = train(dtype, steps)
        first, last = (sum(row["reward"] for row in part) / len(part) for part in (rows[:10], rows[-10:]))
        k3, canary = (sum(row[key] for row in rows) / len(rows) for key in ("k3", "canary"))
        print(f"{dtype:6}{first:18.2f}{last:10.2f}{k3:10.1e}{canary:14.1e}  {rows[-1]['verdict'].word}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
