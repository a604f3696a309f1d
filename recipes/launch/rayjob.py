"""Print the RayJob manifest of a recipe: python recipes/launch/rayjob.py IMAGE RECIPE.yaml [OVERRIDE ...]."""

import shlex
import sys
from pathlib import Path

import yaml

from verl_precision.integration.recipe_config import compose_recipe

MANIFEST = Path(__file__).parent / "rayjob.yaml"


def fill_in(image: str, recipe: Path, overrides: list[str]) -> dict:
    """Return the manifest with a recipe's hosts and GPUs; the containers know the recipe by the same path."""
    trainer = compose_recipe(recipe, overrides).trainer
    job = yaml.safe_load(MANIFEST.read_text())
    job["spec"]["entrypoint"] = shlex.join(
        ["env", "CLUSTER=auto", "bash", "recipes/launch/run.sh", str(recipe), *overrides]
    )
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers["replicas"] = workers["minReplicas"] = workers["maxReplicas"] = trainer.nnodes
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        container["image"] = image
    for amounts in container["resources"].values():
        amounts["nvidia.com/gpu"] = str(trainer.n_gpus_per_node)
    return job


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    print(yaml.safe_dump(fill_in(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]), sort_keys=False), end="")
