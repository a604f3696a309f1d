"""The results in the shape that lm-eval (EleutherAI's evaluation harness) writes, for what reads its files.

lm-eval has one file for a model with one set of arguments: here one for each dtype and context. Its keys are
"metric,filter"; a standard error is "metric_stderr,filter", over problems.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from verl_precision.base.dtypes import long
from verl_precision.tools.evaluate.accuracy import Accuracy
from verl_precision.tools.evaluate.settings import Evaluation

FOLDER = "lm_eval"


def lm_eval_files(
    evaluation: Evaluation, found: Sequence[Accuracy], left_out: Mapping[str, int], digests: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Return file name -> content; `left_out` and `digests` are by data set, and a digest is its task's version."""
    files = {}
    for context in evaluation.contexts:
        for dtype in evaluation.dtypes:
            here = [each for each in found if (each.context, each.dtype) == (context, dtype)]
            files[f"results_{dtype}_{context}.json"] = _content(evaluation, here, context, dtype, left_out, digests)
    return files


def _content(
    evaluation: Evaluation,
    found: Sequence[Accuracy],
    context: int,
    dtype: str,
    left_out: Mapping[str, int],
    digests: Mapping[str, str],
) -> dict[str, Any]:
    k = evaluation.responses
    average, passed = f"avg@{k}", f"pass@{k}"
    drawing = {
        "temperature": evaluation.temperature,
        "top_p": evaluation.top_p,
        "do_sample": evaluation.temperature > 0,
    }
    results, configs, samples = {}, {}, {}
    for each in found:
        error = "N/A" if math.isnan(each.error) else each.error  # lm-eval's word
        numbers = {average: each.average, f"{average}_stderr": error, passed: each.passed}
        results[each.data] = {"alias": each.data, **{f"{name},none": value for name, value in numbers.items()}}
        configs[each.data] = {
            "task": each.data,
            "output_type": "generate_until",
            "num_fewshot": 0,
            "repeats": k,
            "generation_kwargs": drawing,
            "metadata": {"reward": evaluation.reward, "seed": evaluation.seed},
        }
        count = len(each.shares_P)
        samples[each.data] = {"original": count + left_out.get(each.data, 0), "effective": count}
    names = list(results)
    arguments = f"pretrained={evaluation.model},dtype={long(dtype)},max_model_len={context},seed={evaluation.seed}"
    return {
        "results": results,
        "group_subtasks": {name: [] for name in names},
        "configs": configs,
        "versions": {name: digests[name] for name in names},
        "n-shot": {name: 0 for name in names},
        "higher_is_better": {name: {average: True, passed: True} for name in names},
        "n-samples": samples,
        "config": {
            "model": "vllm",
            "model_args": arguments,
            "model_dtype": f"torch.{long(dtype)}",
            "gen_kwargs": drawing,
        },
        "model_source": "vllm",
        "model_name": str(evaluation.model),
        "max_length": context,
    }
