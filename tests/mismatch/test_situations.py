"""Known situations: what each metric and alarm must say. docs/alarm.md shows this table.

Each row is a run of some steps: a config of verl's, verl's own losses, rejection, metrics and their aggregators, the
measuring trainer's own saving and judging in verl's order, and log-probs made up with a known gap. Only the store of
the batch (TransferQueue, which needs Ray) is a dictionary, and verl's part of a checkpoint is an empty folder.
"""

import fnmatch
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from composer import actor_config, compose_estimator
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY
from verl.trainer.ppo.v1.utils import MetricsAggregator
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric, reduce_metrics
from verl.utils.py_functional import append_to_dict, rename_dict

from verl_precision.base.seeds import response_seed
from verl_precision.check.rules.registry import find_faults
from verl_precision.check.rules.rule import Environment
from verl_precision.integration.engine.measurement import REQUEST, VERSIONS_BEHIND, measure
from verl_precision.integration.resolvers import run_name
from verl_precision.integration.trainer.merged_metrics import statistics_kept
from verl_precision.integration.trainer.session_advantages import advantages_by_session

RESPONSES, TOKENS = 16, 32
BYPASS = "algorithm.rollout_correction.bypass_mode=True"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
SHADOW = "actor_rollout_ref.actor.fsdp_config.shadow"
REJECTION = (
    "algorithm.rollout_correction.rollout_rs=token_k2",
    "algorithm.rollout_correction.rollout_rs_threshold=0.002",
)
CORRECTIONS = ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
# Beyond PPO's clip range on one token in nine, as BF16 does on models with rough weights; and FP16's.
BF16, FP16 = 0.15, 1.8e-4


@dataclass(frozen=True)
class Situation:
    """A run, and what is to be said about its last step.

    Attributes:
        words: The run.
        says: Conditions on metrics, in words that the test understands.
        alarms: All that are raised.
        estimator: Preset.
        changes: More settings.
        gap: Spread of log π - log μ of responses of the current version, nats.
        growth: Factor of the gap a step, from step 10 on.
        stale: Spread that each version behind adds to the gap at full learning rate, reached at step 60.
        behind: Versions behind of the responses in turn.
        broken: The engine that gives NaN for 1% of its tokens.
        sync_step: Updates between two weight syncs.
        empty: Whether the second mini-batch of each update has no valid token.
        far: Nats by which the trainer's log-probs of the first response are below the rollout's.
        resumed: Whether each step is a new start, from the checkpoint of the one before, which verl saves before the
            step has metrics.
        sessions: Outputs of each session of an agent loop, of two prompts; the second and the last have reward 1.
        steps: Of the run.
    """

    words: str
    says: str
    alarms: str = ""
    estimator: str = "grpo"
    changes: tuple[str, ...] = ()
    gap: float = BF16
    growth: float = 1.0
    stale: float = 0.0
    behind: tuple[int, ...] = (0,)
    broken: str = ""
    sync_step: int = 1
    empty: bool = False
    far: float = 0.0
    resumed: bool = False
    sessions: tuple[int, ...] = ()
    steps: int = 6


