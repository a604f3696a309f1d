"""Both witnesses of a weight sync, on real engines: healthy syncs raise nothing, and both engines give the same.

Faults: test_known_faults.py.
"""

import pytest
import torch
from engine_pair import EnginePair, move, needs_adapters
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from verl_precision.tools.tiny_model import cached_tiny_model

pytestmark = pytest.mark.usefixtures("vllm_process")

SYNCS = 6  # more than the syncs that the canary learns from
IN_RUNS = pytest.mark.matrix  # tests/e2e: test_quickstart.py, test_truncated_sampling.py


def _on_a_grid_of_8_bits(patch: pytest.MonkeyPatch) -> None:
    """Have vLLM round linear weights to e4m3, a scale a row, before it packs them: a stand-in for its FP8 kernels."""
    process = UnquantizedLinearMethod.process_weights_after_loading

    def rounded(self, layer):
        weight = layer.weight.data
        scales = weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
        weight.copy_((weight.float() / scales).to(torch.float8_e4m3fn).float() * scales)
        process(self, layer)

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", rounded)


@pytest.mark.parametrize(("architecture", "dtype", "kind"), [
    pytest.param("qwen3", "bfloat16", "", marks=IN_RUNS), pytest.param("qwen3_tied", "float16", "", marks=IN_RUNS),
    ("qwen3_moe", "float32", ""), ("qwen3", "float16", "fp8"),
    pytest.param("qwen3", "float16", "lora", marks=needs_adapters),
])  # fmt: skip
def test_healthy_syncs_raise_nothing(architecture, dtype, kind, monkeypatch):
    torch.manual_seed(0)
    if kind == "fp8":
        _on_a_grid_of_8_bits(monkeypatch)
    pair = EnginePair(architecture, dtype, lora=kind == "lora")
    pair.judge.grids = ("fp8",) if kind == "fp8" else ()
    for sync in range(SYNCS):
        move(pair.model, 0.01)
        (report,) = pair.sync()
        assert pair.canary().problems == (), f"sync {sync}; asked again: {pair.canary().problems}"
        assert report.unverified_layers == 0 and report.verified_layers > 20 * (not pair.lora)
        assert not pair.lora or report.verified_layers == (35 + 12 if sync == 0 else 12)


# Gated delta nets, windows, or other norms.
@pytest.mark.parametrize(("architecture", "near"), [
    ("qwen3_next", 2e-2), ("glm4", 1e-5), ("gemma4", 1e-5), ("glm4_moe", 1e-5)
])  # fmt: skip
def test_syncs_of_this_years_models_take_and_decoding_is_the_trainers(architecture, near):
    """In FP32 vLLM's own kernels of a gated delta net refuse the first request."""
    pair = EnginePair(architecture, "bfloat16" if architecture == "qwen3_next" else "float32")
    torch.manual_seed(0)
    for _ in range(2):
        move(pair.model)
        for name, scalar in pair.model.named_buffers():  # Gemma 4's, which a checkpoint has
            scalar.mul_(0.9 if name.endswith("layer_scalar") else 1)
        (report,) = pair.sync()
        assert report.verified_layers > 20 and pair.canary().problems == ()
    (engine,), prompts = pair.engines, [{"prompt_token_ids": [5, 6, 7, 8 + i]} for i in range(3)]
    sampling = SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, seed=0)
    for prompt, output in zip(prompts, engine.generate(prompts, sampling, use_tqdm=False), strict=True):
        drawn = output.outputs[0]
        tokens = torch.tensor([prompt["prompt_token_ids"] + list(drawn.token_ids)])
        rollout = torch.tensor([at[token].logprob for at, token in zip(drawn.logprobs, drawn.token_ids, strict=True)])
        gap = (pair.score(tokens)[0, 3:] - rollout).abs().mean()
        assert gap < near


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
