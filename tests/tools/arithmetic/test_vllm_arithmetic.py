"""The real vLLM beside verl's engine: with `exact` all log-probs of sampled tokens are equal, bit for bit.

Requests of many lengths at a time, with a prefix cache and sampling; verl's FSDP2 engine scores them packed.
"""

from types import SimpleNamespace

import forked
import pytest
from cases import cases

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.arithmetic_choice import VARIABLE

PROGRAM = """
from types import SimpleNamespace

import torch
import verl_precision.tools.engines.fsdp_scorer as fsdp_scorer
from verl_precision.tools.engines.engine import SampleRequest, SamplerSettings, ScorerSettings
from verl_precision.tools.tiny_model import cached_tiny_model
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.vllm_sampler import VllmEngine

torch.set_num_threads(1)
join = fsdp_scorer.make_group_of_one
fsdp_scorer.make_group_of_one = lambda device: torch.distributed.is_initialized() or join(device)
generator = torch.Generator().manual_seed(0)
shared, *others = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (130, 5, 9, 60, 2, 40, 1)]
prompts = [others[0], shared + others[1], shared + others[4], others[2], shared + others[3], others[5], shared[:129]]

def sampled(engine, seed):
    engine.submit([SampleRequest(str(i), seed, tuple(p), max_tokens=24, seed=i) for i, p in enumerate(prompts)])
    found = {}
    while responses := engine.poll():
        found |= {response.problem: response for response in responses}
    return [found[str(i)] for i in range(len(prompts))]

def unequal(rollout, trainer):
    asked = [SampleRequest(r.problem, 0, tuple(p), response_token_ids=r.token_ids) for r, p in zip(rollout, prompts)]
    trainer.submit(asked)
    scored = {response.problem: response.log_probs for response in trainer.poll()}
    pairs = [pair for r in rollout for pair in zip(r.log_probs, scored[r.problem], strict=True)]
    return len(pairs), sum(a != b for a, b in pairs)

for architecture in {architectures!r}:
    for dtype in ("bf16", "fp16"):
        path = str(cached_tiny_model(architecture))
        trainer = TrainerEngine(ScorerSettings(
            model=path, dtype=dtype, attention="sdpa", micro_batch_tokens=1024, packed=True
        ))
        more = {"enable_prefix_caching": True, "max_num_seqs": 4}
        engine = VllmEngine(SamplerSettings(model=path, dtype=dtype, max_model_len=512, log_probs=True, more=more))
        tokens, different = unequal(sampled(engine, 0), trainer)
        print("result", architecture, dtype, tokens, different, flush=True)

if {planted!r}:
    import verl_precision.tools.arithmetic.vllm_operations as ours
    ours.operations = SimpleNamespace(**vars(ours.operations))  # of vLLM alone: the trainer keeps the module
for name in {planted!r}:
    place = ours if hasattr(ours, name) else ours.operations
    right = getattr(place, name)
    setattr(place, name, lambda *args, inner: right(*args, inner=torch.float32))
    print("planted", name, *unequal(sampled(engine, name), trainer), flush=True)
    setattr(place, name, right)
    engine._engine.reset_prefix_cache()
"""


DTYPES = ("bf16", "fp16")
MODELS = ("qwen3_tied", "qwen2", "llama")  # norms of heads and a tied head; biases; none of them
PLANTED = ("rms_norm", "rotary", "attention", "silu_and_mul")


def unequal(folder, arithmetic, architectures, planted=()):
    """Return how many log-probs of how many are not equal: by architecture and dtype, and by planted operation."""
    program = PROGRAM.replace("{architectures!r}", repr(architectures)).replace("{planted!r}", repr(planted))
    done = forked.run(program, folder, **{VARIABLE: arithmetic, "VERL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("result ", "planted "))]
    return {tuple(names): int(count) for _, *names, tokens, count in lines if int(tokens) > 90}


@pytest.mark.e2e
def test_every_log_prob_is_equal_and_one_operation_in_fp32_shows(tmp_path):
    found = unequal(tmp_path, "exact", MODELS, PLANTED)
    exact = {(name, dtype): 0 for name in MODELS for dtype in DTYPES}
    assert {names: count for names, count in found.items() if len(names) == 2} == exact
    assert all(found[name,] for name in PLANTED), found


@pytest.mark.matrix  # a mode of research; how an operation is replaced: the test above
def test_rounded_once_is_nearer_and_native_is_not_equal(tmp_path):
    once, native = (unequal(tmp_path, arithmetic, ("qwen3",)) for arithmetic in ("rounded_once", "native"))
    assert all(once[key] < native[key] for key in native) and len(native) == 2


def test_a_process_that_was_not_asked(monkeypatch):
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from verl_precision.integration.cpu.vllm_on_cpu import compute_as_asked

    monkeypatch.setenv(VARIABLE, "native")
    compute_as_asked(None)
    assert not op_registry_oot and not AttentionBackendEnum.CPU_ATTN.is_overridden()


def vllm_config(**changes):
    """Return what is read of vLLM's config, with some values changed."""
    model = {"model_type": "qwen3", "hidden_act": "silu", "attention_dropout": 0.0}
    model |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    read = {"mode": 0, "world_size": 1, "quant_config": None, "lora_config": None, "dtype": 16, "head_dtype": 16}
    found = SimpleNamespace(**model | read | changes)
    found.model_config = found.hf_text_config = found.compilation_config = found.parallel_config = found
    return found


@pytest.mark.parametrize(("setting", "value", "words"), cases(__file__, "REFUSED"))
def test_what_vllm_would_compute_otherwise_is_refused(setting, value, words, monkeypatch):
    from verl_precision.tools.arithmetic.vllm_operations import require_supported

    monkeypatch.setenv(VARIABLE, "exact")
    require_supported(vllm_config())
    with pytest.raises(ConfigurationError, match=f"(?s)arithmetic='exact'.*Allowed: .*{words}"):
        require_supported(vllm_config(**{setting: value}))
    if words != "llama, qwen2, qwen3":  # that model has other operations in any arithmetic
        monkeypatch.setenv(VARIABLE, "rounded_once")
        require_supported(vllm_config(**{setting: value}))
