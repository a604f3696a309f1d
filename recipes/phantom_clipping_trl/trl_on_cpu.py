"""TRL's AsyncGRPOTrainer in one process on a CPU, with vLLM beside it: what TRL 1.16.0 needs for that, and no more.

Replaced in TRL: the question for a GPU's peak FLOPS, and FlashAttention under its tree attention. By TRL's own
arguments: a rollout worker that samples with vLLM in this process, and a weight transfer that hands vLLM the tensors. A
new batch is sampled after each update. accelerate's data loader reads one micro-batch ahead, so the worker samples one
group more at the start, and this group is one version old when it is trained.
"""

import os
import queue
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TRL_EXPERIMENTAL_SILENCE": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import numpy as np
import torch
from torch import Tensor
from trl.experimental.async_grpo import async_grpo_trainer, packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
from vllm import LLM, SamplingParams

from verl_precision.integration.cpu.vllm_on_cpu import layerwise_reload


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, ends_q: Tensor, ends_k: Tensor, most_q: int, most_k: int, *,
    softmax_scale: float, causal: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """FlashAttention's attention of segments, by PyTorch.

    Query is [tokens, heads, size], key and value likewise with the keys of all segments; `ends_q` and `ends_k` are
    [segments + 1], where each segment begins. The last query of a segment sees all of the segment's keys.
    """
    assert causal and window_size == (-1, -1)
    (queries, inside_q), (keys, inside_k) = (_places(ends, most) for ends, most in ((ends_q, most_q), (ends_k, most_k)))
    ahead = (ends_k.diff() - ends_q.diff())[:, None, None] + torch.arange(most_q)[:, None] - torch.arange(most_k)
    mask = (ahead >= 0) & inside_k[:, None]
    q, k, v = (tensor[places].transpose(1, 2) for tensor, places in ((query, queries), (key, keys), (value, keys)))
    of_segments = {"attn_mask": mask[:, None], "scale": softmax_scale, "enable_gqa": q.shape[1] != k.shape[1]}
    found = torch.nn.functional.scaled_dot_product_attention(q, k, v, **of_segments)
    return found.transpose(1, 2)[inside_q]


def _places(ends: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return the places of each segment's tokens, [segments, most], and which of them are inside it."""
    inside = torch.arange(most) < ends.diff()[:, None]
    return torch.where(inside, ends[:-1, None] + torch.arange(most), 0), inside


class WeightTransfer:
    """Hands the trainer's weights to vLLM, which rounds each to its dtype."""

    def __init__(self, llm: LLM) -> None:
        runner = llm.llm_engine.model_executor.driver_worker.model_runner
        self.model, self.config, self.resume = runner.model, runner.model_config, llm.reset_prefix_cache

    def send_weights(self, iterator: Iterator[tuple[str, Tensor]]) -> None:
        """Load the weights as our weight sync on a CPU does, tied output head included."""
        with layerwise_reload(self.model, self.config, set()):
            self.model.load_weights((name, weight.clone()) for name, weight in iterator)

    def init_weight_transfer(self) -> None:
        """Nothing: one process."""

    pause = destroy = init_weight_transfer


class RolloutWorker:
    """Samples `groups` prompts with `responses` each, after every update of the weights."""

    def __init__(
        self, llm: LLM, prompts: list[list[int]], reward: Callable[[list[int]], float], groups: int,
        params: SamplingParams, seed: int,
    ) -> None:  # fmt: skip
        self.llm, self.prompts, self.reward, self.groups, self.params = llm, prompts, reward, groups, params
        self.rollout_buffer, self.metrics_queue = queue.Queue(), queue.Queue()
        self.random, self.version, self.started, self.sampled = random.Random(seed), 0, False, 0
        self.step_rewards: list[float] = []  # mean reward of each batch

    def start(self) -> None:
        """Sample the first batch, and one group more for the data loader."""
        self.started = True
        self.sample(self.groups + 1)

    def stop(self) -> None:
        """Sample no more."""
        self.started = False

    def check_health(self, stale_after_s: float) -> None:
        """Nothing can have ended: one process."""

    def update_model_version(self, version: int) -> None:
        """Sample a batch with the new weights."""
        self.version = version
        if self.started:
            self.sample(self.groups)

    def sample(self, groups: int) -> None:
        """Put the responses to some prompts into the trainer's queue, with advantages within each group."""
        prompts, all_rewards = self.random.sample(self.prompts, groups), []
        answers = self.llm.generate([{"prompt_token_ids": p} for p in prompts], self.params, use_tqdm=False)
        for prompt, answer in zip(prompts, answers, strict=True):
            rewards = np.array([self.reward(list(response.token_ids)) for response in answer.outputs])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            all_rewards += rewards.tolist()
            for response, advantage, reward in zip(answer.outputs, advantages, rewards, strict=True):
                chosen = zip(response.token_ids, response.logprobs, strict=True)
                log_probs = [candidates[token].logprob for token, candidates in chosen]
                tokens = np.array(prompt + list(response.token_ids))
                mask = np.array([0] * len(prompt) + [1] * len(log_probs))
                old = np.array([0.0] * len(prompt) + log_probs, dtype=np.float32)
                metrics = {"reward": float(reward)}
                self.rollout_buffer.put(
                    RolloutSample([], [], tokens, mask, old, float(advantage), self.version, self.sampled, metrics)
                )
            self.sampled += 1
        self.step_rewards.append(float(np.mean(all_rewards)))


def prepare() -> None:
    """Replace in TRL what needs a GPU."""
    async_grpo_trainer.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: SimpleNamespace(flash_attn_varlen_func=varlen_attention)


def use_fp16(accelerator) -> None:
    """Switch on autocast and a loss scaler, which accelerate leaves off on a CPU although `fp16=True`."""
    accelerator.native_amp, accelerator.scaler = True, torch.amp.GradScaler("cpu")
