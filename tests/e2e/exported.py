"""Log-probs of one text as JSON: by the trainer's FP32 weights, by an export of them in transformers and in vLLM, and
by the same weights in BF16.

Run by test_resume.py in a process of its own: python exported.py CHECKPOINT EXPORT
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from verl_precision.tools.engines.engine import prepare_process
from verl_precision.tools.engines.vllm_sampler import _CPU_SETTINGS
from verl_precision.tools.export.session import SavedModel

prepare_process()
import verl  # noqa: E402, F401 - lets vLLM find itself on a CPU
from vllm import LLM, SamplingParams  # noqa: E402

checkpoint, export = map(Path, sys.argv[1:])
ids = torch.randint(3, 90, (64,), generator=torch.Generator().manual_seed(0))


def scored(model) -> list[float]:
    with torch.no_grad():
        log_probs = model(ids.unsqueeze(0)).logits[0, :-1].float().log_softmax(-1)
    return log_probs.gather(-1, ids[1:].unsqueeze(-1)).flatten().tolist()


trainer, saved = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32), SavedModel.find(checkpoint)
trainer.load_state_dict({name: saved.tensor(name) for name in saved.sources})
exported = AutoModelForCausalLM.from_pretrained(export, dtype="auto")
engine = LLM(str(export), max_model_len=128, **_CPU_SETTINGS)
sampling = SamplingParams(max_tokens=1, prompt_logprobs=0)
(output,) = engine.generate([{"prompt_token_ids": ids.tolist()}], sampling, use_tqdm=False)
served = [at[token].logprob for at, token in zip(output.prompt_logprobs[1:], ids[1:].tolist(), strict=True)]
dtypes = [str(trainer.dtype), str(exported.dtype), str(engine.llm_engine.model_config.dtype)]
log_probs = {"trainer": scored(trainer), "transformers": scored(exported), "vllm": served}
print(json.dumps({"dtypes": dtypes, "log_probs": log_probs | {"bf16": scored(trainer.to(torch.bfloat16))}}))
