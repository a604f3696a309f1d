"""Known situations: what each metric and alarm must say, by the table of tests/mismatch/situations.md.

Each row is a run of some steps: a config of verl's, verl's own losses, rejection, metrics and their aggregators, the
measuring trainer's own saving and judging in verl's order, and log-probs made up with a known gap. Only the store of
the batch (TransferQueue, which needs Ray) is a dictionary, and verl's part of a checkpoint is an empty folder.
"""

import fnmatch
import functools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import monitored
import pytest
import torch
from composer import actor_config, compose_estimator
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask as correct
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict

from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.engine.shadow import OF_SHADOW
from verl_precision.integration.engine.measurement import REQUEST, VERSIONS_BEHIND, measure
from verl_precision.integration.resolvers import run_name
from verl_precision.integration.trainer.merged_metrics import statistics_kept
from verl_precision.tools.actions.rescue import Action, Remedy

RESPONSES, TOKENS = 16, 32
CORRECTION = "algorithm.rollout_correction"
BYPASS = f"{CORRECTION}.bypass_mode=True"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
SHADOW = "actor_rollout_ref.actor.fsdp_config.shadow"
FROM_SHADOW = f"{SHADOW}.ratio_source=shadow"
VANILLA = f"{LOSS}=vanilla"
NEVER_BELOW = (VANILLA, "actor_rollout_ref.actor.clip_ratio_low=10.0")
REJECTED = (f"{CORRECTION}.rollout_rs=token_k2", f"{CORRECTION}.rollout_rs_threshold=0.002")
CORRECTED = ("old_log_probs", "rollout_log_probs", "response_mask")
# Beyond PPO's clip range on one token in nine, as BF16 does on models with rough weights; and FP16's.
BF16, FP16 = 0.15, 1.8e-4
PAGE = Path(__file__).with_name("situations.md").read_text()
# A run in words, conditions on the metrics of its last step, and all alarms that are raised.
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][1:]


@dataclass(frozen=True)
class Situation:
    """The settings of a run."""

    estimator: str = "grpo"  # preset
    changes: tuple[str, ...] = ()  # more settings
    gap: float = BF16  # spread of log π - log μ of responses of the current version, nats
    growth: float = 1.0  # factor of the gap a step, from step 10 on
    stale: float = 0.0  # spread that each version behind adds to the gap at full learning rate, reached at step 60
    behind: tuple[int, ...] = (0,)  # versions behind of the responses in turn
    broken: str = ""  # the engine that gives NaN for a share of its tokens
    share: float = 0.01
    sync_step: int = 1  # updates between two weight syncs
    empty: bool = False  # whether the second mini-batch of each update has no valid token
    far: float = 0.0  # nats by which the trainer's log-probs of the first response are below the rollout's
    # Whether each step starts anew, from the checkpoint of the one before, which verl saves before it has metrics.
    resumed: bool = False
    steps: int = 6


