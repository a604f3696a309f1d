"""Every recipe, found on disk."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "launch")
# Their task is a tiny model's: nothing of it belongs on a GPU.
CPU_ONLY = ("quickstart", "sanity_arithmetic")
