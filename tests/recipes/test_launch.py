"""Launchers hand recipe and overrides on, unchanged."""

import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
from composer import ROOT

LAUNCH = ROOT / "recipes" / "launch"
RECIPE, OVERRIDES = "recipes/moe/moe.yaml", ["scale=2x8_h100", "precision=bf16", "data.seed=[1, 2]"]


@pytest.fixture
def launch(tmp_path, executable):
    """Run a launcher whose ray and python print their arguments, one a line; it must succeed, or fail."""
    fake = str(executable("fake", 'printf "%s\\n" "$@"'))

    def launch(script: str, *arguments: str, fails: bool = False, **environment: str) -> subprocess.CompletedProcess:
        environment = {"PATH": os.environ["PATH"], "RAY": fake, "PYTHON": fake, **environment}
        command = ["bash", LAUNCH / script, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert bool(done.returncode) is fails, done.stderr
        return done

    return launch


def test_run_checks_then_runs(launch):
    run = ["-m", "verl.trainer.main_ppo", "--config-dir", "recipes/moe", "--config-name", "moe", *OVERRIDES]
    check = ["-m", "verl_precision.cli", "check", RECIPE, *OVERRIDES]
    assert launch("run.sh", RECIPE, *OVERRIDES).stdout.splitlines() == check + run
    assert launch("run.sh", RECIPE, *OVERRIDES, DRY_RUN="1").stdout.splitlines() == check


def test_a_failed_check_stops_the_run(launch, executable):
    done = launch("run.sh", RECIPE, fails=True, PYTHON=str(executable("broken", "echo once; exit 1")))
    assert done.returncode == 1 and done.stdout == "once\n"


@pytest.mark.parametrize("script", ["run.sh", "job_submit.sh", "cpu_2nodes.sh"])
def test_a_missing_recipe_is_said(script, launch):
    assert "give a recipe" in launch(script, fails=True).stderr


def test_ray_start_is_head_or_worker(launch):
    head = launch("ray_start.sh").stdout.splitlines()
    assert head[0] == "start" and {"--head", "--port=6379"} <= set(head)
    assert "--address=10.0.0.1:6379" in launch("ray_start.sh", "10.0.0.1").stdout.splitlines()
    worker = launch("ray_start.sh", "10.0.0.1:7000", GPUS="4", IP="10.0.0.2").stdout.splitlines()
    assert {"--address=10.0.0.1:7000", "--num-gpus=4", "--node-ip-address=10.0.0.2"} <= set(worker)
    assert "--head" not in worker


def test_job_submit_runs_the_same_with_a_cluster_check(launch):
    environment = {"DASHBOARD": "http://head:8265", "ON_CLUSTER": "/shared/vp"}
    assert launch("job_submit.sh", RECIPE, *OVERRIDES, **environment).stdout.splitlines() == [
        *("job", "submit", "--address", "http://head:8265", "--", "env", "CLUSTER=auto"),
        *("bash", "/shared/vp/recipes/launch/run.sh", RECIPE, *OVERRIDES),
    ]


RAY = r"""
echo "ray $*" >&2
if [ "$1" = status ]; then printf "%s\n" " 1 node_a" " 1 node_b"; fi
case "$*" in *--address=*) touch "$STAND_IN_SLURM/worker" ;; esac
"""


@pytest.fixture
def run_job(tmp_path, executable):
    """Run slurm.sbatch with a Slurm of one machine, a Ray that prints its arguments, and a python of shell lines."""

    def run_job(python: str, **environment: str) -> tuple[int, str]:
        for name, script in {"hostname": "echo 10.0.0.1 10.0.0.2", "ray": RAY, "python": python}.items():
            executable(name, script)
        environment = {**slurm.install(tmp_path), "ACTIVATE": "/dev/null", **environment}
        command = [tmp_path / "sbatch", "--nodes=2", f"--output={tmp_path}/job-%j.log", "recipes/launch/slurm.sbatch"]
        done = subprocess.run([*command, RECIPE, *OVERRIDES], env=environment, cwd=ROOT, timeout=60, check=False)
        return done.returncode, (tmp_path / "job-12345.log").read_text()

    return run_job


def test_slurm_starts_head_workers_and_recipe(run_job):
    code, log = run_job('until [ -e "$STAND_IN_SLURM/worker" ]; do sleep 0.05; done; printf "%s\\n" "said $*"')
    assert code == 0, log
    overrides = " ".join(["trainer.nnodes=2", *OVERRIDES])
    assert [line for line in log.splitlines() if line.startswith("said")] == [
        f"said -m verl_precision.cli check {RECIPE} {overrides} --cluster auto",
        "said recipes/launch/watched_run.py auto python -m verl.trainer.main_ppo --config-dir recipes/moe "
        f"--config-name moe {overrides}",
    ], "the user's overrides come last, so that they win over the number of nodes"
    shared = "ray start --num-gpus=1 --temp-dir=/tmp/ray-12345-0 --disable-usage-stats --block"
    head = f"{shared} --head --node-ip-address=10.0.0.1 --port=22345 --include-dashboard=false"
    starts = sorted(line for line in log.splitlines() if line.startswith("ray start"))
    assert starts == [f"{shared} --address=10.0.0.1:22345", head]
    assert log.index("--nodelist=node1") > log.index("ray status"), "workers wait for the head"
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert text.index("#SBATCH") < text.index("set -euo pipefail"), "sbatch reads options up to the first command"
    assert "#SBATCH --output=slurm-%j.log\n" in text, "a file in the folder of the submission, which is there"


# What the run does at its 1st, 2nd, ... start; its parent is the batch shell.
LIVES = r"""
case "$*" in *watched_run*) ;; *) exit 0 ;; esac
echo start "${SLURM_RESTART_COUNT:-0}"
case ${SLURM_RESTART_COUNT:-0} in
    0) exit 75 ;;
    1) kill -KILL $PPID ;;
    2) kill -USR1 $PPID; exec sleep 60 ;;
    *) exit 3 ;;
esac
"""


def test_slurm_queues_a_job_again_after_a_loss_and_at_its_time_limit(run_job):
    code, log = run_job(LIVES)
    assert code == 3, "an error of the run itself ends the job"
    said = [line for line in log.splitlines() if line.startswith(("start", "verl_precision"))]
    again = "The job goes back to the queue and will go on from its last checkpoint."
    lost, late = (f"verl_precision: {why}. {again}" for why in ("a node was lost", "the time limit is near"))
    assert said == ["start 0", lost, "start 1", "start 2", late, "start 3"]


def test_slurm_does_not_queue_a_job_for_ever(run_job):
    code, log = run_job(LIVES, MAX_REQUEUES="0")
    assert code == 75 and "was queued again MAX_REQUEUES=0 times" in log


def watched(*command: str) -> subprocess.Popen:
    """Start a command on a Ray cluster that nobody has started."""
    words = [sys.executable, LAUNCH / "watched_run.py", "127.0.0.1:1", *command]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE)


