"""The settings that a recipe or a run would have explained; what a run has recorded, and what only a rerun can tell."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import ConfigurationError
from verl_precision.base.options import as_options
from verl_precision.base.verl_config import FSDP, engine_kwargs, engines, lora_rank, rollout_dtype
from verl_precision.check.rules.attention import attention_of
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.mismatch import metric_names as keys
from verl_precision.mismatch.alarm import first_alarms
from verl_precision.mismatch.metric_names import value_of
from verl_precision.tools.checking.composing import recorded_config
from verl_precision.tools.gap.explain.judge import CAUSES
from verl_precision.tools.gap.explain.settings import Explanation
from verl_precision.tools.gap.explain.variants import variants
from verl_precision.tools.kept_tokens.kept_file import beside, index_of
from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.tables import percent_text, terminal_table
from verl_precision.weight_sync.canary import CANARY_BOUND, CANARY_GAP

Rows = Sequence[Mapping[str, float]]


class RecordedCause(NamedTuple):
    """What is known of one cause."""

    cause: str  # its name, as in `CAUSES`
    seen: str  # what was recorded, in words
    fault: bool | None  # whether something is wrong; None where it is a cost whose size a rerun tells

    @property
    def remedy(self) -> str:
        """What to do about a fault; empty if it is none."""
        return CAUSES[self.cause].remedy if self.fault else ""


def explained_by(config: DictConfig) -> dict[str, Any]:
    """Return the settings of an `Explanation`, and of its prompts, as the command line has them."""
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    actor, overrides = engines(config)[0], engine_kwargs(config)
    has_engine = {"actor.strategy": (actor.strategy, FSDP), "rollout.name": (rollout.name, ("vllm",))}
    for setting, (value, allowed) in has_engine.items():
        if value not in allowed:
            raise ConfigurationError(
                "explain has no engine for it", setting=f"actor_rollout_ref.{setting}", value=value,
                allowed=" or ".join(allowed), remedy="Explain the model alone: leave --recipe and --run out.",
            )  # fmt: skip
    on_gpu = config.trainer.device != "cpu"
    verls_fp32 = on_gpu or actor.compute == "fp32"  # verl's own engine takes log-probs in the logits' dtype on a CPU
    files = config.data.train_files
    return {
        "model": str(model.path),
        "rollout_dtype": rollout_dtype(config),
        "train_dtype": actor.compute,
        "temperature": float(rollout.temperature),
        "top_p": float(rollout.top_p),
        "top_k": max(int(rollout.top_k), 0),
        "raw_log_probs": overrides.get("logprobs_mode", rollout.get("logprobs_mode")) == "raw_logprobs",
        "prefix_caching": bool(rollout.get("enable_prefix_caching", True)),
        "cuda_graphs": on_gpu and not rollout.get("enforce_eager", False),
        "attention": attention_of(config) if on_gpu else "sdpa",
        "packed": bool(model.get("use_remove_padding", False)),
        "fp32_output_head": bool(actor.our_fsdp and actor.node.get("fp32_output_head")),
        "fp32_log_probs": bool(actor.node.get("fp32_log_probs", True)) if actor.our_fsdp else verls_fp32,
        "micro_batch_tokens": int(config.actor_rollout_ref.actor.get("ppo_max_token_len_per_gpu") or 16384),
        "max_response_tokens": min(int(config.data.max_response_length), 512),  # more cost time, and show the same
        "prompts": str(files if isinstance(files, str) else files[0]),
        "prompt_field": str(config.data.get("prompt_key", "prompt")),
        "max_prompts": 16,
        "arithmetic": "native" if on_gpu else OmegaConf.select(config, ARITHMETIC_SETTING) or "native",
    }  # fmt: skip


def replays_sampling(config: DictConfig) -> bool:
    """Return whether the trainer knows which tokens top-p and top-k left out."""
    return bool(OmegaConf.select(config, "actor_rollout_ref.rollout.custom.sampling_masks"))


def read_run(source: Path) -> tuple[Run, DictConfig | None]:
    """Return a run's metrics and config; None where it has left no config.

    It is a folder of `verl-precision compare`, a metrics file, or a folder of checkpoints, whose metrics file stands
    beside it under the same name.
    """
    beside = source.with_name(f"{source.name}.jsonl")
    (run, *others) = read_runs([beside if beside.is_file() else source])
    if others:
        names = ", ".join(each.name for each in (run, *others))
        raise ConfigurationError(
            "there are several runs in it", setting="--run", value=str(source), allowed="one run",
            remedy=f"Name one of {names}.",
        )  # fmt: skip
    found = (recorded_config(folder) for folder in (source, run.path.parent, run.path.with_suffix("")))
    return run, next((config for config in found if config is not None), None)


def show_run(source: Path, console: Console) -> None:
    """Print what a run has recorded of the causes, and what a rerun would add."""
    run, config = read_run(source)
    settings = None if config is None else explained_by(config)
    found = recorded_causes(settings, config is not None and replays_sampling(config), run.rows)
    say = partial(console.print, highlight=False, soft_wrap=True)
    say(gap_of(run.rows))
    faults = [one for one in found if one.fault]
    named = "; ".join(f"{one.cause}: {CAUSES[one.cause].title}" for one in faults)
    say(f"Something is wrong. {named}." if faults else "Nothing that is recorded is wrong.")
    words = {True: "FAULT", False: "right", None: "a cost"}
    rows = [(one.cause, one.seen, words[one.fault]) for one in found]
    if found:
        console.print(terminal_table(("cause", "recorded", ""), rows, words=3, red=range(len(faults))))
    if alarms := first_alarms(run.rows):
        rung = ", ".join(f"{name} at step {step}" for name, step in alarms.items())
        say(f"Alarms: {rung}. What they mean: verl-precision report {run.path}")
    for one in faults:
        say(f"{one.cause}: {one.remedy}.")
    if config is None or settings is None:
        say("It has left no config. A rerun tells the share of each cause, and more of them:")
        say("verl-precision explain --recipe RECIPE.yaml")
        return
    path = beside(run.path)
    kept = index_of(path)
    if first := next((one.step for one in kept if not one.version), None):  # sampled with the weights of the model
        drawn = ("prompts", "prompt_field", "max_prompts")
        settings = {name: value for name, value in settings.items() if name not in drawn}
        settings |= {"tokens": str(path), "step": first}
    job = Explanation(**settings)
    known = {one.cause for one in found if one.fault is not None}
    causes = ", ".join(one.cause for one in variants(job)[1:] if one.cause not in known)
    say(f"A rerun tells the share of each cause ({causes}) and what vLLM's operations do:")
    say(f"verl-precision explain {shlex.join(as_options(Explanation, settings))}")
    if later := [one.step for one in kept if one.version]:
        text = f"Kept tokens of steps {min(later)} to {max(later)} were sampled with later weights: for step N, export "
        say(text + "the checkpoint of step N-1, and give it as --model.")
    if lora_rank(config):
        say("It trains an adapter: add --adapter and the folder lora_adapter of a checkpoint.")


def recorded_causes(settings: Mapping[str, Any] | None, replays_sampling: bool, rows: Rows) -> list[RecordedCause]:
    """Return what a run tells, in the order of the path, faults first.

    The settings of an `Explanation` are None if the run has left no config; `rows` are the metrics of each step.
    """
    found: dict[str, RecordedCause] = {}
    of_config = _of_config(settings, replays_sampling) if settings else ()
    for cause, seen, fault in (*of_config, *_of_metrics(rows)):
        before = f"{found[cause].seen}; " if cause in found else ""
        found[cause] = RecordedCause(cause, before + seen, fault)
    order = list(CAUSES)
    return sorted(found.values(), key=lambda one: (not one.fault, order.index(one.cause)))


def gap_of(rows: Rows) -> str:
    """Return the whole gap of a run in words."""
    k3, gap = _values(rows, keys.K3_KL), _values(rows, keys.LOG_PROB_GAP)
    if not k3:
        return "The run has not measured its mismatch. Every preset sets mismatch.enabled=True."
    first, last = next(iter(k3)), list(k3)[-1]
    text = f"Steps {first:.0f} to {last:.0f}: k3 {fmean(k3.values()):.2e} on average, {k3[last]:.2e} at the last step"
    return text + (f"; mean |gap| {fmean(gap.values()):.2e} nats." if gap else ".")


def _of_config(settings: Mapping[str, Any], replays_sampling: bool) -> Iterator[tuple[str, str, bool | None]]:
    if settings["raw_log_probs"]:
        temperature = settings["temperature"]
        yield "temperature", f"logprobs_mode=raw_logprobs at temperature {temperature:g}", temperature != 1
    elif settings["top_p"] < 1 or settings["top_k"] > 0:
        seen = f"top_p {settings['top_p']:g}, top_k {settings['top_k'] or -1}"
        seen += "; the trainer replays the masks" if replays_sampling else ", and no masks are replayed"
        yield "sampling", seen, not replays_sampling
    train, rollout = settings["train_dtype"], settings["rollout_dtype"]
    if train != rollout:
        yield "weight_rounding", f"trainer {train}, rollout {rollout}", None
    for cause, dtype in (("rollout_precision", rollout), ("trainer_precision", train)):
        if dtype != "fp32" and settings["arithmetic"] != EXACT:
            yield cause, f"{dtype}, by the config", None
    if not settings["fp32_log_probs"]:
        yield "log_probs", "16-bit log-probs, by the config", True


def _of_metrics(rows: Rows) -> Iterator[tuple[str, str, bool | None]]:
    gaps, bounds = _values(rows, CANARY_GAP), _values(rows, CANARY_BOUND)
    compared = sorted(gaps.keys() & bounds.keys())
    if wrong := [step for step in compared if not gaps[step] <= bounds[step]]:  # NaN is beyond, too
        seen = f"canary beyond its bound after {len(wrong)} of {len(compared)} syncs, first at step {wrong[0]:.0f}"
        yield "weights", f"{seen}: {gaps[wrong[0]]:.1e} nats, allowed {bounds[wrong[0]]:.1e}", True
    elif compared:
        yield "weights", f"canary within its bound after all {len(compared)} syncs", False
    if stale := _values(rows, keys.STALE_FRACTION):
        k3, fresh = _values(rows, keys.K3_KL), _values(rows, keys.behind(0, keys.K3_KL))
        seen = f"{fmean(stale.values()):.1%} of the responses are behind"
        both = sorted(step for step in k3.keys() & fresh.keys() if stale.get(step))
        if both and (whole := sum(k3[step] for step in both)):
            less = percent_text(1 - sum(fresh[step] for step in both) / whole)
            seen += f"; without them k3 is {less} smaller"
        yield "staleness", seen, False if not any(stale.values()) else None
    if beta := _values(rows, keys.BETA):
        precision, policy = fmean(beta.values()), fmean(_values(rows, keys.ALPHA).values())
        yield "trainer_precision", f"the shadow: precision {precision:.1e} nats, policy {policy:.1e}", None
    if agreement := _values(rows, keys.ROUTING_AGREEMENT):
        yield "routing", f"{percent_text(1 - fmean(agreement.values()), 2)} of the choices differ", None


def _values(rows: Rows, key: str) -> dict[float, float]:
    """Return the values of a metric by step."""
    return {row["step"]: value for row in rows if (value := value_of(row, key)) is not None}