PHANTOM = "phantom_clipping"
NOT_MEASURED = "`phantom/*fraction` absent"
CLIPPED = "`phantom/clipped_fraction` = `actor/clip_fraction`"
PHANTOM_CLIPPED = "`phantom/phantom_clipped_fraction`"
SITUATIONS = [
    Situation(
        "FP16 on both sides, decoupled",
        f"`mismatch/k3_kl` < 1e-7; `phantom/beta_abs_mean` < 2e-4; {NOT_MEASURED}",
        gap=FP16,
    ),
    Situation(
        "large gap, `grpo`, decoupled: the ratio is 1",
        f"`actor/clip_fraction_high` = 0; `phantom/beta_abs_mean` > 0.1; {NOT_MEASURED}",
    ),
    Situation("the same, `ratio_one`", f"`phantom/beta_abs_mean` > 0.1; {NOT_MEASURED}", estimator="ratio_one"),
    Situation("the same, verl's `vanilla`", f"`actor/pg_clipfrac` = 0; {NOT_MEASURED}", changes=(f"{LOSS}=vanilla",)),
    Situation(
        "the same, with `clip_ratio_low=10`",
        "`mismatch/tokens` = 512; `mismatch/failed_measurements` = 0",
        changes=(f"{LOSS}=vanilla", "actor_rollout_ref.actor.clip_ratio_low=10.0"),
    ),
    Situation(
        "FP16's gap, GSPO, decoupled: its range of 3e-4 is for responses",
        f"`actor/clip_fraction_high` = 0; {NOT_MEASURED}",
        estimator="gspo",
        gap=FP16,
    ),
    Situation(
        "FP16's gap, GSPO, bypass: rounding cancels over a response",
        f"{CLIPPED}; {PHANTOM_CLIPPED} = 0",
        estimator="gspo",
        changes=(BYPASS,),
        gap=FP16,
    ),
    Situation(
        "large gap, GSPO, bypass",
        f"{CLIPPED}; {PHANTOM_CLIPPED} > 0.3",
        PHANTOM,
        estimator="gspo",
        changes=(BYPASS,),
    ),
    Situation(
        "large gap, `grpo`, bypass, no shadow: the rollout stands for one",
        f"{CLIPPED}; {PHANTOM_CLIPPED} > 0.03; `phantom/alpha_abs_mean` = 0",
        PHANTOM,
        changes=(BYPASS,),
    ),
    Situation(
        "the same, verl's `vanilla`, with `clip_ratio_low=10` (never below)",
        "`phantom/clipped_fraction` = `actor/pg_clipfrac`; "
        f"{PHANTOM_CLIPPED} > 0.01; `mismatch/failed_measurements` = 0",
        PHANTOM,
        changes=(BYPASS, f"{LOSS}=vanilla", "actor_rollout_ref.actor.clip_ratio_low=10.0"),
    ),
    Situation(
        "large gap, bypass, a shadow",
        f"{CLIPPED}; {PHANTOM_CLIPPED} > 0.03; `phantom/beta_abs_mean` > 0.1",
        PHANTOM,
        changes=(BYPASS, f"{SHADOW}.every_n_steps=1"),
    ),
    Situation(
        "the same, `ratio_source=shadow`",
        f"{CLIPPED}; `phantom/clipped_fraction` = 0; `phantom/avoided_fraction` > 0.03; {PHANTOM_CLIPPED} absent",
        changes=(BYPASS, f"{SHADOW}.ratio_source=shadow"),
    ),
    Situation(
        "`ratio_source=shadow`, decoupled: the old log-probs are the shadow's",
        f"`mismatch/log_prob_gap_abs_mean` > 0.1; `phantom/beta_abs_mean` > 0.1; {NOT_MEASURED}",
        changes=(f"{SHADOW}.ratio_source=shadow",),
    ),
    Situation(
        "large gap, `pg_seq_is`: no clip",
        f"`phantom/beta_abs_mean` > 0.1; {NOT_MEASURED}",
        estimator="pg_seq_is",
    ),
    Situation(
        "large gap, `grpo_unclipped`, bypass",
        f"`phantom/beta_abs_mean` > 0.1; {NOT_MEASURED}",
        changes=(BYPASS, f"{LOSS}=vp_grpo_unclipped"),
    ),
    Situation(
        "1% of the trainer's log-probs are NaN, decoupled",
        "`mismatch/nonfinite_trainer_tokens` = 6; `mismatch/nonfinite_rollout_tokens` = 0",
        "responses_not_finite, trainer_not_finite",
        gap=FP16,
        broken="trainer",
        steps=3,
    ),
    Situation(
        "1% of the rollout's are, decoupled",
        "`mismatch/nonfinite_trainer_tokens` = 0; `mismatch/nonfinite_rollout_tokens` = 6",
        "rollout_not_finite",
        gap=FP16,
        broken="rollout",
        steps=3,
    ),
    Situation(
        "1% of the rollout's are, bypass",
        "`mismatch/nonfinite_trainer_tokens` = 0; `mismatch/nonfinite_rollout_tokens` = 6; "
        "`actor/nonfinite_responses` > 0",
        "responses_not_finite, rollout_not_finite",
        estimator="pg_seq_is",
        gap=FP16,
        broken="rollout",
        steps=3,
    ),
    Situation(
        "verl's `rollout_rs` rejects most tokens: the gap is that before",
        "`mismatch/tokens` = 512; `mismatch/k3_kl` > 0.009",
        changes=REJECTION,
    ),
    Situation(
        "one response of 16 has a weight that underflows, and none is beyond C",
        "`rollout_corr/rollout_is_beyond_fraction` = 0; `mismatch/sequence_log_ratio_min` < -119",
        estimator="grpo_seq_mis",
        gap=FP16,
        far=120.0,
    ),
    Situation(
        "`rloo`, an agent loop whose sessions return 1, 3, 2 and 2 outputs: each counts once",
        "`critic/advantages/max` > 0.66; `critic/advantages/max` < 0.67; `critic/advantages/min` < -0.66",
        sessions=(1, 3, 2, 2),
    ),
    Situation(
        "four updates between two syncs: sums, whatever verl makes of names",
        "`mismatch/tokens` = 2048; `mismatch/total_variation` > 0.05; `mismatch/total_variation` < 0.07; "
        "`mismatch/sequence_ess` < 64",
        sync_step=4,
    ),
    Situation(
        "the same, bypass: after an update no response is current",
        "`mismatch/tokens` = 2048; `mismatch/stale_fraction` = 0.75; `mismatch/behind_1/tokens` = 1536; "
        "`phantom/tokens` = 512",
        estimator="pg_seq_is",
        sync_step=4,
    ),
    Situation(
        "a mini-batch without a valid token",
        "`actor/is_weight_mean` > 0.9; `actor/is_weight_ess_fraction` > 0.3",
        estimator="pg_seq_is",
        empty=True,
    ),
    Situation(
        "healthy asynchronous warm-up: half of the responses are behind, and the learning rate grows",
        "`mismatch/k3_kl` > 8e-4; `mismatch/behind_0/k3_kl` < 2e-4; `mismatch/behind_1/k3_kl` > 7e-4; "
        "`mismatch/stale_fraction` = 0.5; `phantom/tokens` = 256",
        gap=0.014,
        stale=0.04,
        behind=(0, 1, 0, 2),
        steps=70,
    ),
    Situation(
        "the same, bypass",
        "`mismatch/k3_kl` > 8e-4; `mismatch/behind_0/k3_kl` < 2e-4; `mismatch/stale_fraction` = 0.5",
        estimator="pg_seq_is",
        gap=0.014,
        stale=0.04,
        behind=(0, 1, 0, 2),
        steps=70,
    ),
    Situation(
        "an asynchronous run whose precision drifts",
        "`mismatch/behind_0/k3_kl` > 1e-6",
        "gap_growth, k3_growth",
        changes=("mismatch.alarm.baseline_steps=8",),
        gap=FP16,
        growth=1.15,
        stale=0.03,
        behind=(0, 1, 0, 2),
        steps=35,
    ),
    Situation(
        "trainer and rollout have different weights",
        "`mismatch/log_prob_gap_abs_mean` > 1",
        "extreme_prob_gap, low_effective_sample_size, policies_differ",
        estimator="pg_seq_is",
        gap=2.0,
    ),
    Situation(
        "the same, resumed after every step",
        "`mismatch/log_prob_gap_abs_mean` > 1",
        "extreme_prob_gap, low_effective_sample_size, policies_differ",
        estimator="pg_seq_is",
        gap=2.0,
        resumed=True,
    ),
    Situation(
        "`algorithm.rollout_correction=null`: off, to rules and run names too",
        "`mismatch/tokens` = 512; `mismatch/failed_measurements` = 0",
        changes=("algorithm.rollout_correction=null",),
    ),
]


