"""What trying the policy loss in force has shown (`check/loss_trial.py` calls it), and where it is not its paper's."""

from collections.abc import Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.files import table_of
from verl_precision.base.verl_config import engines
from verl_precision.check.rules.rule import RULES, Environment, Fault, Severity, TriedLoss, rule
from verl_precision.losses.invariance import DEPENDS, Trial

ACTOR = "actor_rollout_ref.actor"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
LARGE = 0.3  # from this share of the gradient on, another cut is another run
LARGE_OF_DRAWS = 1.0  # a loss that draws a share of the tokens draws at least one of a small batch
OWN_AGGREGATION = ("token-mean", "seq-mean-token-mean")  # verl's default, and that of the losses that take no other
NAMES = {"old_log_probs": "old_log_prob", "trainer_log_probs": "log_prob"}  # verl's of ours
THREADS = {"geo_mean": "verl#7913", "kl_cov": "verl#7829"}
AGGREGATE = "Aggregate with verl's agg_loss(..., **config.global_batch_info)"


@rule("loss-not-tried", "unchecked")
def loss_not_tried(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Somebody's own loss could not be called."""
    tried = environment.loss
    if tried is not None and tried.problem and not _of_host(tried):
        yield _fault(
            f"the loss was called with a small batch, and {tried.problem}. Whether it is finite, and whether its "
            "gradient depends on the micro-batches, is not known",
            "a loss that can be called as verl calls it, in a process of its own on a CPU",
            "Try it where it works: verl_precision.losses.invariance.try_loss.",
        )


@rule("loss-unusable")
def loss_unusable(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's first update ends with it."""
    tried = environment.loss
    if tried is None:
        return
    said = tried.unusable or (tried.problem if _of_host(tried) and not _is_refused(config, environment) else "")
    if said:
        allowed = "a loss that returns a scalar with a gradient, and a dictionary of metrics"
        yield _fault(f"{said}. The first update ends so", allowed, "Correct it, or the setting that its message names.")


@rule("loss-replaced")
def loss_replaced(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's registry keeps the last loss of a name."""
    tried = environment.loss
    if tried is not None and tried.replaced:
        problem = f"{tried.owner} is registered under the name of a loss of this package, and runs in its place"
        yield _fault(problem, "a name of its own, without vp_", "Register it under another name.")


@rule("loss-not-finite")
def loss_not_finite(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """NaN or inf on ordinary numbers."""
    trial = _trial(environment)
    if trial is not None and trial.nonfinite:
        yield _fault(
            f"its value or gradient is NaN or inf on an ordinary batch ({trial.nonfinite})",
            "a loss that is finite for ratios of 0.3 to 8, a response of one token, one without advantage",
            "Correct the loss, or choose another loss_mode.",
        )


@rule("loss-ignores-mask")
def loss_ignores_mask(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """Tokens that are no response's train."""
    trial = _trial(environment)
    if trial is not None and not trial.nonfinite and trial.masked > DEPENDS:
        yield _fault(
            "its gradient depends on what masked tokens hold (a tool's answers, padding): it changes by "
            f"{trial.masked:.2g} of its size",
            "a loss in which response_mask decides which tokens count",
            f"{AGGREGATE}, and take no mean without the mask.",
        )


@rule("loss-depends-on-cut", "warning")
def loss_depends_on_cut(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """The gradient of the parts is not that of the whole."""
    tried, trial = environment.loss, _trial(environment)
    if tried is None or trial is None or trial.nonfinite:
        return
    ranks, parts = _cut(config)
    shown = {"more padding": trial.padding}
    if ranks > 1:
        shown["two ranks"] = trial.ranks
    if parts != 1:
        shown |= {f"{cut} micro-batches": size for cut, size in trial.cuts.items()}
    shown = {name: size for name, size in shown.items() if size > DEPENDS}
    if not shown:
        return
    large = parts != 1 and max(shown.values()) > (LARGE_OF_DRAWS if trial.random else LARGE)
    severity: Severity = "error" if large else "warning"
    means = " (means over draws: it draws at random)" if trial.random else ""
    thread = f" {THREADS[name]}." if (name := OmegaConf.select(config, LOSS)) in THREADS else ""
    host = f"Have one micro-batch in an update, or choose another loss_mode.{thread}"
    yield _fault(
        "its gradient depends on how a batch is cut. As a share of that of the whole batch, it changes by "
        f"{', '.join(f'{size:.2g} ({name})' for name, size in shown.items())}{means}",
        "a loss that is divided by the counts of the whole mini-batch",
        host if _of_host(tried) else f"{AGGREGATE}.",
        severity,
    )


@rule("loss-changes-inputs", "warning")
def loss_changes_inputs(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl reads log-probs and mask again after the loss, for its KL and entropy terms."""
    trial = _trial(environment)
    if trial is not None and trial.changed:
        yield _fault(
            f"it writes to {', '.join(NAMES.get(name, name) for name in trial.changed)}. verl's KL and entropy terms "
            "read log_prob and response_mask after it",
            "a loss that leaves its arguments as they are",
            "Write to a clone.",
        )


@rule("loss-ignores-setting", "warning")
def loss_ignores_setting(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """What was asked for changes nothing."""
    for setting in environment.loss.ignored if environment.loss is not None else ():
        weights = setting != f"{ACTOR}.loss_agg_mode"
        if not weights and OmegaConf.select(config, setting) in OWN_AGGREGATION:
            continue
        yield Fault(
            setting=setting, severity="error" if weights else "warning",
            problem=f"loss_mode={OmegaConf.select(config, LOSS)} does not depend on it"
            + (": importance weights are computed, and the loss does not apply them" if weights else ""),
            allowed="null, or a loss that applies rollout_is_weights" if weights else " or ".join(OWN_AGGREGATION),
            remedy="Leave it out, or choose another loss_mode.",
        )  # fmt: skip


@rule("loss-unlike-paper", "warning")
def loss_unlike_paper(config: DictConfig, environment: Environment) -> Iterator[Fault]:
    """verl's defaults are those of PPO, whatever the loss."""
    name, actor = OmegaConf.select(config, LOSS), config.actor_rollout_ref.actor
    chosen = "estimator" in (OmegaConf.select(config, "hydra.runtime.choices") or {}) and name.startswith("vp_")
    others = environment.loss is not None and environment.loss.owner and not _of_host(environment.loss)
    if chosen or others:  # a preset has the paper's; somebody else's loss has a paper of its own
        return
    for paper in table_of(__file__, "papers.yaml"):
        unlike = list(_unlike(paper["settings"], actor)) if name in paper["losses"] else []
        if unlike:
            has = ", ".join(f"{setting}={value}" for setting, value, _ in unlike)
            meant = " ".join(f"{ACTOR}.{setting}={papers}" for setting, _, papers in unlike)
            yield Fault(
                setting=f"{ACTOR}.{unlike[0][0]}",
                problem=f"with {has} this is not {paper['called']} as published: {paper['effect']}",
                allowed=f"{', '.join(f'{setting}={papers}' for setting, _, papers in unlike)} ({paper['source']})",
                remedy=f"Add {meant}" + (", or choose estimator=gspo." if name == "gspo" else "."),
            )


def _unlike(settings: list[list[Any]], actor: DictConfig) -> Iterator[tuple[str, object, object]]:
    """Yield name, value and the paper's value of each setting that is not the paper's."""
    for setting, *accepted, papers in settings:
        value = OmegaConf.select(actor, setting)
        if value is None and setting.startswith("clip_ratio_"):
            value = actor.clip_ratio
        fits = value in accepted[0] if isinstance(accepted[0], list) else accepted[0] <= float(value) <= accepted[1]
        if not fits:
            yield setting, value, papers


def _fault(problem: str, allowed: str, remedy: str, severity: Severity | None = None) -> Fault:
    return Fault(setting=LOSS, problem=problem, allowed=allowed, remedy=remedy, severity=severity or "")


def _trial(environment: Environment) -> Trial | None:
    return None if environment.loss is None else environment.loss.trial


def _of_host(tried: TriedLoss) -> bool:
    """Whether the loss is verl's or this package's."""
    return tried.owner.startswith(("verl.", "verl_precision."))


def _is_refused(config: DictConfig, environment: Environment) -> bool:
    """Whether another rule refuses what the loss refuses."""
    untried = environment.without_loss()
    found = (fault for each in RULES for fault in each.answer(config, untried)[0])
    places = (ACTOR, "algorithm.rollout_correction")
    return any((fault.severity == "error") and fault.setting.startswith(places) for fault in found)


def _cut(config: DictConfig) -> tuple[int, int | None]:
    """Return the data-parallel ranks, and the micro-batches of an update on one; None: it depends on lengths."""
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
