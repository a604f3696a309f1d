"""The Hydra groups of this package, and the search path that lets Hydra find them.

Each preset is a small YAML of differences on verl's `ppo_trainer` (docs/options.md has their words). `parts/` is what
several include by their defaults list; `checked` is in every preset. A new preset is one new file in its group: Hydra
and `preset_names` find it, and the tests try it with every recipe.
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
