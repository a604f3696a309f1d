"""An explanation from end to end: missing variants are computed, then the page is written."""

import shutil
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from rich.console import Console

from verl_precision.base.errors import ConfigurationError
from verl_precision.engine.router_replay import FAMILIES as ROUTED_FAMILIES
from verl_precision.tools.engines.engine import SamplerSettings, ScorerSettings
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import Model, find_model
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.explain.judge import Result, judge, longest_sum
from verl_precision.tools.gap.explain.kept import kept_rollout
from verl_precision.tools.gap.explain.operations import OperationComparer, comparison, read_operations, recording
from verl_precision.tools.gap.explain.page import FILES, show, write
from verl_precision.tools.gap.explain.routing import Replay, read_routing, series_of
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import REPLAYED, ROLLOUT, Variant, reference, replayed, variants
from verl_precision.tools.gap.explain.weights import adapter_fingerprint, different_weights, merged_copy, rounded_copy
from verl_precision.tools.jobs.job import Job, Tasks
from verl_precision.tools.jobs.problems import prompt_tokens
from verl_precision.tools.jobs.store import Series, Store, open_store


def explain(
    job: Explanation, console: Console, vllm: Callable = VllmEngine, trainer: Callable = TrainerEngine
) -> Result:
    """Compute what is missing in the job's folder, judge it, and write the page.

    `vllm` and `trainer` make the engines; they take what `VllmEngine` and `TrainerEngine` do.
    """
    under_way, folder = Job(job, console), job.folder
    models = {"trainer": find_model(job.model)}
    models["rollout"] = models["trainer"] if job.rollout_model is None else find_model(job.rollout_model)
    between = [] if job.through_exact else ["fp32"]
    models["rollout"].require_dtypes("--rollout-dtype", [job.rollout_dtype, *between])
    models["trainer"].require_attention("sdpa", "the path begins with ")
    models["rollout"].require_arithmetic("exact" if job.exact else job.arithmetic, job.ray_address)
    response_tokens = job.max_response_tokens + 1  # vLLM scores a prompt only if it draws one token more
    kept = None if job.tokens is None else kept_rollout(job, models["rollout"])
    if kept is None:
        prompt_ids = prompt_tokens(job, models["trainer"], models["rollout"], response_tokens)
    else:
        prompt_ids = kept.prompt_ids
    length = max(map(len, prompt_ids)) + response_tokens
    routed = models["trainer"].config.get("model_type") in ROUTED_FAMILIES
    if routed and kept is not None:
        problem = "a mixture of experts, and the run has not kept which experts computed its tokens"
        raise ConfigurationError(problem, setting="--tokens", value=job.tokens, remedy="Leave it out: draw anew.")
    chain = variants(job, routed)
    wanted = list(dict.fromkeys([*chain, *reference(job, chain)]))
    of_record = [one.name for one in chain if one.engine == "vllm" and one.alone and not one.compiled]
    recorded_at = of_record if job.ray_address is None else []
    fingerprints = {
        "model_fingerprint": models["trainer"].fingerprint,
        "rollout_model_fingerprint": models["rollout"].fingerprint,
        "adapter_fingerprint": None if job.adapter is None else adapter_fingerprint(job.adapter),
    }
    if kept is not None:
        fingerprints["tokens_fingerprint"] = kept.fingerprint
    with open_store(under_way, job, prompt_ids, **fingerprints) as store:
        if kept is not None:
            kept.record(_series(store, chain[0]))

        def fill(name: str, works: Sequence[Tasks], build: Callable[[], partial]) -> None:
            if any(work.done < work.total for work in works):  # else its weights are not made
                under_way.complete(name, works, build())

        def engine_of(variant: Variant) -> partial:
            return _engine(job, variant, models, length, vllm, trainer)

        by_process: dict[Variant, list[Variant]] = {}
        for one in wanted:
            by_process.setdefault(one.process, []).append(one)
        for stops in by_process.values():
            series = [_series(store, one) for one in stops]
            records = [recording(store, folder, one.name) for one in stops if one.name in recorded_at]
            fill(stops[0].name, [*series, *records], partial(engine_of, stops[0]))
        engine_fp32 = next(one for one in chain if one.cause == "engine")
        compared = [comparison(folder, name) for name in recorded_at]
        fill("operations", compared, lambda: partial(OperationComparer, _weights(job, engine_fp32, models)))
        operations = {name: read_operations(comparison(folder, name).path) for name in recorded_at}
        found = {one.name: _log_probs(store, one) for one in wanted}
        routing, evidence = None, {}
        if routed:
            replays = [Replay(store, one, engine_fp32) for one in wanted]
            fill(REPLAYED, replays, partial(engine_of, replayed(chain)))
            routing = read_routing(store, chain, wanted[len(chain) :], engine_fp32)
            evidence["routing"] = f"{routing.changed:.2%} of the choices differ between rollout and trainer"
        if job.rollout_model is not None:
            evidence["weights"] = different_weights(models["rollout"].name, models["trainer"].name)
    for record in folder.glob("record-*"):
        record.unlink()
    for weights in folder.glob("weights-*"):
        shutil.rmtree(weights)
    result = judge(job, chain, found, routing, operations, evidence, longest_sum(models["trainer"].config))
    write(folder, job, result, under_way.envelope())
    show(job, result, console)
    under_way.show_written(FILES)
    return result


