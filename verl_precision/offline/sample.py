"""One process: vLLM samples in one dtype, at temperature 1 with the whole distribution, and keeps log μ(yₜ).

`python -m verl_precision.offline.sample FOLDER DTYPE ROLLOUT/SHARD...`; ends with its parent. The process ends when its
work is done, because only that gives all memory back.
"""

from typing import Any

from verl_precision.engine.settings import DTYPES
from verl_precision.offline.entry import Task, entry
from verl_precision.offline.settings import model_folder
from verl_precision.offline.store import Store, write_rows

# On a CPU compiling takes longer than sampling; and where a prompt is cut in two, vLLM 0.28 rewinds the request's
# random generator, which a CPU's cannot do ("CPU Generator does not use offset").
CPU_SETTINGS = {"enforce_eager": True, "enable_chunked_prefill": False}


def sample(task: Task) -> None:
    """Write every shard of the task."""
    import verl  # noqa: F401 - loads the plugin, which lets vLLM find itself on a CPU
    from vllm import LLM

    store = task.store
    settings = store.settings
    llm = LLM(
        model_folder(settings.model),
        dtype=DTYPES[task.dtype],
        max_model_len=max(map(len, store.prompt_ids)) + settings.max_response_tokens,
        seed=settings.seed,
        logprobs_mode="processed_logprobs",  # verl's
        **({} if task.on_gpu else CPU_SETTINGS),
    )
    for rollout, shard in task.shards:
        write_rows(store.sample_file(rollout, shard), sample_shard(llm, store, store.shards[shard]))


def sample_shard(llm: Any, store: Store, responses: range) -> list[dict[str, Any]]:
    """Return one row a response: prompt, token ids, log μ of each token, why it ended.

    Args:
        llm: vLLM's engine.
        store: the analysis.
        responses: their numbers.
    """
    from vllm import SamplingParams

    settings = store.settings
    prompts = [response // settings.responses for response in responses]
    outputs = llm.generate(
        [{"prompt_token_ids": store.prompt_ids[prompt]} for prompt in prompts],
        [
            SamplingParams(
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                max_tokens=settings.max_response_tokens,
                logprobs=0,  # of the sampled token alone
                detokenize=False,
                # One a response: the same in every dtype, however the responses are cut into shards.
                seed=settings.seed + response,
            )
            for response in responses
        ],
        use_tqdm=False,
    )
    rows = []
    for response, prompt, output in zip(responses, prompts, outputs, strict=True):
        found = output.outputs[0]
        ids = list(found.token_ids)
        log_probs = [at[token].logprob for at, token in zip(found.logprobs, ids, strict=True)]
        rows.append(
            {
                "response": response,
                "prompt": prompt,
                "response_ids": ids,
                "rollout_log_probs": log_probs,
                "finish_reason": found.finish_reason,
            }
        )
    return rows


if __name__ == "__main__":
    entry("sample", sample)