NAN_WEIGHTS = Situation("icepop", gap=FP16, broken="rollout", share=1.0, steps=3)
UNDERFLOW = Situation("grpo_seq_mis", gap=FP16, far=120.0)
WARM_UP = Situation(gap=0.014, stale=0.04, behind=(0, 1, 0, 2), steps=70)
DRIFT = replace(WARM_UP, changes=("mismatch.alarm.baseline_steps=8",), gap=FP16, growth=1.15, stale=0.03, steps=35)
DIFFERENT_WEIGHTS = Situation("pg_seq_is", gap=2.0)
SITUATIONS = {
    "FP16 on both sides, decoupled": Situation(gap=FP16),
    "large gap, `grpo`, decoupled: the ratio is 1": Situation(),
    "the same, `ratio_one`": Situation("ratio_one"),
    "the same, verl's `vanilla`": Situation(changes=(VANILLA,)),
    "the same, with `clip_ratio_low=10`": Situation(changes=NEVER_BELOW),
    "FP16's gap, GSPO, decoupled: its range of 3e-4 is for responses": Situation("gspo", gap=FP16),
    "FP16's gap, GSPO, bypass: rounding cancels over a response": Situation("gspo", (BYPASS,), FP16),
    "large gap, GSPO, bypass": Situation("gspo", (BYPASS,)),
    "large gap, `grpo`, bypass, no shadow: the rollout stands for one": Situation(changes=(BYPASS,)),
    "the same, verl's `vanilla`, with `clip_ratio_low=10` (never below)": Situation(changes=(BYPASS, *NEVER_BELOW)),
    "large gap, bypass, a shadow": Situation(changes=(BYPASS, f"{SHADOW}.every_n_steps=1")),
    "the same, `ratio_source=shadow`": Situation(changes=(BYPASS, FROM_SHADOW)),
    "`ratio_source=shadow`, decoupled: the old log-probs are the shadow's": Situation(changes=(FROM_SHADOW,)),
    "large gap, `pg_seq_is`: no clip": Situation("pg_seq_is"),
    "large gap, `grpo_unclipped`, bypass": Situation(changes=(BYPASS, f"{LOSS}=vp_grpo_unclipped")),
    "1% of the trainer's log-probs are NaN, decoupled": Situation(gap=FP16, broken="trainer", steps=3),
    "1% of the rollout's are, decoupled": Situation(gap=FP16, broken="rollout", steps=3),
    "1% of the rollout's are, bypass": Situation("pg_seq_is", gap=FP16, broken="rollout", steps=3),
    "all of the trainer's log-probs are NaN, `icepop`: a gradient of zero": replace(NAN_WEIGHTS, broken="trainer"),
    "all of the rollout's are, `icepop`": NAN_WEIGHTS,
    "verl's `rollout_rs` rejects most tokens: the gap is that before": Situation(changes=REJECTED),
    "`trm` rejects most responses": Situation("trm", gap=0.5),
    "one response of 16 has a weight that underflows, and none is beyond C": UNDERFLOW,
    "four updates between two syncs: sums, whatever verl makes of names": Situation(sync_step=4),
    "the same, bypass: after an update no response is current": Situation("pg_seq_is", sync_step=4),
    "a mini-batch without a valid token": Situation("pg_seq_is", empty=True),
    "healthy asynchronous warm-up: half of the responses are behind, and the learning rate grows": WARM_UP,
    "the same, bypass": replace(WARM_UP, estimator="pg_seq_is"),
    "an asynchronous run whose precision drifts": DRIFT,
    "trainer and rollout have different weights": DIFFERENT_WEIGHTS,
    "the same, resumed after every step": replace(DIFFERENT_WEIGHTS, resumed=True),
    "`algorithm.rollout_correction=null`: off, to rules and run names too": Situation(changes=(f"{CORRECTION}=null",)),
}


def nested(rows_BT: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows_BT), layout=torch.jagged)


