"""A replayed choice is the one that is computed with, and gradients flow through the router's own probabilities."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine import router_replay
from verl_precision.engine.router_replay import FAMILIES, Choice, ReplayedRouters, known_tokens, routing_agreement

EXPERTS, TOP_K, LAYERS, VOCABULARY = 8, 2, 3, 32
SMALL = {
    **dict(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS),
    **dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, v_head_dim=8),
    **dict(num_experts_per_tok=TOP_K, norm_topk_prob=True, first_k_dense_replace=1, n_group=1, topk_group=1),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), EXPERTS),
    **dict(n_shared_experts=1, moe_intermediate_size=12, shared_expert_intermediate_size=12),
    **dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4),
    **dict(initializer_range=0.5, pad_token_id=0, attn_implementation="eager"),
}
TOKENS = torch.arange(12).remainder(VOCABULARY).unsqueeze(0)


def build(family: str) -> nn.Module:
    torch.manual_seed(0)
    settings = {**SMALL, "head_dim": SMALL["qk_rope_head_dim"]} if family.startswith("deepseek") else SMALL
    config = AutoConfig.for_model(family, **settings)
    config._experts_implementation = "eager"  # the grouped products know no float64
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():  # some families start with routers of zeros: all experts are tied
        torch.nn.init.normal_(parameter, std=0.5)
    return model


@pytest.mark.parametrize(("family", "adapted"), [*((family, False) for family in FAMILIES), ("qwen3_moe", True)])
def test_what_is_replayed_is_computed_with(family, adapted):
    """A model of each family with its own choice is itself; with another's it is another, until it is let go."""
    model = build(family)
    if adapted:
        model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    plain = model(input_ids=TOKENS).logits
    routers = ReplayedRouters(model)
    with routers.watched() as own:
        assert torch.equal(model(input_ids=TOKENS).logits, plain)
    first = 1 if family in ("deepseek_v3", "glm4_moe") else 0  # whose first layer is dense
    assert sorted(own) == list(range(first, LAYERS))
    assert all(choice.own.shape == (TOKENS.numel(), TOP_K) for choice in own.values())
    routers.replay(routers.stacked(own))
    assert torch.equal(model(input_ids=TOKENS).logits, plain)
    other = (routers.stacked(own) + 1) % EXPERTS
    routers.replay(other)
    with routers.watched() as seen:
        replayed = model(input_ids=TOKENS).logits
    assert (replayed - plain).abs().max() > 1e-3
    assert torch.equal(seen[first].own, own[first].own), "what it would have chosen by itself"
    assert all(torch.equal(choice.used, other[:, layer]) for layer, choice in seen.items())
    for nothing in ((other, torch.zeros(TOKENS.numel(), dtype=torch.bool)), (None,)):  # nothing is known of any token
        routers.replay(*nothing)
        assert torch.equal(model(input_ids=TOKENS).logits, plain)


def test_gradients_flow_through_the_probabilities_of_the_replayed_experts():
    """The block of Qwen3-MoE, by hand: Σₖ pₖ fₖ(x), pₖ the softmax over all experts, over the sum of the chosen."""
    model = build("qwen3_moe")
    block = model.model.layers[0].mlp
    routers = ReplayedRouters(model)
    inputs = torch.randn(1, 5, SMALL["hidden_size"], dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    replayed = torch.tensor([[0, 1], [7, 3], [5, 2], [1, 0], [4, 6]])
    routers.replay(replayed.unsqueeze(1).expand(-1, LAYERS, -1))
    leaves = (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    found = torch.autograd.grad(block(inputs).square().sum(), leaves)

    gate, up, down = (leaf.detach().clone().requires_grad_() for leaf in leaves)
    total = torch.zeros((), dtype=torch.float64)
    for x, chosen in zip(inputs[0], replayed, strict=True):
        probabilities = (gate @ x).softmax(dim=-1)[chosen]
        probabilities = probabilities / probabilities.sum()
        halves = [(expert, *(up[expert] @ x).chunk(2)) for expert in chosen]
        outputs = [down[expert] @ (nn.functional.silu(left) * right) for expert, left, right in halves]
        total = total + (probabilities @ torch.stack(outputs)).square().sum()
    expected = torch.autograd.grad(total, (gate, up, down))
    for one, other in zip(found, expected, strict=True):
        # transformers takes the softmax in float32
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * other.abs().max().item())
    assert found[0].abs().sum() > 0


def test_agreement_is_the_share_of_equal_choices():
    own = torch.tensor([[0, 1], [2, 3], [4, 5]])
    rollout = torch.zeros(3, 3, 2, dtype=torch.int16)
    rollout[:, 0] = torch.tensor([[1, 0], [2, 7], [0, 1]])  # the order does not matter; half; unknown
    rollout[:, 2] = torch.tensor([[6, 7], [3, 2], [4, 5]])
    known = torch.tensor([True, True, False])
    found = routing_agreement({0: Choice(own, own), 2: Choice(own, own)}, rollout, known)
    values = {name.removeprefix("mismatch/routing_"): statistic.value() for name, statistic in found.items()}
    layers = {"agreement/layer_00": 3 / 4, "agreement/layer_02": 1 / 2}
    assert values == {"agreement": 5 / 8, **layers, "changed_fraction": 0}
    replayed = {layer: Choice(own, rollout[:, layer].long()) for layer in (0, 2)}
    values = {name: statistic.value() for name, statistic in routing_agreement(replayed, rollout, known).items()}
    assert values["mismatch/routing_agreement"] == 1 and values["mismatch/routing_changed_fraction"] == 3 / 8


def test_known_are_the_tokens_that_went_through_the_rollout():
    """Two sequences of three and four; verl fills what is missing with zeros."""
    experts = torch.ones(7, LAYERS, TOP_K, dtype=torch.int16)
    experts[5] = 0
    assert known_tokens(experts, torch.tensor([0, 3, 7])).tolist() == [True, True, False, True, True, False, False]
    one_expert = torch.zeros(3, LAYERS, 1, dtype=torch.int16)  # expert 0 may be everyone's choice
    assert known_tokens(one_expert, torch.tensor([0, 3])).tolist() == [True, True, False]


def test_choices_of_padding_are_left_out():
    model = build(FAMILIES[0])
    routers = ReplayedRouters(model)
    padded = torch.tensor([[3, 1, 4, 0], [5, 9, 2, 6]])
    with torch.no_grad(), routers.watched() as seen:
        model(padded, attention_mask=torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]))
    found = router_replay.without_padding(routers.stacked(seen), torch.tensor([0, 3, 7]))
    for row, places in ((padded[:1, :3], slice(0, 3)), (padded[1:], slice(3, 7))):
        with torch.no_grad(), routers.watched() as alone:
            model(row)
        assert found[places].equal(routers.stacked(alone))
    assert router_replay.without_padding(found, torch.tensor([0, 3, 7])) is found, "packed sequences have no padding"


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v2"])
def test_other_models_are_refused_by_name(family):
    with pytest.raises(ConfigurationError, match=family) as error:
        ReplayedRouters(build(family))
    assert "qwen3_moe" in str(error.value)
