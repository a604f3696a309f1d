"""Launchers hand recipe and overrides on, unchanged."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import slurm
import yaml
from composer import ROOT, compose_recipe

from verl_precision.check.preflight import PreflightCallback

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


def test_run_checks_then_runs(launch, executable):
    run = ["-m", "verl.trainer.main_ppo", "--config-dir", "recipes/moe", "--config-name", "moe", *OVERRIDES]
    check = ["-m", "verl_precision.cli", "check", RECIPE, *OVERRIDES]
    assert launch("run.sh", RECIPE, *OVERRIDES).stdout.splitlines() == check + run
    assert launch("run.sh", RECIPE, *OVERRIDES, DRY_RUN="1").stdout.splitlines() == check
    own = ["precision=fp16", "scale=cpu", "--", "precision=bf16", "data.seed=7"]  # a script's, and a user's
    assert launch("run.sh", RECIPE, *own, DRY_RUN="1").stdout.splitlines()[4:] == ["scale=cpu", *own[3:]]
    own = ["precision=fp16", "--", "trainer.default_local_dir='/a -- b precision=bf16'"]  # a path, and no preset
    assert launch("run.sh", RECIPE, *own, DRY_RUN="1").stdout.splitlines()[4:] == [own[0], own[2]]
    failed = launch("run.sh", RECIPE, fails=True, PYTHON=str(executable("broken", "echo once; exit 1")))
    assert failed.returncode == 1 and failed.stdout == "once\n", "a failed check stops the run"


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


# What job_facts.py says of a cluster whose second node has this name, and of a run whose folder is the stand-in's.
FACTS = r"""
case "$*" in
    *job_facts.py\ address\ node1) echo 10.0.0.1; exit ;;
    *job_facts.py\ folder*) printf "%s\n" "the plugin's line" "$STAND_IN_SLURM"; exit ;;
esac
"""


@pytest.fixture
def run_job(tmp_path, executable):
    """Run slurm.sbatch with a Slurm of one machine, a Ray that prints its arguments, and a python of shell lines."""

    def run_job(python: str, **environment: str) -> tuple[int, str]:
        for name, script in {"ray": RAY, "python": FACTS + python}.items():
            executable(name, script)
        own = {"ACTIVATE": "/dev/null", "VERL_FILE_LOGGER_ROOT": str(tmp_path / "metrics")}
        environment = {**slurm.install(tmp_path), **own, **environment}
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
    steps = re.findall(r"^\++ srun .*", log, re.M)
    assert steps and all("--cpu-bind=none" in step for step in steps), "else a step has one core of an exclusive node"
    text = (LAUNCH / "slurm.sbatch").read_text()
    assert text.index("#SBATCH") < text.index("set -euo pipefail"), "sbatch reads options up to the first command"
    assert "#SBATCH --output=slurm-%j.log\n" in text, "a file in the folder of the submission, which is there"
    assert "#SBATCH --mem=0\n" in text, "else a job has the partition's default memory of each core"


def test_slurm_starts_the_environment_of_the_installation_page_and_nothing_without_it(run_job):
    (default,) = re.findall(r"^ACTIVATE=\$\{ACTIVATE:-(\S+)\}", (LAUNCH / "slurm.sbatch").read_text(), re.M)
    assert f". {default}\n" in (ROOT / "docs" / "install.md").read_text()
    code, log = run_job("echo said", ACTIVATE="/not/there")
    assert code == 1 and "ACTIVATE=/not/there is no file" in log and "docs/install.md" in log
    assert "said" not in log and "ray start" not in log


def test_the_heads_address_is_that_of_the_interface_to_the_other_nodes(load_script):
    """Debian's /etc/hosts has 127.0.1.1 for a host's own name; the interface that leads there is 127.0.0.1's."""
    assert load_script("recipes/launch/job_facts.py").address_towards("127.0.1.1") == "127.0.0.1"


def test_the_jobs_folder_of_checkpoints_is_the_one_that_the_run_takes(load_script):
    config = compose_recipe(RECIPE, *OVERRIDES, return_hydra_config=True)
    PreflightCallback().on_run_start(config)
    folder = load_script("recipes/launch/job_facts.py").checkpoint_folder(ROOT / RECIPE, OVERRIDES)
    assert folder == config.trainer.default_local_dir
    assert re.fullmatch(r"checkpoints/moe/bf16_grpo_vp_seq_mis-[0-9a-f]{8}", folder)


