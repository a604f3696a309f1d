"""Runs an explanation: computes the missing variants, then writes the answer."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub import snapshot_download
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from verl_precision.base.dtypes import DTYPES, torch_dtype
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder
from verl_precision.engine.router_replay import FAMILIES as ROUTED_FAMILIES
from verl_precision.tools.engines.engine import SampleRequest, SamplerSettings, ScorerSettings
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.model import find_model, model_location
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.explain.judge import FILE, Result, judge, longest_sum, show, write
from verl_precision.tools.gap.explain.variants import REPLAYED, ROLLOUT, Variant, engine_of, reference, variants
from verl_precision.tools.jobs.job import Job, Series, Store, Tasks, open_store
from verl_precision.tools.jobs.journal import Key
from verl_precision.tools.jobs.problems import prompt_tokens
from verl_precision.tools.jobs.settings import Explanation


def explain(
    job: Explanation, console: Console, vllm: Callable = VllmEngine, trainer: Callable = TrainerEngine
) -> Result:
    """Compute the log-probs that the job's folder lacks, judge the steps, and write the answer.

    `vllm` and `trainer` make the engines; they take the arguments of `VllmEngine` and `TrainerEngine`.
    """
    under_way, folder = Job(job, console), job.folder
    models = {"trainer": find_model(job.model), "rollout": find_model(job.rollout_model or job.model)}
    models["rollout"].require_dtypes("--rollout-dtype", [job.rollout_dtype])
    models["rollout"].require_arithmetic(job.arithmetic)
    routed = models["trainer"].config.get("model_type") in ROUTED_FAMILIES
    response_tokens = job.max_response_tokens + 1  # vLLM scores a prompt only if it draws one token more
    prompt_ids = prompt_tokens(job, models["trainer"], models["rollout"], response_tokens)
    length = max(map(len, prompt_ids)) + response_tokens
    chain = variants(job, routed)
    wanted = list(dict.fromkeys([*chain, *reference(job, chain)]))
    fingerprint, of_rollout = models["trainer"].fingerprint, models["rollout"].fingerprint
    of_models = {"model_fingerprint": fingerprint, "rollout_model_fingerprint": of_rollout}
    with open_store(under_way, job, prompt_ids, **of_models) as store:

        def fill(works: Sequence[Tasks], variant: Variant) -> None:
            if any(work.done < work.total for work in works):  # otherwise no weights are written
                build = _engine(job, variant, models[variant.model].name, length, vllm, trainer)
                under_way.complete(variant.name, works, build)

        by_process: dict[Variant, list[Variant]] = {}
        for one in wanted:
            by_process.setdefault(one.process, []).append(one)
        for stops in by_process.values():
            fill([_series(store, one) for one in stops], stops[0])
        found = {one.name: _log_probs(store, one) for one in wanted}
        routing = None
        if routed:
            engine, words = engine_of(chain), "with the experts of another variant"
            replays = replace(engine, name=REPLAYED, cause="", words=words, routing="replayed")
            fill([_Replay(store, one, engine) for one in wanted], replays)
            routing = {one.name: _read_routing(store, one, engine) for one in wanted}
    for weights in folder.glob("weights-*"):
        shutil.rmtree(weights)
    result = judge(job, chain, found, routing, longest_sum(models["trainer"].config))
    write(folder, job, result, under_way.envelope())
    show(job, result, console)
    under_way.show_written([FILE])
    return result


def _engine(job: Explanation, variant: Variant, model: str, length: int, vllm: Callable, trainer: Callable) -> partial:
    """Return a function that makes a variant's engine, for a new process; write the rounded weights it needs."""
    if variant.rounded_to is not None:
        target = job.folder / f"weights-{variant.model}-{variant.rounded_to}"
        model = rounded_copy(model, variant.rounded_to, target)
    if variant.engine == "vllm":
        # vLLM applies its temperature only to drawn tokens, so for scores the logits are divided by the temperature.
        temperature, divisor = (1.0, job.temperature) if variant.tempered else (job.temperature, 1.0)
        more = {
            "logprobs_mode": "processed_logprobs" if variant.processed else "raw_logprobs",
            "enforce_eager": not variant.compiled,
            "enable_prefix_caching": variant.cached,
            "enable_chunked_prefill": variant.cached,
            "enable_return_routed_experts": bool(variant.routing),
        }
        return partial(vllm, SamplerSettings(
            model=model, dtype=variant.dtype, max_model_len=length, log_probs=True, temperature=temperature,
            top_p=job.top_p, top_k=job.top_k, divide_logits_by=divisor, arithmetic=variant.arithmetic, more=more,
        ))  # fmt: skip
    return partial(trainer, ScorerSettings(
        model=model, dtype=variant.dtype, attention=variant.attention, micro_batch_tokens=job.micro_batch_tokens,
        packed=variant.packed, fp32_log_probs=variant.fp32_log_probs, fp32_output_head=variant.fp32_output_head,
        temperature=job.temperature,
        router_replay={"": "disabled", "recorded": "R2", "replayed": "R3"}[variant.routing],
        arithmetic=variant.arithmetic,
    ))  # fmt: skip


