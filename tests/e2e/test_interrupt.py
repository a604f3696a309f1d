"""Ctrl-C ends the run and its Ray processes."""

import os
import signal
import subprocess
import sys


def test_ctrl_c_ends_everything_and_says_where_results_are(tmp_path, own_processes, hear_ctrl_c):
    command = [sys.executable, "-m", "verl_precision.cli", "compare", "recipes/quickstart/quickstart.yaml"]
    process = subprocess.Popen(
        [*command, "--precision", "fp16", "--output", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
        preexec_fn=hear_ctrl_c,
    )
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if "FSDP2 worker" in line:  # Ray, TransferQueue and a worker are up
            break
    assert len(own_processes()) > 3, seen
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=90)
    assert process.returncode == 130, seen + rest
    assert "every process of the run has ended" in rest and str(tmp_path) in rest.replace("\n", "")
    assert own_processes() == []
