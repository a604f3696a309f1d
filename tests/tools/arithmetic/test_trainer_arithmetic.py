"""A trainer's model whose operations are rounded once: packed is padded, gradients are right, others are refused."""

import copy

import pytest
import torch
from cases import cases
from torch import nn

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.arithmetic_choice import VARIABLE, inner_dtype
from verl_precision.tools.arithmetic.trainer_model import replace_operations, round_operations_once
from verl_precision.tools.tiny_model import random_model, settings

FAMILIES = ["llama", "qwen2", "qwen3"]
LENGTHS = (7, 1, 12, 5)


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setenv(VARIABLE, "exact")


def model(name: str, dtype: torch.dtype = torch.bfloat16, **changes) -> nn.Module:
    model_type, values = settings(name)
    built = random_model(model_type, {**values, "num_hidden_layers": 2, **changes}).to(dtype)
    built.model.rotary_emb.float()
    replace_operations(built, inner_dtype())
    return built


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(90, (length,), generator=generator) for length in LENGTHS]


def packed(one: nn.Module, **settings) -> torch.Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    return one(torch.cat(sequences())[None], position_ids=positions, use_cache=False, **settings).logits[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_packed_is_padded_is_alone(family, dtype):
    one = model(family, dtype)
    at_once = packed(one)
    alone = [one(ids[None], use_cache=False).logits[0] for ids in sequences()]
    assert torch.equal(torch.cat(alone), at_once)
    longest = max(LENGTHS)
    for left in (False, True):
        real = torch.stack([torch.arange(longest) < length for length in LENGTHS])
        real = real.flip(1) if left else real
        ids = torch.zeros(real.shape, dtype=torch.long)
        ids[real] = torch.cat(sequences())
        positions = (real.long().cumsum(1) - 1).clamp(min=0)
        logits = one(ids, attention_mask=real.long(), position_ids=positions, use_cache=False).logits
        assert torch.equal(logits[real], at_once)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_same_model(family):
    model_type, values = settings(family)
    stock = random_model(model_type, {**values, "num_hidden_layers": 2}).double()
    stock.config._attn_implementation = "eager"  # it knows FP64
    ours = copy.deepcopy(stock).float()
    replace_operations(ours, torch.float64)
    labels = torch.cat(sequences()).roll(-1)
    for one in (stock, ours):
        nn.functional.cross_entropy(packed(one).double(), labels).backward()
    assert torch.allclose(packed(ours).double(), packed(stock), atol=1e-5)
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert torch.allclose(a.grad.double(), b.grad, rtol=1e-3, atol=1e-3 * b.grad.abs().max()), name


def test_gradient_checkpointing_and_a_copy_change_nothing():
    one = model("qwen3")
    one.train()
    packed(one).float().square().sum().backward()
    other = copy.deepcopy(one)
    other.zero_grad()
    other.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    other.lm_head.weight.data *= 1  # its own, not the first one's
    packed(other).float().square().sum().backward()
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    other.lm_head.weight.data.zero_()
    assert not packed(other).any() and packed(one).any()


@pytest.mark.parametrize(("changes", "words"), cases(__file__, "CASES"))
def test_a_model_with_operations_of_its_own(changes, words):
    one = random_model("qwen3", {**settings("qwen3")[1], "num_hidden_layers": 2})
    for name, value in changes.items():
        setattr(one.config, name, value)
    with pytest.raises(ConfigurationError, match=f"(?s)arithmetic='exact'.*{words}"):
        replace_operations(one, torch.float64)


def test_a_module_of_its_own():
    one = random_model("qwen3", {**settings("qwen3")[1], "num_hidden_layers": 2})
    one.model.layers[1].mlp = nn.Tanh()
    with pytest.raises(ConfigurationError, match=r"model.layers.1.mlp \(.*Tanh\)"):
        replace_operations(one, torch.float64)
    cached = model("llama")
    with pytest.raises(ConfigurationError, match="cached keys"):
        cached.generate(sequences()[0][None], max_new_tokens=2, use_cache=True)


def test_a_gpu_and_an_unknown_arithmetic(monkeypatch):
    monkeypatch.setattr("verl_precision.tools.arithmetic.trainer_model.get_device_name", lambda: "cuda")
    with pytest.raises(ConfigurationError, match=r"arithmetic='exact'.*Allowed: trainer\.device=cpu"):
        round_operations_once(None, nn.Linear(1, 1))
    monkeypatch.setenv(VARIABLE, "exactly")
    with pytest.raises(ConfigurationError, match="arithmetic='exactly'.*Allowed: native, rounded_once, exact"):
        inner_dtype()
    monkeypatch.delenv(VARIABLE)
    assert inner_dtype() is None
