"""The Hydra groups of this package, and the search path that lets Hydra find them.

Each preset is a small YAML file with changes to verl's `ppo_trainer` (docs/options.md lists the presets). `parts/` has
files that several presets include by their defaults list; every preset includes `checked`. A new preset is one new file
in its group: Hydra and `preset_names` find the file, and the tests try the preset with every recipe.
With the plugin loaded, presets also work on your own config: `python -m verl.trainer.main_ppo ... +precision=fp16`.
"""

from pathlib import Path

PRESETS_DIR = Path(__file__).parent


def preset_names(group: str) -> list[str]:
    """Return the names of the presets in a group, sorted."""
    return sorted(path.stem for path in (PRESETS_DIR / group).glob("*.yaml"))


def preset_groups() -> list[str]:
    """Return the groups from which a user chooses a preset, sorted."""
    return sorted({path.parent.name for path in PRESETS_DIR.glob("*/*.yaml")} - {"parts"})
