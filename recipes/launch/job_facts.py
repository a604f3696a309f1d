"""Print a fact for slurm.sbatch: job_facts.py address HOST, or job_facts.py folder RECIPE.yaml [OVERRIDE ...]."""

import socket
import sys
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from verl_precision.base.errors import VerlPrecisionError
from verl_precision.integration.trainer.run_identity import name_the_run
from verl_precision.tools.checking.composing import compose_recipe


def address_towards(host: str) -> str:
    """Return this host's address on the interface that leads to another host.

    The host's name does not help: on Debian-like hosts /etc/hosts gives it 127.0.1.1, which no other host can reach.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # a UDP connect sends nothing
        probe.connect((host, 9))
        return probe.getsockname()[0]


def checkpoint_folder(recipe: Path, overrides: list[str]) -> str:
    """Return the folder of a run's checkpoints, with the digest of its settings if the name has one."""
    config = compose_recipe(recipe, overrides)
    name_the_run(config)
    return str(config.trainer.default_local_dir)


if __name__ == "__main__":
    about, subject, *overrides = sys.argv[1:]
    try:
        print(address_towards(subject) if about == "address" else checkpoint_folder(Path(subject), overrides))
    except (VerlPrecisionError, OmegaConfBaseException) as error:
        raise SystemExit(f"verl_precision: {error}") from error