# What the run does at its 1st, 2nd, ... start, after the functions of a run that saves checkpoints.
LIVES = r"""
case "$*" in *watched_run*) ;; *) exit 0 ;; esac
echo start "${SLURM_RESTART_COUNT:-0}"
save() { echo "$1" >"$STAND_IN_SLURM/latest_checkpointed_iteration.txt"; }
batch() { kill "-$1" "$(cat "$STAND_IN_SLURM/batch.pid")"; }
await_end() { batch USR1; while :; do sleep 0.05; done; }
case ${SLURM_RESTART_COUNT:-0} in
"""
SAVED = r"""
    0) exit 75 ;;
    1) save 1; batch KILL ;;
    2) trap "save 2; exit 143" USR2; await_end ;;
    3) save 3; exit 3 ;;
    4) trap "" USR2; save 4; await_end ;;
    *) exit 3 ;;
esac
"""


def said(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith(("start", "verl_precision"))]


def test_slurm_queues_a_job_again_after_a_loss_at_its_time_limit_and_after_a_crash_that_followed_a_checkpoint(run_job):
    code, log = run_job(LIVES + SAVED, SAVE_SECONDS="2")
    assert code == 3, "an error of the run itself, before a new checkpoint, ends the job"
    lost, late, crash, stuck = (
        f"verl_precision: {why}. The job goes back to the queue and will go on from its last checkpoint."
        for why in (
            *("a node was lost", "the time limit is near", "the run ended with code 3, after a new checkpoint"),
            "the time limit is near, and the run did not end within SAVE_SECONDS=2",
        )
    )
    starts = [f"start {number}" for number in range(6)]
    expected = [starts[0], lost, *starts[1:3], late, starts[3], crash, starts[4], stuck, starts[5]]
    assert said(log) == expected


FUTILE = [
    ("exit 75", 2, "a node was lost"),
    ("batch KILL", 2, "a node was lost"),  # Slurm itself queues the job again
    ('trap "exit 143" USR2; await_end', 1, "the time limit is near"),
]


@pytest.mark.parametrize(("life", "starts", "why"), FUTILE)
def test_slurm_does_not_queue_a_job_again_that_makes_no_checkpoint(life, starts, why, run_job):
    code, log = run_job(f"{LIVES} *) {life} ;; esac", MAX_FUTILE="1")
    assert code == 1
    *lines, refusal = said(log)
    assert [line for line in lines if line.startswith("start")] == [f"start {number}" for number in range(starts)]
    assert refusal.startswith(f"verl_precision: {why}, and the last {starts} start(s) of this job made no checkpoint")
    assert all(setting in refusal for setting in ("checkpoint.every_minutes", "trainer.save_freq", "sbatch --time"))


LISTENS = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("saved"))
signal.signal(signal.SIGTERM, lambda *_: (print("ending"), sys.exit(9)))
print("started")
while True:
    signal.pause()