def test_a_watched_command_that_ends_well_ends_at_once():
    assert watched("true").wait(20) == 0


def test_a_watched_command_is_asked_to_end():
    process = watched("sh", "-c", "echo started; exec sleep 60")
    assert process.stdout.readline() == "started\n"
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


@pytest.fixture
def rayjob(load_script):
    """Fill in the manifest; return it, and the pods of head and workers."""

    def rayjob(**options: str) -> tuple[dict, list[dict]]:
        job = load_script("recipes/launch/rayjob.py").fill_in("registry/verl:0.9.1", Path(RECIPE), OVERRIDES, **options)
        cluster = job["spec"]["rayClusterSpec"]
        return job, [each["template"]["spec"] for each in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]

    return rayjob


def test_rayjob_has_hosts_gpus_image_and_command_keeps_what_a_run_writes_and_tries_again(rayjob):
    job, pods = rayjob()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    command = ["env", "CLUSTER=auto", "bash", "recipes/launch/run.sh", RECIPE, *OVERRIDES]
    assert shlex.split(job["spec"]["entrypoint"]) == command
    (workers,) = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == 2
    assert job["spec"]["backoffLimit"] > 0
    written = {"checkpoints", "outputs", "tensorboard_log", "wandb"}
    for pod in pods:
        (container,) = pod["containers"]
        assert container["image"] == "registry/verl:0.9.1" and container["workingDir"] == "/workspace/verl-precision"
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
        kept = {mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "shared"}
        assert {f"{container['workingDir']}/{folder}" for folder in written | {"data"}} <= kept
        assert {"name": "VERL_FILE_LOGGER_ROOT", "value": "checkpoints"} in container["env"]
        assert "rdma" not in str(container) and "securityContext" not in container
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert "FILLED_IN" not in str(job)


def test_rayjob_asks_for_rdma_where_the_cluster_has_it(rayjob):
    (container,) = rayjob(rdma="rdma/hca")[1][-1]["containers"]
    assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == "1"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
