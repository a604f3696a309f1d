"""Our `prepare_model_outputs` and verl's on the same FP32 logits: packed, padded, with the extras we leave to verl."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import pad
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_precision.integration.engine.engine_config import PrecisionFSDPConfig
from verl_precision.integration.engine.fsdp_engine import precision_variant
from verl_precision.tools.engines.fsdp_scorer import engine_batch

LENGTHS, V, PAD = (3, 5), 20, 2
MIXED = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
SETTINGS = {"dtype": "float32", "mixed_precision": MIXED}
VARIANT = precision_variant(FSDPEngineWithLMHead, "Engine")
PACKED = pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])


def outputs(config, packed, dtype=torch.float32, **asked):
    engine = VARIANT.__new__(VARIANT, None, config)
    engine.engine_config, engine.use_ulysses_sp = config, False
    engine.compute_entropy_from_logits = entropy_from_logits
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, V, (n,), generator=generator) for n in LENGTHS]
    shape = (1, sum(LENGTHS) + PAD, V) if packed else (len(LENGTHS), max(LENGTHS), V)
    logits = (3 * torch.randn(shape, generator=generator)).to(dtype)
    temperature = torch.tensor([0.7, 1.3])
    args = {"pad_size": PAD, "temperature": temperature, "input_ids_rmpad_rolled": torch.cat(ids).roll(-1)}
    if packed:
        args["input_ids_rmpad_rolled"] = pad(args["input_ids_rmpad_rolled"], (0, PAD))
        args["temperature_rmpad"] = pad(temperature.repeat_interleave(torch.tensor(LENGTHS)), (0, PAD), value=1.0)
    batch = engine_batch(ids, **{"use_remove_padding": packed, "calculate_entropy": True, **asked})
    return engine.prepare_model_outputs(SimpleNamespace(logits=logits), args, batch, None)


@pytest.mark.parametrize("asked", [{}, {"calculate_entropy": False}, {"calculate_sum_pi_squared": True}], ids=str)
@PACKED
def test_same_keys_shapes_and_values_as_verl(packed, asked):
    theirs = outputs(FSDPEngineConfig(), packed, **asked)
    ours = outputs(PrecisionFSDPConfig(**SETTINGS, log_prob_chunk_tokens=2), packed, **asked)
    assert ours.keys() == theirs.keys() and "log_probs" in ours
    for key, value in theirs.items():
        assert ours[key].is_nested and torch.equal(ours[key].offsets(), value.offsets())
        torch.testing.assert_close(ours[key].values(), value.values(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("asked", [{}, {"calculate_sum_pi_squared": True}], ids=str)
@PACKED
def test_16_bit_logits_give_fp32_outputs_unless_switched_off(packed, asked):
    on = outputs(PrecisionFSDPConfig(**SETTINGS), packed, torch.float16, **asked)
    off = outputs(PrecisionFSDPConfig(**SETTINGS, fp32_log_probs=False), packed, torch.float16, **asked)
    assert {value.dtype for value in on.values()} == {torch.float32}
    assert off["log_probs"].dtype == torch.float16
