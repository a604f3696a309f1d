"""Run a command on a Ray cluster, and end it when a node is lost: watched_run.py ADDRESS COMMAND [ARGUMENT ...].

A run that has lost a node cannot go on. It does not always end by itself, and it does not say which node it was
(docs/log/features.md). So a second process asks Ray's head every few seconds which nodes are alive. ADDRESS is
host:port, or auto. The exit code is the command's, or `LOST`.
"""

import signal
import subprocess
import sys
import time

LOST = 75  # sysexits.h's EX_TEMPFAIL: the same command may succeed later
POLL_SECONDS = 0.5
ASK_SECONDS = 3
# Ray's head asks each node every 3 seconds and gives it up after 5 refusals; a run may fail before.
VERDICT_SECONDS = 30
GRACE_SECONDS = 30  # for a command that is asked to end


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
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    run, watcher = subprocess.Popen(command), start_watcher(address)
    verdict, blind, deadline = "", False, float("inf")
    try:
        while not verdict and time.monotonic() < deadline:
            if signal.SIGTERM in stopped:  # a terminal's Ctrl-C reaches the command by itself
                break
            if watcher.poll() is not None:
                said = watcher.communicate()[0].splitlines()  # Ray prints there too
                verdict = next((line for line in said if line.startswith("the node ")), "")
                if not verdict:  # Ray ends whoever has lost its head, the run as well
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
    if not verdict:  # 128 and the signal's number, as a shell says it
        return run.returncode if run.returncode >= 0 else 128 - run.returncode
    print(
        f"verl_precision: {verdict}\nThe run has ended, because it needs every node. Bring the node back, or start Ray "
        "on another one; then give the same command again. The run goes on from its last checkpoint.",
        file=sys.stderr,
    )
    return LOST


def start_watcher(address: str) -> subprocess.Popen:
    """Start the process that prints the first loss; Ctrl-C does not reach it."""
    command = [sys.executable, __file__, "--watch", address]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def end(process: subprocess.Popen) -> None:
    """Ask a process to end, and kill it if it does not."""
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    if sys.argv[1] == "--watch":
        print(first_loss(sys.argv[2]))
    else:
        raise SystemExit(run_watched(sys.argv[1], sys.argv[2:]))