"""


def watched(*command: str) -> subprocess.Popen:
    """Start a command on a Ray cluster that nobody has started."""
    words = [sys.executable, LAUNCH / "watched_run.py", "127.0.0.1:1", *command]
    return subprocess.Popen(words, text=True, stdout=subprocess.PIPE)


def test_a_watched_command_that_does_not_listen_ends_by_itself_or_at_sigterm():
    assert watched("true").wait(20) == 0
    process = watched("sh", "-c", "echo started; exec sleep 60")
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGUSR1)
    process.terminate()
    assert process.wait(20) == 128 + signal.SIGTERM


def test_a_run_that_waits_for_its_lost_node_ends_at_the_second_request(load_script):
    program = "trap 'echo asked; trap \"exit 7\" TERM' TERM; echo started; while :; do sleep 0.1; done"
    script = load_script("recipes/launch/watched_run.py")
    with subprocess.Popen(["bash", "-c", program], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "started\n"
        script.end(run)
        assert (run.returncode, run.stdout.read()) == (7, "asked\n")


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGUSR2])
def test_a_watched_command_hears_usr1_and_ends_by_itself_at_sigterm(end):
    process = watched(sys.executable, "-uc", LISTENS)  # no shell: it cannot trap a signal that it was born ignoring
    assert process.stdout.readline() == "started\n"
    for number, word in ((signal.SIGUSR1, "saved\n"), (end, "ending\n")):
        process.send_signal(number)
        assert process.stdout.readline() == word
    assert process.wait(20) == 9


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
    env, cluster, named, *command = shlex.split(job["spec"]["entrypoint"])
    assert (env, cluster, named.partition("=")[0]) == ("env", "CLUSTER=auto", "VERL_PRECISION_JOB")
    assert command == ["bash", "recipes/launch/run.sh", RECIPE, *OVERRIDES] and rayjob()[0] != job, "another job"
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
        (cache,) = (each["value"] for each in container["env"] if each["name"] == "HF_HOME")
        assert any(cache.startswith(f"{mount}/") for mount in kept), "a retry does not download the model again"
        assert "rdma" not in str(container) and "securityContext" not in container
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8" and "FILLED_IN" not in str(job)
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}, "whoever reaches Ray's ports may run code"
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "requirements" / "gpu.lock").read_text().splitlines()


def test_rayjob_asks_for_rdma_where_the_cluster_has_it(rayjob):
    (container,) = rayjob(rdma="rdma/hca")[1][-1]["containers"]
    assert container["resources"]["limits"]["rdma/hca"] == container["resources"]["requests"]["rdma/hca"] == "1"
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


SKY_TASK = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
SKY_RAY = r"""
echo "ray $*" >>"$SAID"
case "$1 $2" in "start --head") touch "$SAID.head"; exec sleep 60 ;; esac
if [ "$1" = status ] && [ -e "$SAID.head" ]; then printf "%s\n" " 1 node_a" " 1 node_b"; fi
if [ "$1" = health-check ]; then test -e "$SAID.head"; fi
"""


@pytest.fixture
def sky_task(tmp_path, executable):
    """Run the task's script as SkyPilot does on a node of two; return (exit code, commands that it gave)."""
    said, activate = tmp_path / "said", tmp_path / "activate"
    activate.touch()
    programs = executable("ray", SKY_RAY).parent
    executable("python", 'echo "python $*" >>"$SAID"; exit "${CODE:-0}"')
    of_node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    given = {"ACTIVATE": activate, "WORKSPACE": ROOT, "RECIPE": RECIPE, "OVERRIDES": shlex.join(OVERRIDES)}
    given |= {"PATH": f"{programs}:{os.environ['PATH']}", "SAID": said, "SKYPILOT_TASK_ID": "sky-1", **of_node}
    known = {key: value for key, value in SKY_TASK["envs"].items() if value is not None}

    def run(rank: int, **more: str) -> tuple[int, list[str]]:
        environment = {key: str(value) for key, value in {**known, **given, "SKYPILOT_NODE_RANK": rank, **more}.items()}
        done = subprocess.run(["bash", "-c", SKY_TASK["run"]], env=environment, timeout=60)
        return done.returncode, said.read_text().splitlines()

    return run


def test_skypilots_head_runs_the_recipe_once_all_nodes_are_there_and_hands_its_exit_code_on(sky_task):
    assert SKY_TASK["resources"]["job_recovery"]["recover_on_exit_codes"] == [75]
    code, said = sky_task(0)
    started = "ray start --head --node-ip-address=10.0.0.1 --port=6379"  # in the background, beside the first status
    assert code == 0 and any(line.startswith(started) for line in said[:-2]), said
    assert "ray status" in said[:-2] and "trainer.nnodes=2" in said[-1]
    assert said[-1].startswith("python recipes/launch/watched_run.py auto python -m verl.trainer.main_ppo")
    assert said[-1].endswith(" ".join(OVERRIDES)) and "--cluster auto" in said[-2]
    assert sky_task(0, CODE="75")[0] == 75, "which SkyPilot recovers"


def test_skypilots_other_nodes_join_the_head_and_end_with_it(sky_task):
    sky_task(0)  # whose stand-in leaves a file that says that it is up
    code, said = sky_task(1)
    assert code == 0, "the head's code is the job's"
    joined = "ray start --address=10.0.0.1:6379 --num-gpus=8 --disable-usage-stats --block"
    assert said[-2:] == ["ray health-check --address=10.0.0.1:6379", joined]