def batch_of(situation: Situation, step: int, config, generator):
    """Return a batch, and what the training forward and the shadow give for it."""
    normal = functools.partial(torch.randn, RESPONSES, TOKENS, generator=generator)
    behind = [situation.behind[row % len(situation.behind)] for row in range(RESPONSES)]
    learned = situation.stale * min(step / 60, 1) * torch.tensor(behind).unsqueeze(-1) * normal()
    gap = situation.gap * situation.growth ** max(step - 10, 0)
    rollout = -4 - 3 * torch.rand(RESPONSES, TOKENS, generator=generator)
    shadow = rollout + learned
    trainer = (shadow + gap * normal()).clamp(max=0)
    trainer[0] -= situation.far / TOKENS
    if situation.broken:
        bad = torch.randperm(RESPONSES * TOKENS, generator=generator)[: math.ceil(situation.share * RESPONSES * TOKENS)]
        {"trainer": trainer, "rollout": rollout}[situation.broken].view(-1)[bad] = torch.nan
    ratio_from_shadow = OmegaConf.select(config, f"{SHADOW}.ratio_source") == "shadow"
    bypass = OmegaConf.select(config, BYPASS.partition("=")[0])
    rows = monitored.Queue(
        rollout_log_probs=rollout,
        old_log_probs=rollout if bypass else shadow if ratio_from_shadow else trainer,
        response_mask=torch.ones(RESPONSES, TOKENS, dtype=torch.int64),
        advantages=torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(RESPONSES // 4).unsqueeze(-1).expand(-1, TOKENS),
    )
    tags = [{"min_global_steps": step - 1 - k} for k in behind]
    keys = [f"uid_{row}_0" for row in range(RESPONSES)]
    batch = SimpleNamespace(rows=rows, keys=keys, tags=tags, partition_id="train", extra_info={}, fields=None)
    return batch, trainer, shadow


def update_of_verl(situation: Situation, config, batch, trainer: torch.Tensor, shadow: torch.Tensor) -> dict:
    """One update as verl makes it, of one mini-batch of two micro-batches, or of two; the first is measured."""
    size = RESPONSES // (1 + situation.empty)
    actor = actor_config(config, dp_size=1, batch_num_tokens=size * TOKENS, global_batch_size=size)
    loss, settings = get_policy_loss_fn(actor.policy_loss.loss_mode), OmegaConf.select(config, SHADOW) or {}
    from_shadow = settings.get("ratio_source") == "shadow"
    has_shadow = from_shadow or (settings.get("every_n_steps") or 0) > 0
    options = {"loss_agg_mode": actor.loss_agg_mode, "config": actor}
    output: dict = {}
    for number, mini_batch in enumerate(torch.arange(RESPONSES).split(size)):
        reported: dict = {}
        for rows in mini_batch.split(size // 2):
            part = {name: tensor[rows] for name, tensor in batch.rows.items()}
            if number and situation.empty:
                part["response_mask"] = torch.zeros_like(part["response_mask"])
            found = {}
            if number == 0 and REQUEST in batch.extra_info:
                data = {name: tensor if name == VERSIONS_BEHIND else nested(tensor) for name, tensor in part.items()}
                lengths = {"prompts": 1, "responses": TOKENS}
                data |= {name: nested(torch.ones(len(rows), length)) for name, length in lengths.items()}
                # the engine gives prompt and response, shifted by one
                whole, ghost = (nested(torch.cat([x[rows], torch.zeros(len(rows), 1)], -1)) for x in (trainer, shadow))
                data = tu.get_tensordict(data, {})
                output_of_model = {"log_probs": whole} | ({OF_SHADOW: ghost} if has_shadow else {})
                found = measure(batch.extra_info[REQUEST], output_of_model, data)
            log_prob = (shadow if from_shadow else trainer)[rows].clone().requires_grad_()
            given = {"advantages": part["advantages"], "response_mask": part["response_mask"].bool(), **options}
            given["rollout_is_weights"] = part.get("rollout_is_weights")
            _, metrics = loss(old_log_prob=part["old_log_probs"], log_prob=log_prob, **given)
            append_to_dict(reported, Metric.from_dict({**metrics, **found}, aggregation=AggregationType.MEAN))
        append_to_dict(output, {key: Metric.aggregate_dp([metric]) for key, metric in reported.items()})
    with statistics_kept():
        return reduce_metrics(rename_dict(output, "actor/"))


def trainer_of(config, monkeypatch, folder: Path):
    """Return a measuring trainer without workers: what verl's own would start, compute and write is left out."""
    base = TRAINER_REGISTRY["sync"]
    config.trainer.default_local_dir = str(folder)
    monkeypatch.setattr(base, "__init__", lambda self, config: setattr(self, "config", config))
    monkeypatch.setattr(base, "_compute_metrics", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(base, "_save_checkpoint", lambda self: (folder / f"global_step_{self.global_steps}").mkdir())
    monkeypatch.setattr(base, "_load_checkpoint", lambda self: None)
    trainer = TRAINER_REGISTRY["vp_sync"](config)
    trainer.logger, trainer.tokenizer = SimpleNamespace(logger={}), None
    return trainer


def run(situation: Situation, monkeypatch, folder: Path) -> tuple[dict, set[str], list[Action], str]:
    """Return the metrics of the last step, all alarms, actions that one that acts would have begun, and the verdict."""
    config = compose_estimator(situation.estimator, "+precision=bf16", f"data.max_response_length={TOKENS}")
    for path, _, value in (change.partition("=") for change in situation.changes):
        OmegaConf.update(config, path, OmegaConf.create(f"value: {value}").value, merge=False, force_add=True)
    assert run_name(config) and not [fault for fault in find_faults(config, Environment()) if fault.severity == "error"]
    trainer, raised, metrics = trainer_of(config, monkeypatch, folder), set(), {}
    remedy, begun = Remedy(monitored.trainer_of({"mismatch": {"alarm": {"on_alarm": "rescue"}}})), []
    generator = torch.Generator().manual_seed(1)
    correction = OmegaConf.select(config, CORRECTION) or {}
    options = {key: value for key, value in correction.items() if key not in ("bypass_mode", "loss_type")}
    for step in range(1, situation.steps + 1):
        monitor, trainer.global_steps = trainer.monitor, step
        aggregator = MetricsAggregator()
        for number in range(situation.sync_step):
            batch, log_probs, shadow = batch_of(situation, step, config, generator)
            monkeypatch.setattr("transfer_queue.kv_batch_get", batch.rows.get)
            monkeypatch.setattr("transfer_queue.kv_batch_put", batch.rows.put)
            monitor.remember_mask(batch)
            rows = batch.rows
            corrected: dict = {}
            if not correction.get("bypass_mode"):
                weights, rows["response_mask"], corrected = correct(*(rows[name] for name in CORRECTED), **options)
                rows |= {} if weights is None else dict(weights.batch.items())
            monitor.measure_in_driver(batch, step)
            monitor.ask_the_worker(batch, step, number)
            update = update_of_verl(situation, config, batch, log_probs, shadow)
            monitor.take_from_the_worker(update)
            aggregator.add_step_metrics(update, sample_count=RESPONSES)
        metrics = aggregator.get_aggregated_metrics() | corrected
        if situation.resumed:
            trainer._save_checkpoint()
        trainer._compute_metrics(batch, metrics, {}, global_steps=step, epoch=0)
        raised |= set(monitor.alarm.active)
        begun.append(remedy.decide(step, monitor.alarm.active_since))
        if situation.resumed:
            trainer = trainer_of(config, monkeypatch, folder)
            trainer.global_steps = step
            trainer._load_checkpoint()
    if "actor/clip_fraction_high" in metrics:
        metrics["actor/clip_fraction"] = metrics["actor/clip_fraction_high"] + metrics["actor/clip_fraction_low"]
    return metrics, raised, [action for action in begun if action is not None], monitor.mismatch.judge.verdict().word


def holds(condition: str, metrics: dict) -> bool:
    """Tell whether "`name` absent", or "`name` = value" (also < and >), is so; the value may be a metric."""
    name, relation, right = re.fullmatch(r"`(\S+)` (absent|[<>=])(?: (.+))?", condition).groups()
    if relation == "absent":
        return not fnmatch.filter(metrics, name)
    value = metrics[right.strip("`")] if right.startswith("`") else float(right)
    if relation == "=":
        return metrics[name] == pytest.approx(value, abs=1e-9, rel=1e-6)
    return metrics[name] < value if relation == "<" else metrics[name] > value


@pytest.mark.parametrize(("words", "says", "alarms", "verdict"), ROWS, ids=[words for words, *_ in ROWS])
def test_what_is_said(words, says, alarms, verdict, monkeypatch, tmp_path):
    metrics, raised, begun, word = run(SITUATIONS[words], monkeypatch, tmp_path)
    assert [condition for condition in says.split("; ") if not holds(condition, metrics)] == []
    assert ((", ".join(sorted(raised)) or "none"), word) == (alarms, verdict)
    drifts = "gap_growth" in raised
    assert [action.alarm for action in begun] == ["k3_growth"] * drifts, "the others' alarms are faults, or too short"


def test_the_page_has_one_row_for_each_run():
    assert [words for words, *_ in ROWS] == list(SITUATIONS)