@dataclass
class Store:
    """A batch in the driver's hand, and in the place of TransferQueue."""

    rows: dict[str, torch.Tensor]
    tags: list[dict]
    extra_info: dict = field(default_factory=dict)
    partition_id: str = "train"
    fields: list | None = None

    @property
    def keys(self) -> list[str]:
        return [f"uid_{row}_0" for row in range(len(self.tags))]

    def get(self, keys, partition_id, select_fields):
        return TensorDict({name: nested(self.rows[name]) for name in select_fields}, batch_size=len(keys))

    def put(self, keys, partition_id, fields):
        self.rows |= dict(fields.items())
        return self


def nested(rows_BT: torch.Tensor) -> torch.Tensor:
    return torch.nested.as_nested_tensor(list(rows_BT), layout=torch.jagged)


def batch_of(
    situation: Situation, step: int, config, generator: torch.Generator
) -> tuple[Store, torch.Tensor, torch.Tensor]:
    """Return a batch, and what the training forward and the shadow give for it."""

    def normal() -> torch.Tensor:
        return torch.randn(RESPONSES, TOKENS, generator=generator)

    behind = [situation.behind[row % len(situation.behind)] for row in range(RESPONSES)]
    learned = situation.stale * min(step / 60, 1) * torch.tensor(behind).unsqueeze(-1) * normal()
    gap = situation.gap * situation.growth ** max(step - 10, 0)
    rollout = -4 - 3 * torch.rand(RESPONSES, TOKENS, generator=generator)
    shadow = rollout + learned
    trainer = (shadow + gap * normal()).clamp(max=0)
    trainer[0] -= situation.far / TOKENS
    if situation.broken:
        bad = torch.randperm(RESPONSES * TOKENS, generator=generator)[: math.ceil(0.01 * RESPONSES * TOKENS)]
        {"trainer": trainer, "rollout": rollout}[situation.broken].view(-1)[bad] = torch.nan
    ratio_from_shadow = OmegaConf.select(config, f"{SHADOW}.ratio_source") == "shadow"
    bypass = OmegaConf.select(config, BYPASS.partition("=")[0])
    rows = {
        "rollout_log_probs": rollout,
        "old_log_probs": rollout if bypass else shadow if ratio_from_shadow else trainer,
        "response_mask": torch.ones(RESPONSES, TOKENS, dtype=torch.int64),
        "advantages": torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(RESPONSES // 4).unsqueeze(-1).expand(-1, TOKENS),
    }
    return Store(rows, [{"min_global_steps": step - 1 - k} for k in behind]), trainer, shadow


def update_of_verl(situation: Situation, config, batch: Store, trainer: torch.Tensor, shadow: torch.Tensor) -> dict:
    """One update as verl makes it, of one mini-batch of two micro-batches, or of two; the first is measured."""
    size = RESPONSES // (1 + situation.empty)
    actor = actor_config(config, dp_size=1, batch_num_tokens=size * TOKENS, global_batch_size=size)
    loss, settings = get_policy_loss_fn(actor.policy_loss.loss_mode), OmegaConf.select(config, SHADOW) or {}
    from_shadow = settings.get("ratio_source") == "shadow"
    has_shadow = from_shadow or (settings.get("every_n_steps") or 0) > 0
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
                data |= {
                    "prompts": nested(torch.ones(len(rows), 1)),
                    "responses": nested(torch.ones(len(rows), TOKENS)),
                }
                # the engine gives prompt and response, shifted by one
                whole, ghost = (nested(torch.cat([x[rows], torch.zeros(len(rows), 1)], -1)) for x in (trainer, shadow))
                data = tu.get_tensordict(data, {})
                found = measure(batch.extra_info[REQUEST], ghost if has_shadow else None, {"log_probs": whole}, data)
            _, metrics = loss(
                old_log_prob=part["old_log_probs"],
                log_prob=(shadow if from_shadow else trainer)[rows].clone().requires_grad_(),
                advantages=part["advantages"],
                response_mask=part["response_mask"].bool(),
                loss_agg_mode=actor.loss_agg_mode,
                config=actor,
            )
            append_to_dict(reported, Metric.from_dict({**metrics, **found}, aggregation=AggregationType.MEAN))
        append_to_dict(output, {key: Metric.aggregate_dp([metric]) for key, metric in reported.items()})
    with statistics_kept():
        return reduce_metrics(rename_dict(output, "actor/"))


def advantages_of(sessions: tuple[int, ...]) -> torch.Tensor:
    """Return what verl's trainer computes with `rloo`; keys are those of TransferQueue."""
    keys = [
        f"{prompt}_{session}_{output}" for prompt in "ab" for session, n in enumerate(sessions) for output in range(n)
    ]
    rewards = torch.tensor([float(key.split("_")[1] in "13") for key in keys])
    data = DataProto.from_dict(
        tensors={
            "token_level_rewards": torch.nn.functional.pad(rewards.unsqueeze(-1), (TOKENS - 1, 0)),
            "response_mask": torch.ones(RESPONSES, TOKENS),
        },
        non_tensors={"uid": np.array([key[0] for key in keys], dtype=object)},
    )
    with advantages_by_session():
        data = trainer_base.compute_advantage_for_multi_trajectories(
            data,
            batch_keys=keys,
            adv_estimator="rloo",
            num_repeat=len(sessions),
            norm_adv_by_std_in_grpo=False,
            config={},
        )
    return data.batch["advantages"]


def trainer_of(config, monkeypatch, folder: Path):
    """Return a measuring trainer without workers: what verl's own would start, compute and write is left out."""
    base = TRAINER_REGISTRY["sync"]
    config.trainer.default_local_dir = str(folder)
    monkeypatch.setattr(base, "__init__", lambda self, config: setattr(self, "config", config))
    monkeypatch.setattr(base, "_compute_metrics", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(base, "_save_checkpoint", lambda self: (folder / f"global_step_{self.global_steps}").mkdir())
    monkeypatch.setattr(base, "_load_checkpoint", lambda self: None)
    trainer = TRAINER_REGISTRY["vp_sync"](config)
    trainer.logger = SimpleNamespace(logger={})
    return trainer


def run(situation: Situation, monkeypatch, folder: Path) -> tuple[dict, set[str]]:
    """Return the metrics of the last step, and all alarms."""
    config = compose_estimator(situation.estimator, "+precision=bf16", f"data.max_response_length={TOKENS}")
    for path, _, value in (change.partition("=") for change in situation.changes):
        OmegaConf.update(config, path, OmegaConf.create(f"value: {value}").value, merge=False, force_add=True)
    assert run_name(config) and not [fault for fault in find_faults(config, Environment()) if fault.severity == "error"]
    trainer, raised, metrics = trainer_of(config, monkeypatch, folder), set(), {}
    generator = torch.Generator().manual_seed(1)
    correction = OmegaConf.select(config, "algorithm.rollout_correction") or {}
    bypass = correction.get("bypass_mode")
    for step in range(1, situation.steps + 1):
        monitor, trainer.global_steps = trainer._monitor, step
        aggregator = MetricsAggregator()
        for number in range(situation.sync_step):
            batch, log_probs, shadow = batch_of(situation, step, config, generator)
            monkeypatch.setattr("transfer_queue.kv_batch_get", batch.get)
            monkeypatch.setattr("transfer_queue.kv_batch_put", batch.put)
            monitor.remember_mask(batch)
            if situation.sessions:
                batch.rows["advantages"] = advantages_of(situation.sessions)
            corrected: dict = {}
            if not bypass:
                _, batch.rows["response_mask"], corrected = compute_rollout_correction_and_rejection_mask(
                    batch.rows["old_log_probs"],
                    batch.rows["rollout_log_probs"],
                    batch.rows["response_mask"],
                    **{key: correction[key] for key in CORRECTIONS if correction.get(key)},
                )
            monitor.measure_in_driver(batch, step)
            monitor.ask_the_worker(batch, step, number)
            update = update_of_verl(situation, config, batch, log_probs, shadow)
            monitor.take_from_the_worker(update)
            aggregator.add_step_metrics(update, sample_count=RESPONSES)
        metrics = aggregator.get_aggregated_metrics() | corrected
        metrics |= {
            f"critic/advantages/{end}": float(getattr(batch.rows["advantages"], end)()) for end in ("min", "max")
        }
        if situation.resumed:
            trainer._save_checkpoint()
        trainer._compute_metrics(batch, metrics, {}, global_steps=step, epoch=0)
        raised |= set(monitor.alarm.active)
        if situation.resumed:
            trainer = trainer_of(config, monkeypatch, folder)
            trainer.global_steps = step
            trainer._load_checkpoint()
    if "actor/clip_fraction_high" in metrics:
        metrics["actor/clip_fraction"] = metrics["actor/clip_fraction_high"] + metrics["actor/clip_fraction_low"]
    return metrics, raised


def holds(condition: str, metrics: dict) -> bool:
    """Tell whether "`name` absent", or "`name` = value" (also < and >), is so; the value may be a metric."""
    name, relation, right = re.fullmatch(r"`(\S+)` (absent|[<>=])(?: (.+))?", condition).groups()
    if relation == "absent":
        return not fnmatch.filter(metrics, name)
    value = metrics[right.strip("`")] if right.startswith("`") else float(right)
    if relation == "=":
        return metrics[name] == pytest.approx(value, abs=1e-9, rel=1e-6)
    return metrics[name] < value if relation == "<" else metrics[name] > value


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda situation: situation.words)
def test_what_is_said(situation, monkeypatch, tmp_path):
    metrics, raised = run(situation, monkeypatch, tmp_path)
    assert {condition: holds(condition, metrics) for condition in situation.says.split("; ")} == dict.fromkeys(
        situation.says.split("; "), True
    )
    assert ", ".join(sorted(raised)) == situation.alarms


def test_the_page_shows_this_table():
    text = (Path(__file__).parents[2] / "docs" / "alarm.md").read_text()
    table = "".join(f"| {row.words} | {row.says} | {row.alarms or 'none'} |\n" for row in SITUATIONS)
    assert table in text, f"docs/alarm.md should show:\n{table}"


def test_two_seeds_share_no_sample():
    """Numbers of the offline commands: response i of one seed must not be response i + 1 of another."""
    one, other = ({response_seed(seed, "a problem", index) for index in range(40)} for seed in (0, 1))
    assert len(one) == len(other) == 40 and not one & other
