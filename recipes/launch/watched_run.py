"""Run a command on a Ray cluster, and end it when a node is lost: watched_run.py ADDRESS COMMAND [ARGUMENT ...].

A run that has lost a node cannot continue. It does not always end by itself, and it does not name the lost node
(docs/log/features.md). So a second process reads the list of live nodes from Ray's head every few seconds. ADDRESS is
host:port, or auto. The exit code is the command's, or `LOST`.

SIGUSR1 and SIGTERM are passed on: the run saves, and ends after SIGTERM; a second SIGTERM ends the command within
`GRACE_SECONDS`. SIGUSR2 counts as SIGTERM, because Slurm's srun passes SIGUSR2 on, but turns SIGTERM into SIGKILL.
"""

import contextlib
import signal
import subprocess
import sys
import time

LOST = 75  # sysexits.h's EX_TEMPFAIL: the same command may succeed later
POLL_SECONDS = 0.5
ASK_SECONDS = 3
# Ray's head probes each node every 3 seconds and declares it lost after 5 failures; a run may fail earlier.
VERDICT_SECONDS = 30
GRACE_SECONDS = 30  # for a command that has to end
PASSED_ON = {signal.SIGUSR1: signal.SIGUSR1, signal.SIGTERM: signal.SIGTERM, signal.SIGUSR2: signal.SIGTERM}


def first_loss(address: str) -> str:
    """Wait until a node of the cluster is lost, and return a sentence that names it.

    Args:
        address: host:port of the head, or auto.
    """
    import ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
    while True:
        for node in ray.nodes():
            reason = node.get("DeathReasonMessage", "")
            # a node that the autoscaler took away because it was idle held no part of the run
            if node["NodeID"] in alive and not node["Alive"] and "idle" not in reason:
                name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']}, {node['NodeID'][:6]})"
                return f"the node {name} was lost. Ray says: {reason or 'dead'}"
        time.sleep(ASK_SECONDS)


def run_watched(address: str, command: list[str]) -> int:
    """Run a command until it ends or a node is lost; return its exit code, or `LOST`.

    Args:
        address: host:port of the head, or auto.
        command: The command and its arguments.
    """
    heard: list[int] = []
    for number in (signal.SIGINT, *PASSED_ON):
        signal.signal(number, lambda number, frame: heard.append(number))
    run, watcher = subprocess.Popen(command, preexec_fn=ignore_requests), start_watcher(address)
    stopped, ends = False, 0
    verdict, blind, deadline = "", False, float("inf")
    try:
        while not verdict and time.monotonic() < deadline:
            while heard:
                number = heard.pop(0)
                if number in PASSED_ON:  # the terminal sends Ctrl-C to the command too
                    run.send_signal(PASSED_ON[number])
                stopped = stopped or number != signal.SIGUSR1
                ends += PASSED_ON.get(number) == signal.SIGTERM
            if ends > 1:
                break
            if watcher.poll() is not None:
                said = watcher.communicate()[0].splitlines()  # Ray prints there too
                verdict = next((line for line in said if line.startswith("the node ")), "")
                if not verdict:  # Ray ends every client that has lost the head, the run too
                    blind, watcher = True, start_watcher(address)
            if run.poll() is not None:
                if run.returncode == 0 or stopped:
                    break
                if blind:
                    verdict = f"Ray's head ({address}) was lost"
                deadline = min(deadline, time.monotonic() + VERDICT_SECONDS)
            time.sleep(POLL_SECONDS)
    finally:
        end(run)
        watcher.kill()
        watcher.wait()
    if not verdict:  # 128 plus the signal's number, as a shell returns it
        return run.returncode if run.returncode >= 0 else 128 - run.returncode
    print(
        f"verl_precision: {verdict}\nThe run has ended, because it needs every node. Bring the node back, or start Ray "
        "on another one; then give the same command again. The run resumes from its last checkpoint.",
        file=sys.stderr,
    )
    return LOST


def ignore_requests() -> None:
    """Ignore the signals that request a checkpoint; they would end a process that does not handle them yet."""
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def start_watcher(address: str) -> subprocess.Popen:
    """Start the process that prints the first loss; Ctrl-C and requests for a checkpoint do not reach this process."""
    command, own = [sys.executable, __file__, "--watch", address], {"start_new_session": True}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=ignore_requests, **own)


def end(process: subprocess.Popen) -> None:
    """End a process: at the first SIGTERM a run tries to save, but lacks a node; at the second it ends at once."""
    for seconds in (ASK_SECONDS, GRACE_SECONDS):
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    process.kill()
    process.wait()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    if sys.argv[1] == "--watch":
        print(first_loss(sys.argv[2]))
    else:
        raise SystemExit(run_watched(sys.argv[1], sys.argv[2:]))
