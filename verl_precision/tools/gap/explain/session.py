"""An explanation from end to end: missing variants are computed, then the page is written."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from verl_precision.base.versions import installed_versions
from verl_precision.engine.router_replay import FAMILIES as ROUTED_FAMILIES
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import Model, Prompt, find_model, tokenize
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.explain.judge import Result, judge
from verl_precision.tools.gap.explain.operation_jobs import Comparison, Record
from verl_precision.tools.gap.explain.operations import OperationComparer, read_operations
from verl_precision.tools.gap.explain.routing import Replay, read_routing, series_of
from verl_precision.tools.gap.explain.settings import Explanation, check_model
from verl_precision.tools.gap.explain.variants import REPLAYED, ROLLOUT, Variant, reference, replayed, variants
from verl_precision.tools.gap.explain.weights import adapter_fingerprint, different_weights, merged_copy, rounded_copy
from verl_precision.tools.jobs.journal import open_journal
from verl_precision.tools.jobs.store import Series, Store
from verl_precision.tools.jobs.work import Work, start_engine, work_through

Maker = Callable[..., Any]


def explain(
    job: Explanation,
    prompts: list[Prompt],
    folder: Path,
    console: Console,
    ray_address: str | None = None,
    in_flight: int = 256,
    vllm: Maker = VllmEngine,
    trainer: Maker = TrainerEngine,
) -> Result:
    """Compute what is missing in the folder, and judge it.

    Args:
        job: What is explained.
        prompts: The prompts, as read.
        folder: A new or empty folder, or that of an earlier job with the same settings.
        console: Where progress is shown.
        ray_address: Address of a Ray cluster whose GPUs share the work; None for this machine.
        in_flight: Sequences computed together, by each engine.
        vllm: Makes the rollout's engine; takes what `VllmEngine` does.
        trainer: Makes the trainer's engine; takes what `TrainerEngine` does.

    Raises:
        ConfigurationError: If something cannot work; it is raised before a model loads.
        RunFailedError: If an engine fails; what was done is kept.
    """
    models = {"trainer": find_model(job.model)}
    models["rollout"] = models["trainer"] if job.rollout_model is None else find_model(job.rollout_model)
    prompt_ids = tokenize(prompts, models["trainer"])
    longest = max(map(len, prompt_ids))
    check_model(job, models["rollout"], longest)
    recorded = {
        **asdict(job),
        "model_fingerprint": models["trainer"].fingerprint,
        "rollout_model_fingerprint": models["rollout"].fingerprint,
        "adapter_fingerprint": None if job.adapter is None else adapter_fingerprint(job.adapter),
        **{f"version of {name}": version for name, version in installed_versions().items()},
        "prompt_token_ids": prompt_ids,
    }
    routed = models["trainer"].config.get("model_type") in ROUTED_FAMILIES
    chain = variants(job, routed)
    wanted = list(dict.fromkeys([*chain, *reference(job, chain)]))
    of_record = [one.name for one in chain if one.engine == "vllm" and one.alone and not one.compiled]
    recorded_at = of_record if ray_address is None else []
    with closing(open_journal(folder, recorded)) as journal:
        store = Store(journal, job, prompt_ids)
        journal.show_resumed(store.count, console)

        def fill(name: str, works: Sequence[tuple[Work, int]], build: Callable[[], partial]) -> None:
            if unfinished := [(work, together) for work, together in works if work.done < work.total]:
                with closing(start_engine(build(), name, folder, ray_address)) as engine:
                    for work, together in unfinished:
                        work_through(engine, work, together, console)

        def engine_of(variant: Variant) -> partial:
            return _engine(job, variant, models, folder, longest, vllm, trainer)

        for stops in _by_process(wanted):
            works: list[tuple[Work, int]] = [(_series(store, one), 1 if one.alone else in_flight) for one in stops]
            records = [Record(store, folder, one.name) for one in stops if one.name in recorded_at]
            fill(stops[0].name, [*works, *((record, 1) for record in records)], partial(engine_of, stops[0]))
        engine_fp32 = next(one for one in chain if one.cause == "engine")
        compared: list[tuple[Work, int]] = [(Comparison(folder, name), 1) for name in recorded_at]
        fill("operations", compared, lambda: partial(OperationComparer, _weights(job, engine_fp32, models, folder)))
        operations = {name: read_operations(Comparison(folder, name).path) for name in recorded_at}
        found = {one.name: _log_probs(store, one) for one in wanted}
        routing, evidence = None, {}
        if routed:
            replays: list[tuple[Work, int]] = [(Replay(store, one, engine_fp32), 1) for one in wanted]
            fill(REPLAYED, replays, partial(engine_of, replayed(chain)))
            routing = read_routing(store, chain, wanted[len(chain) :], engine_fp32)
            evidence["routing"] = f"{routing.changed:.2%} of the choices differ between rollout and trainer"
        if job.rollout_model is not None:
            evidence["weights"] = different_weights(models["rollout"].name, models["trainer"].name)
    for record in folder.glob("record-*"):
        record.unlink()
    for weights in folder.glob("weights-*"):
        shutil.rmtree(weights)
    return judge(job, chain, found, routing, operations, evidence)


def _by_process(chain: Sequence[Variant]) -> list[list[Variant]]:
    """Group variants that one process computes, in the order in which their first one stands."""
    groups: dict[Variant, list[Variant]] = {}
    for one in chain:
        groups.setdefault(one.process, []).append(one)
    return list(groups.values())


def _series(store: Store, variant: Variant) -> Series:
    done = "drawn" if variant.draws else "scored"
    return Series(store, *series_of(variant), what=f"responses {done}: {variant.words}")


def _engine(
    job: Explanation,
    variant: Variant,
    models: dict[str, Model],
    folder: Path,
    longest: int,
    vllm: Maker,
    trainer: Maker,
) -> partial:
    model = _weights(job, variant, models, folder)
    if variant.engine == "vllm":
        mode = "processed_logprobs" if variant.processed else "raw_logprobs"
        settings: dict[str, Any] = {
            "top_p": job.top_p,
            "top_k": job.top_k,
            # vLLM divides what it draws alone; so that scores are divided too, the logits are.
            "temperature": 1.0 if variant.tempered else job.temperature,
            "divide_logits_by": job.temperature if variant.tempered else 1.0,
            "enforce_eager": not variant.compiled,
            "enable_prefix_caching": variant.cached,
            "enable_chunked_prefill": variant.cached,
            "enable_return_routed_experts": bool(variant.routing),
        }
        length = longest + job.max_response_tokens + 1
        return partial(vllm, model, variant.dtype, length, log_probs=True, logprobs_mode=mode, **settings)
    return partial(
        trainer,
        model,
        variant.dtype,
        variant.attention,
        job.micro_batch_tokens,
        packed=variant.packed,
        fp32_log_probs=variant.fp32_log_probs,
        temperature=job.temperature,
        adapter=job.adapter if variant.adapter else None,
        fp32_output_head=variant.fp32_output_head,
        router_replay={"": "disabled", "recorded": "R2", "replayed": "R3"}[variant.routing],
    )


def _weights(job: Explanation, variant: Variant, models: dict[str, Model], folder: Path) -> str:
    """Return the model that a variant loads."""
    name, dtype = models[variant.model].name, variant.rounded_to
    if job.adapter is not None and not variant.adapter:
        name = merged_copy(name, job.adapter, folder / "weights-merged")
    return name if dtype is None else rounded_copy(name, dtype, folder / f"weights-{variant.model}-{dtype}")


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