def _series(store: Store, variant: Variant) -> Series:
    done = "drawn" if variant.draws else "scored"
    series = Series(store, *series_of(variant), what=f"responses {done}: {variant.words}")
    series.in_flight = 1 if variant.alone else None
    return series


def _engine(
    job: Explanation, variant: Variant, models: dict[str, Model], length: int, vllm: Callable, trainer: Callable
) -> partial:
    model = _weights(job, variant, models)
    if variant.engine == "vllm":
        mode = "processed_logprobs" if variant.processed else "raw_logprobs"
        # vLLM divides what it draws alone; so that scores are divided too, the logits are.
        temperature, divisor = (1.0, job.temperature) if variant.tempered else (job.temperature, 1.0)
        more = {
            "logprobs_mode": mode, "enforce_eager": not variant.compiled, "enable_prefix_caching": variant.cached,
            "enable_chunked_prefill": variant.cached, "enable_return_routed_experts": bool(variant.routing),
        }  # fmt: skip
        return partial(vllm, SamplerSettings(
            model=model, dtype=variant.dtype, max_model_len=length, log_probs=True, temperature=temperature,
            top_p=job.top_p, top_k=job.top_k, divide_logits_by=divisor, arithmetic=variant.arithmetic, more=more,
        ))  # fmt: skip
    return partial(trainer, ScorerSettings(
        model=model, dtype=variant.dtype, attention=variant.attention, micro_batch_tokens=job.micro_batch_tokens,
        packed=variant.packed, fp32_log_probs=variant.fp32_log_probs, fp32_output_head=variant.fp32_output_head,
        temperature=job.temperature, adapter=job.adapter if variant.adapter else None,
        router_replay={"": "disabled", "recorded": "R2", "replayed": "R3"}[variant.routing],
        arithmetic=variant.arithmetic,
    ))  # fmt: skip


def _weights(job: Explanation, variant: Variant, models: dict[str, Model]) -> str:
    """Return the model that a variant loads."""
    name, dtype = models[variant.model].name, variant.rounded_to
    if job.adapter is not None and not variant.adapter:
        name = merged_copy(name, job.adapter, job.folder / "weights-merged")
    return name if dtype is None else rounded_copy(name, dtype, job.folder / f"weights-{variant.model}-{dtype}")


def _log_probs(store: Store, variant: Variant) -> np.ndarray:
    """Return a variant's log-probs of all tokens; NaN from where it has drawn other tokens than the rollout."""
    values = []
    for key in store.keys:
        found = store.journal.read(store.positions[series_of(variant)][key])
        log_probs = found["log_probs"]
        if variant.draws:
            drawn = store.journal.read(store.positions[ROLLOUT, None][key])["token_ids"]
            equal = zip(drawn, found["token_ids"])  # noqa: B905 - they may end elsewhere
            same = np.cumprod([a == b for a, b in equal]).sum(dtype=int)
            log_probs = log_probs[:same] + [np.nan] * (len(drawn) - same)
        values.append(np.array(log_probs, np.float32))
    return np.concatenate(values).astype(np.float64)
