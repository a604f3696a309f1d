"""Runs that a test writes as verl does, and the page's server in a thread, which a test can kill and start again."""

import json
import math
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import uvicorn
from kept_responses import response

from verl_precision.tools.kept_tokens.kept_file import CLIPPED, DECISIONS, KEPT, NOT_OURS, append, beside
from verl_precision.tools.runs.content import Live
from verl_precision.tools.runs.server import application

TOKEN = "a-token-of-a-test"


def row(step: int, run: int = 0, **changes: float) -> str:
    """Return a line of metrics: every panel has a curve, no two steps are alike, k3 never grows."""
    wave, other = math.sin(step * 1.7 + run), math.cos(step * 0.9 + run)
    data = {
        "critic/score/mean": 0.5 + 0.4 * math.tanh(step / 900) + 0.05 * wave,
        "response_length/mean": 900 + 200 * wave,
        "mismatch/k3_kl": 10.0 ** (-4 - run % 3) * (1 + 0.2 * wave),
        "mismatch/log_prob_gap_abs_mean": 10.0 ** (-2 - run % 3 / 2) * (1 + 0.1 * other),
        "mismatch/probs_pearson": 0.999 - 1e-4 * wave,
        "mismatch/probs_diff_max": 0.3 + 0.1 * wave,
        "mismatch/probs_diff_min": -0.3 - 0.1 * other,
        "phantom/alpha_abs_mean": 1e-3 * (2 + wave),
        "phantom/beta_abs_mean": 1e-2 * (2 + other),
        "phantom/beta_beyond_clip_fraction": 0.002 * (1 + wave),
        "phantom/phantom_clipped_fraction": 0.003 * (1 + other),
        "actor/clip_fraction_high": 0.01 * (1 + wave),
        "actor/clip_fraction_low": 0.01 * (1 + other),
        "actor/is_weight_ess_fraction": 0.8 + 0.1 * wave,
        "rollout_corr/kept_response_fraction": 0.9 + 0.05 * other,
        "weight_sync/canary_gap": 1e-3 * (1.5 + wave),
        "weight_sync/canary_bound": 8e-3,
        "precision/loss_scale": 2.0**15,
        "precision/skipped_steps": float(step % 997 == 0),
        "actor/grad_norm": 0.3 + 0.1 * wave,
        "perf/throughput": 2400 + 100 * other,
        "timing_s/step": 60 + wave,
    }
    return json.dumps({"step": step, "data": data | changes}) + "\n"


def write_run(folder: Path, steps: int, run: int = 0) -> Path:
    """Write a run of so many steps, and return its metrics file."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(row(step, run) for step in range(1, steps + 1)))
    return folder / "metrics.jsonl"


def add(metrics: Path, *lines: str) -> None:
    with metrics.open("a") as file:
        file.writelines(lines)


def keep(metrics: Path, step: int, gaps: Sequence[float], prompt: str, texts: Sequence[str], **changes) -> None:
    """Keep a response of `grpo` in bypass mode: a gap of 0.3 is clipped, one of NaN is tool output."""
    gap = np.array(gaps)
    ours = np.isfinite(gap)
    gap = np.nan_to_num(gap)
    words = np.where(ours, np.where(gap > 0.28, CLIPPED, KEPT), NOT_OURS)
    codes = np.array([DECISIONS.index(word) for word in words])
    numbers = {
        "rollout_log_probs": np.full(len(gap), -1.0), "log_probs": gap - 1, "shadow_log_probs": None,
        "advantages": np.ones(len(gap)), "weights": np.where(words == KEPT, np.exp(gap), 0.0), "decisions": codes,
        "mask": ours.astype(int), "turn": np.where(ours, 1 + (np.arange(len(gap)) > len(gap) // 2), 0),
        "token_ids": np.arange(len(gap)), "texts": list(texts), "prompt_text": prompt,
        "lost": int((words == CLIPPED).sum()), "damage": float(abs(gap).sum()), "turns": 2,
    }  # fmt: skip
    append(beside(metrics), [response(step, len(gap), **numbers | changes)])


class Server:
    """The page's server on a port of its own, which it keeps when it is started again, as it keeps its token."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths, self.port = paths, 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/{TOKEN}/"

    def start(self) -> None:
        app = application(Live(self.paths, pause_seconds=0), TOKEN)
        listening = socket.create_server(("127.0.0.1", self.port))
        self.port = listening.getsockname()[1]
        config = uvicorn.Config(app, log_level="error", lifespan="off", timeout_graceful_shutdown=0)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
