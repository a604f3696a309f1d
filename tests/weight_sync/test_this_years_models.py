"""Architectures with windows or other norms: each sync takes, and both engines give the same."""

import pytest
import torch
from engine_pair import EnginePair, move
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from verl_precision.tools.tiny_model import cached_tiny_model

pytestmark = pytest.mark.usefixtures("vllm_process")


@pytest.mark.parametrize(("architecture", "dtype"), [
    ("glm4", "float32"), ("gemma4", "float32"), ("glm4_moe", "float32"),
    pytest.param("gemma3", "float32", marks=pytest.mark.matrix),  # its windows and norms are Gemma 4's
])  # fmt: skip
def test_syncs_take_and_decoding_is_the_trainers(architecture, dtype):
    pair = EnginePair(architecture, dtype)
    torch.manual_seed(0)
    for _ in range(2):
        move(pair.model)
        for name, scalar in pair.model.named_buffers():  # Gemma 4's, which a checkpoint has
            scalar.mul_(0.9 if name.endswith("layer_scalar") else 1)
        (report,) = pair.sync()
        assert report.verified_layers > 20
        assert pair.canary().problems == ()
    (engine,), prompts = pair.engines, [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(3)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, seed=0)
    for prompt, output in zip(prompts, engine.generate(prompts, sampling, use_tqdm=False), strict=True):
        drawn = output.outputs[0]
        tokens = torch.tensor([prompt["prompt_token_ids"] + list(drawn.token_ids)])
        rollout = torch.tensor([at[token].logprob for at, token in zip(drawn.logprobs, drawn.token_ids, strict=True)])
        gap = (pair._score(tokens)[0, 3:] - rollout).abs().mean()
        assert gap < {"float32": 1e-5, "bfloat16": 2e-2}[dtype]


def test_a_sync_on_a_cpu_leaves_gpt_oss_without_experts():
    """A reload of gpt-oss on a CPU does not reach its experts: the guard sees it."""
    pair = EnginePair("gpt_oss", "bfloat16")
    (report,) = pair.sync()
    assert report.unverified_layers == 8  # experts and sinks of four layers
    with pytest.raises(AssertionError):  # of vLLM's: no kernel was made for them again
        pair.canary()


@pytest.mark.parametrize(("architecture", "leaks"), [("qwen3_next", True), ("qwen3", False)])
def test_nobody_tells_transformers_delta_nets_where_a_packed_sequence_ends(architecture, leaks):
    """When this fails, the rule packed-delta-nets can go. verl gives position ids that begin anew, and no more."""
    model = AutoModelForCausalLM.from_pretrained(cached_tiny_model(architecture), attn_implementation="sdpa").eval()
    first, second = torch.randint(3, 99, (2, 1, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).repeat(2)[None]
    with torch.no_grad():
        packed = model(torch.cat((first, second), 1), position_ids=positions, use_cache=False).logits[:, 24:]
        alone = model(second, use_cache=False).logits
    assert ((packed - alone).abs().max() > 1e-2 * alone.abs().max()) == leaks