def rounded_copy(model: str, dtype: str, target: Path) -> str:
    """Return a folder with weights rounded to bf16 or fp16: the model itself if it has them, otherwise a copy.

    The copy is made in the folder `target`; a copy that exists is used again.
    """
    if target.exists():
        return str(target)
    files, to = _files(model), torch_dtype(dtype)
    if all(_has_only(file, DTYPES[dtype].safetensors) for file in files):
        return str(files[0].parent)
    with new_folder(target) as folder:
        for file in files:
            rounded = {name: t.to(to) if t.is_floating_point() else t for name, t in load_file(file).items()}
            save_file(rounded, folder / file.name, {"format": "pt"})
        for other in files[0].parent.iterdir():
            if other.is_file() and other.suffix not in (".safetensors", ".bin"):
                shutil.copyfile(other, folder / other.name)
    return str(target)


def _has_only(file: Path, dtype: str) -> bool:
    with safe_open(file, "pt") as saved:
        return {saved.get_slice(name).get_dtype() for name in saved.keys()} == {dtype}


def _files(model: str) -> list[Path]:
    location = Path(model_location(model))
    source = location if location.is_dir() else Path(snapshot_download(model))
    if files := sorted(source.glob("*.safetensors")):
        return files
    problem, remedy = f"{model}: it has no *.safetensors", "Load it with transformers, and save it again."
    raise ConfigurationError(problem, allowed="a model saved by transformers' save_pretrained", remedy=remedy)


def _series(store: Store, variant: Variant) -> Series:
    done = "drawn" if variant.draws else "scored"
    series = Series(store, *variant.series, what=f"responses {done}: {variant.words}")
    series.in_flight = 1 if variant.alone else None
    return series


def _log_probs(store: Store, variant: Variant) -> np.ndarray:
    """Return a variant's log-probs of all tokens; NaN from the first token that differs from the rollout's."""
    values = []
    for key in store.keys:
        found, rollout = store.series[variant.series][key], store.series[ROLLOUT, None][key]
        log_probs = found.log_probs
        if variant.draws:
            equal = zip(rollout.token_ids or (), found.token_ids or ())  # noqa: B905 - lengths may differ
            same = np.cumprod([a == b for a, b in equal]).sum(dtype=int)
            log_probs = np.append(log_probs[:same], np.full(rollout.length - same, np.nan))
        values.append(log_probs)
    return np.concatenate(values).astype(np.float64)


class _Replay(Series):
    """Scores of the responses for which a variant chose other experts than the trainer's engine in FP32."""

    in_flight = 1

    def __init__(self, store: Store, variant: Variant, engine: Variant) -> None:
        """Find the responses that differ in their experts; both variants are complete."""
        self._variant = variant

        def differ(key: Key) -> bool:  # the order of a token's experts has no meaning
            ours, theirs = (np.sort(_experts(store, each, key)) for each in (variant, engine))
            return bool((ours != theirs).any())

        keys = [*filter(differ, store.keys)]
        what = f"responses scored with other experts: {variant.words}"
        super().__init__(store, ROLLOUT, f"{REPLAYED} {variant.name}", what, keys)

    def _request(self, problem: str, response: int) -> SampleRequest:
        experts = _experts(self._store, self._variant, (problem, response))
        return replace(super()._request(problem, response), routed_experts=experts)


def _read_routing(store: Store, variant: Variant, engine: Variant) -> np.ndarray:
    """Return log-probs of all tokens with a variant's experts; the store has the variant's series of `_Replay`."""
    scored = store.series[engine.series] | store.series[ROLLOUT, f"{REPLAYED} {variant.name}"]
    return np.concatenate([scored[key].log_probs for key in store.keys]).astype(np.float64)


def _experts(store: Store, variant: Variant, key: Key) -> Any:
    """Return a variant's experts, [tokens - 1, layers, top_k], cut or padded with 0 to the rollout's tokens."""
    found = store.series[variant.series][key].routed_experts
    if found is None:
        raise RuntimeError(f"variant {variant.name} returned no experts")
    length = len(store.prompt_ids[int(key[0])]) + store.series[ROLLOUT, None][key].length - 1
    return np.pad(found[:length], ((0, max(0, length - len(found))), (0, 0), (0, 0)))
