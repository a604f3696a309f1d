"""A draft that no weight stream reaches is seen, and accepted less; vLLM counts the same tokens."""

import pytest
import torch
from engine_pair import EnginePair, move
from vllm import SamplingParams
from vllm.utils import cpu_triton_utils
from vllm.v1.sample import rejection_sampler

from verl_precision.integration.cpu.vllm_on_cpu import expand_for_drafts
from verl_precision.tools.tiny_model import cached_tiny_model

pytestmark = pytest.mark.usefixtures("vllm_process")
SAMPLING = SamplingParams(temperature=0.7, max_tokens=32, logprobs=0, ignore_eos=True)


def counted(engine) -> tuple[float, float]:
    """Return vLLM's own counts of drafted and accepted tokens."""
    found = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in engine.get_metrics()}
    return found["draft_tokens"].value, found["accepted_tokens"].value


@torch.no_grad()
def largest_gap(pair: EnginePair) -> float:
    """Sample, and compare the served log-probs with the trainer's."""
    prompts = [{"prompt_token_ids": row} for row in pair.tokens[:, :16].tolist() * 16]
    given = pair.engines[0].generate(prompts, SAMPLING, use_tqdm=False)
    tokens = torch.tensor([[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in given])
    served = torch.tensor([[next(iter(each.values())).logprob for each in one.outputs[0].logprobs] for one in given])
    scored = (pair.model(input_ids=tokens).logits[:, 15:-1] / SAMPLING.temperature).log_softmax(-1)
    return float((scored.gather(-1, tokens[:, 16:, None]).squeeze(-1) - served).abs().max())


def test_a_draft_that_is_not_sent_stays_and_is_accepted_less():
    """The draft is the policy itself, until the policy moves. verl sends no weights to a draft of this kind."""
    path = str(cached_tiny_model("qwen3_rough"))
    drafts = {"method": "draft_model", "model": path, "num_speculative_tokens": 1}
    pair = EnginePair("qwen3_rough", "float32", load_format="auto", speculative_config=drafts, disable_log_stats=False)
    (first,) = pair.sync()
    assert first.draft_layers == first.draft_layers_unchanged > 30 and not first.drafted_tokens
    acceptance, before = [], (0, 0)
    for size in (0, 0.1):
        move(pair.model, size)
        pair.sync()
        assert largest_gap(pair) < 1e-3, "the tokens are the policy's, whatever is drafted"
        (report,), now = pair.sync(), counted(pair.engines[0])
        assert (report.drafted_tokens, report.accepted_tokens) == (now[0] - before[0], now[1] - before[1])
        assert report.draft_layers_unchanged == report.draft_layers
        acceptance.append(report.metrics()["weight_sync/draft_acceptance"])
        before = now
    assert acceptance[0] > 0.5 and acceptance[1] < 0.25  # 0.68 and 0.04
    worker = pair.engines[0].llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    worker.model_runner.drafter.model.model.norm.weight.data.mul_(2)
    (report,) = pair.sync()
    assert report.draft_layers - report.draft_layers_unchanged == 1


def test_parameters_of_a_response_reach_its_drafted_tokens(monkeypatch):
    """vllm#55005: vLLM's kernel for a CPU leaves the result as it was allocated, here as NaN."""
    monkeypatch.setattr(rejection_sampler, "expand_kernel", cpu_triton_utils.expand_kernel)
    expand_for_drafts(rejection_sampler)
    arguments = torch.tensor([0.0, 0.7, 1.5]), torch.tensor([2, 2, 3], dtype=torch.int32), 3
    ours = rejection_sampler.expand_batch_to_tokens
    assert torch.equal(ours(*arguments, replace_from=0, replace_to=1), torch.tensor([1, 1, 1.5]))
    torch.use_deterministic_algorithms(True)  # what is allocated is filled
    try:
        assert ours.__wrapped__(*arguments, replace_from=0, replace_to=1).isnan().all()
    finally:
        torch.use_deterministic_algorithms(False)
