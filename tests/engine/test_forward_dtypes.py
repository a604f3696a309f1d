import logging
from collections import OrderedDict

import pytest
import torch
from torch import nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from verl_precision.base.errors import ConfigurationError, PrecisionContradictionError
from verl_precision.engine.forward_dtypes import ForwardDtypes, compute_head_in_fp32

TOKENS = torch.tensor([0, 1, 2])


@pytest.fixture
def model():
    """Two matrices that multiply; the embedding looks up, and the norm has no matrix of its own."""
    square, head = nn.Linear(8, 8), nn.Linear(8, 4)
    return nn.Sequential(OrderedDict(embedding=nn.Embedding(4, 8), first=square, norm=nn.LayerNorm(8), head=head))


def test_agreement_is_said_once(model, caplog):
    dtypes = ForwardDtypes(model, "actor", torch.float32)
    with caplog.at_level(logging.INFO, logger="verl_precision.engine"):
        for _ in range(2):
            model(TOKENS)
            assert dtypes.seen == {torch.float32: 2}
            dtypes.check()
    assert caplog.messages == ["actor forward verified: 2 matrix products, all in float32"]


def test_one_module_in_another_dtype_is_named(model):
    dtypes = ForwardDtypes(model, "critic", torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.head(torch.zeros(1, 8))
    with pytest.raises(PrecisionContradictionError, match="critic's forward 1 modules.*head: bfloat16"):
        dtypes.check()
    model(TOKENS)
    dtypes.check()  # an error is about one forward


def test_a_router_of_experts_is_seen():
    """It returns logits, scores and indices."""
    config = Qwen3MoeConfig(hidden_size=8, num_experts=4, num_experts_per_tok=2)
    router = nn.ModuleDict({"gate": Qwen3MoeTopKRouter(config)})
    dtypes = ForwardDtypes(router, "actor", torch.float32)
    router["gate"](torch.randn(3, 8))
    assert dtypes.seen == {torch.float32: 1}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        router["gate"](torch.randn(3, 8))
    with pytest.raises(PrecisionContradictionError, match="gate: bfloat16"):
        dtypes.check()


def test_an_output_head_in_fp32_stays_fp32_and_is_exempt(model):
    model.get_output_embeddings = lambda: model.head
    dtypes = ForwardDtypes(model, "actor", torch.bfloat16, exempt=compute_head_in_fp32(model))
    hidden = torch.randn(3, 8).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.first(hidden).dtype == torch.bfloat16
        logits = model.head(hidden)
    dtypes.check()
    exact = hidden.double() @ model.head.weight.double().T + model.head.bias.double()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), exact, rtol=1e-6, atol=1e-6)


def test_nothing_seen_is_a_warning(model, caplog):
    ForwardDtypes(model, "actor", torch.float32).check()
    assert "NOT verified" in caplog.text


def test_fp32_head_needs_a_linear_layer(model):
    model.get_output_embeddings = lambda: model.norm
    with pytest.raises(ConfigurationError, match="fp32_output_head=True.*LayerNorm"):
        compute_head_in_fp32(model)
