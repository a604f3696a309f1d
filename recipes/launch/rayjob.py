"""Print the RayJob manifest of a recipe: rayjob.py [--rdma NAME] IMAGE RECIPE.yaml [OVERRIDE ...]."""

import argparse
import shlex
import uuid
from pathlib import Path

import yaml

from verl_precision.base.owner import JOB_ID
from verl_precision.tools.checking.composing import compose_recipe

MANIFEST = Path(__file__).parent / "rayjob.yaml"


def fill_in(image: str, recipe: Path, overrides: list[str], rdma: str | None = None) -> dict:
    """Return the manifest with a recipe's hosts and GPUs; the recipe has the same path in the containers.

    Args:
        image: The image that every pod runs.
        recipe: The recipe's YAML.
        overrides: Hydra overrides.
        rdma: The cluster's name for RDMA devices, e.g. rdma/hca; None if NCCL uses sockets.
    """
    trainer = compose_recipe(recipe, overrides).trainer
    job = yaml.safe_load(MANIFEST.read_text())
    named = f"{JOB_ID}={uuid.uuid4().hex}"  # the same in every retry: a run knows the folder of its earlier starts
    job["spec"]["entrypoint"] = shlex.join(
        ["env", "CLUSTER=auto", named, "bash", "recipes/launch/run.sh", str(recipe), *overrides]
    )
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    workers["replicas"] = workers["minReplicas"] = workers["maxReplicas"] = trainer.nnodes
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        container["image"] = image
    for amounts in container["resources"].values():
        amounts["nvidia.com/gpu"] = str(trainer.n_gpus_per_node)
        if rdma is not None:
            amounts[rdma] = "1"
    if rdma is not None:
        container["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA pins memory
    return job


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rdma", metavar="NAME", help="ask for one RDMA device a pod, by the name it has in your cluster"
    )
    parser.add_argument("image", help="the image that every pod runs")
    parser.add_argument("recipe", type=Path, help="the recipe's YAML")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    given = parser.parse_args()
    print(yaml.safe_dump(fill_in(given.image, given.recipe, given.overrides, given.rdma), sort_keys=False), end="")
