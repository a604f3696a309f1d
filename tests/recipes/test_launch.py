"""Launchers hand recipe and overrides on, unchanged."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from composer import ROOT

LAUNCH = ROOT / "recipes" / "launch"
RECIPE, OVERRIDES = "recipes/moe/moe.yaml", ["scale=2x8_h100", "precision=bf16", "data.seed=[1, 2]"]


@pytest.fixture
def launch(tmp_path, executable):
    """Run a launcher whose ray and python print their arguments, one a line."""
    fake = str(executable("fake", 'printf "%s\\n" "$@"'))

    def launch(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        environment = {"PATH": os.environ["PATH"], "RAY": fake, "PYTHON": fake, **environment}
        command = ["bash", LAUNCH / script, *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)

    return launch


@pytest.fixture
def launched(launch):
    """Run a launcher that must succeed, and return the lines it prints."""

    def launched(*arguments: str, **environment: str) -> list[str]:
        done = launch(*arguments, **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return launched


def test_run_checks_then_runs(launched):
    run = ["-m", "verl.trainer.main_ppo", "--config-dir", "recipes/moe", "--config-name", "moe", *OVERRIDES]
    check = ["-m", "verl_precision.cli", "check", RECIPE, *OVERRIDES]
    assert launched("run.sh", RECIPE, *OVERRIDES) == check + run
    assert launched("run.sh", RECIPE, *OVERRIDES, DRY_RUN="1") == check


def test_a_failed_check_stops_the_run(launch, executable):
    done = launch("run.sh", RECIPE, PYTHON=str(executable("broken", "echo once; exit 1")))
    assert done.returncode == 1 and done.stdout == "once\n"


@pytest.mark.parametrize("script", ["run.sh", "job_submit.sh", "cpu_2nodes.sh"])
def test_a_missing_recipe_is_said(script, launch):
    done = launch(script)
    assert done.returncode != 0 and "give a recipe" in done.stderr


def test_ray_start_is_head_or_worker(launched):
    head = launched("ray_start.sh")
    assert head[0] == "start" and {"--head", "--port=6379"} <= set(head)
    assert "--address=10.0.0.1:6379" in launched("ray_start.sh", "10.0.0.1")
    worker = launched("ray_start.sh", "10.0.0.1:7000", GPUS="4", IP="10.0.0.2")
    assert {"--address=10.0.0.1:7000", "--num-gpus=4", "--node-ip-address=10.0.0.2"} <= set(worker)
    assert "--head" not in worker


def test_job_submit_runs_the_same_with_a_cluster_check(launched):
    environment = {"DASHBOARD": "http://head:8265", "ON_CLUSTER": "/shared/vp"}
    said = launched("job_submit.sh", RECIPE, *OVERRIDES, **environment)
    assert said == [
        *("job", "submit", "--address", "http://head:8265", "--", "env", "CLUSTER=auto"),
        *("bash", "/shared/vp/recipes/launch/run.sh", RECIPE, *OVERRIDES),
    ]


SLURM = {
    "scontrol": "echo one; echo two",
    "hostname": "echo 10.0.0.1 10.0.0.2",
    # run the command behind srun's options, with the environment they ask for, saying where
    "srun": """
for word; do
    case $word in
        --nodelist=*) echo "srun $word" >&2 ;;
        --export=ALL,*) IFS=, read -ra more <<<"${word#--export=ALL,}"; export "${more[@]}" ;;
        --*) ;;
        *) break ;;
    esac
    shift
done
exec "$@"
""",
    "ray": 'echo "ray $*" >&2; if [ "$1" = status ]; then echo " 1 node_a"; echo " 1 node_b"; fi',
    "python": 'printf "%s\\n" "$@"',
}


def test_slurm_starts_head_workers_and_recipe(launch, executable, tmp_path):
    """With a Slurm of shell scripts: the commands it would give, in order."""
    for name, script in SLURM.items():
        executable(name, script)
    done = launch(
        *("slurm.sbatch", RECIPE, *OVERRIDES),
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHON": "python", "RAY": "ray", "ACTIVATE": "/dev/null"},
        **{"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "any"},
        SLURM_GPUS_ON_NODE="8",
    )
    assert done.returncode == 0, done.stderr
    overrides = ["trainer.nnodes=2", *OVERRIDES]
    assert done.stdout.splitlines() == [
        *("-m", "verl_precision.cli", "check", RECIPE, *overrides, "--cluster", "auto"),
        *("-m", "verl.trainer.main_ppo", "--config-dir", "recipes/moe", "--config-name", "moe", *overrides),
    ], "the user's overrides come last, so that they win over the number of nodes"
    starts = [line for line in done.stderr.splitlines() if line.startswith("ray start")]
    shared = "ray start --num-gpus=8 --temp-dir=/tmp/ray-12345 --disable-usage-stats --block"
    assert sorted(starts) == [
        f"{shared} --address=10.0.0.1:22345",
        f"{shared} --head --node-ip-address=10.0.0.1 --port=22345",
    ]
    assert done.stderr.index("srun --nodelist=two") > done.stderr.index("ray status"), "workers wait for the head"
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert text.index("#SBATCH") < text.index("set -euo pipefail"), "sbatch reads options up to the first command"


def test_rayjob_has_hosts_gpus_image_and_command(load_script):
    rayjob = load_script("recipes/launch/rayjob.py")
    job = rayjob.fill_in("registry/verl:0.9.1", Path(RECIPE), OVERRIDES)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert shlex.split(job["spec"]["entrypoint"]) == [
        *("env", "CLUSTER=auto", "bash", "recipes/launch/run.sh", RECIPE, *OVERRIDES)
    ]
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        (container,) = group["template"]["spec"]["containers"]
        assert container["image"] == "registry/verl:0.9.1" and container["workingDir"] == "/workspace/verl-precision"
        volumes = {volume["name"] for volume in group["template"]["spec"]["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "FILLED_IN" not in str(job)
