"""Rules of the loss trial (`check/loss_trial.py`), and differences between a loss and its paper."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import ACTOR, CORRECTION, LOSS, engines
from verl_precision.check.rules.rule import Environment, Fault, Severity, TriedLoss, rule
from verl_precision.losses.invariance import DEPENDS

WEIGHTS = f"{CORRECTION}.rollout_is"
LARGE = 0.3  # from this share of the gradient on, another split is another run
LARGE_OF_DRAWS = 1.0  # a loss that draws a share of the tokens draws at least one of a small batch
THREADS = {"geo_mean": "verl#7913", "kl_cov": "verl#7829"}


@rule("loss-not-tried", "unchecked")
def loss_not_tried(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """A user's own loss could not be called."""
    tried = environment.loss
    if tried is not None and tried.problem and not _of_host(tried):
        yield Fault.worded("loss-not-tried", LOSS, tried=tried)


@rule("loss-unusable")
def loss_unusable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The loss ends verl's first update, or does not train what its user wants."""
    tried = environment.loss or TriedLoss()
    if said := tried.unusable or (tried.problem if _of_host(tried) else ""):
        yield Fault.worded("loss-unusable", LOSS, said=said)
    if (trial := tried.trial) is None:
        return
    if trial.nonfinite:
        yield Fault.worded("loss-unusable/not finite", LOSS, trial=trial)
    elif trial.masked > DEPENDS:
        yield Fault.worded("loss-unusable/masked tokens", LOSS, trial=trial)


@rule("loss-depends-on-cut", "warning")
def loss_depends_on_cut(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The gradient depends on how a batch is split into micro-batches."""
    tried = environment.loss
    if tried is None or (trial := tried.trial) is None or trial.nonfinite:
        return
    ranks, parts = _cut(config)
    shown = {"more padding": trial.padding}
    if ranks > 1:
        shown["two ranks"] = trial.ranks
    if parts != 1:
        shown |= {f"{cut} micro-batches": size for cut, size in trial.cuts.items()}
    if not (shown := {name: size for name, size in shown.items() if size > DEPENDS}):
        return
    large = parts != 1 and max(shown.values()) > (LARGE_OF_DRAWS if trial.random else LARGE)
    severity: Severity = "error" if large else "warning"
    means = " (means over draws: it draws at random)" if trial.random else ""
    thread = f" {THREADS[name]}." if (name := OmegaConf.select(config, LOSS)) in THREADS else ""
    sizes = ", ".join(f"{size:.2g} ({name})" for name, size in shown.items())
    whose = "known loss" if _of_host(tried) else "own loss"
    yield Fault.worded(f"loss-depends-on-cut/{whose}", LOSS, severity=severity, sizes=sizes, means=means, thread=thread)


@rule("loss-ignores-setting")
def loss_ignores_weights(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Importance weights are computed, but change nothing."""
    if environment.loss is not None and environment.loss.ignores_weights:
        yield Fault.worded("loss-ignores-setting", WEIGHTS, loss=OmegaConf.select(config, LOSS))


@rule("loss-unlike-paper", "warning")
def loss_unlike_paper(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's defaults are those of PPO, whatever the loss."""
    name, actor = OmegaConf.select(config, LOSS), config.actor_rollout_ref.actor
    chosen = "estimator" in (OmegaConf.select(config, "hydra.runtime.choices") or {}) and name.startswith("vp_")
    others = environment.loss is not None and environment.loss.owner and not _of_host(environment.loss)
    if chosen or others:  # a preset has the paper's values; a user's own loss has its own paper
        return
    for paper in table_of(__file__, "papers.yaml"):
        unlike = list(_unlike(paper["settings"], actor)) if name in paper["losses"] else []
        if unlike:
            has = ", ".join(f"{setting}={value}" for setting, value, _ in unlike)
            meant = " ".join(f"{ACTOR}.{setting}={papers}" for setting, _, papers in unlike)
            problem = f"with {has} this is not {paper['called']} as published: {paper['effect']}"
            allowed = f"{', '.join(f'{setting}={papers}' for setting, _, papers in unlike)} ({paper['source']})"
            remedy = f"Add {meant}" + (", or choose estimator=gspo." if name == "gspo" else ".")
            yield Fault(f"{ACTOR}.{unlike[0][0]}", problem, allowed, remedy)


def _unlike(settings: list[list[Any]], actor: DictConfig) -> Iterator[tuple[str, object, object]]:
    """Yield name, value and the paper's value of each setting that is not the paper's."""
    for setting, *accepted, papers in settings:
        value = OmegaConf.select(actor, setting)
        if value is None and setting.startswith("clip_ratio_"):
            value = actor.clip_ratio
        fits = value in accepted[0] if isinstance(accepted[0], list) else accepted[0] <= float(value) <= accepted[1]
        if not fits:
            yield setting, value, papers


def _of_host(tried: TriedLoss) -> bool:
    """Return whether the loss is verl's or this package's."""
    return tried.owner.startswith(("verl.", "verl_precision."))


def _cut(config: DictConfig) -> tuple[int, int | None]:
    """Return the data-parallel ranks, and the micro-batches of an update on one rank; None: it depends on lengths."""
    actor, engine = config.actor_rollout_ref.actor, engines(config)[0]
    split = engine.ulysses[1]
    for of_megatron in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        split *= int(engine.node.get(of_megatron) or 1)
    ranks = max(config.trainer.nnodes * config.trainer.n_gpus_per_node // split, 1)
    rows = max(actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n // ranks, 1)
    if actor.use_dynamic_bsz:
        longest = config.data.max_prompt_length + config.data.max_response_length
        return ranks, 1 if rows * longest <= actor.ppo_max_token_len_per_gpu * engine.ulysses[1] else None
    of_all = actor.get("ppo_micro_batch_size")
    size = actor.get("ppo_micro_batch_size_per_gpu") or (of_all // ranks if of_all else rows)
    return ranks, -(-rows // max(size, 1))
