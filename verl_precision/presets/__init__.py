"""The Hydra groups of this package, and the search path that lets Hydra find them.

A run = recipe x precision x estimator x scale. Each preset is a small YAML of differences on verl's `ppo_trainer`:

    precision/    bf16, fp16, fp32: actor, ref, critic and rollout set together
    estimator/    grpo, pg_seq_is, gspo, dapo, ...: loss, advantage, aggregation, clipping, bypass (docs/math.md)
    scale/        cpu, cpu_2nodes, 1x1_gpu: a tiny model of the same architecture through the same code path
                  1x8_a100, 1x8_h100, 2x8_h100, 8x8_h100: layout, offload and memory on GPUs (docs/scales.md)
    router_replay/ measure, rollout, old: whose choice of experts the trainer computes with (docs/options.md)
    sampling_masks/ replay: the trainer renormalises over what top-k, top-p and min-p kept (docs/options.md)
    learning_rate/ effective_sample: scaled in each update by what its weights leave of the batch (docs/math.md)
    arithmetic/   native, rounded_once, exact: what operations of both engines compute in (docs/scales.md)
    repeatable/   bitwise: the same command gives the same run (docs/options.md)
    presets/      win, yield: who wins where a word of the command says otherwise (docs/precision.md)
    parts/        what several presets include by their defaults list; `checked` is in every preset

A new preset is one new file in its group: Hydra and `preset_names` find it, and the tests try it with every recipe.
With the plugin loaded they also work on your own config: `python -m verl.trainer.main_ppo ... +precision=fp16`.
"""

from pathlib import Path

PRESETS_DIR = Path(__file__).parent


def preset_names(group: str) -> list[str]:
    """Return the names a preset group offers, sorted."""
    return sorted(path.stem for path in (PRESETS_DIR / group).glob("*.yaml"))


def preset_groups() -> list[str]:
    """Return the groups of which a user chooses a preset, sorted."""
    return sorted({path.parent.name for path in PRESETS_DIR.glob("*/*.yaml")} - {"parts"})
