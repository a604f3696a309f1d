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
from verl_precision.tools.runs.curves import PANELS
from verl_precision.tools.runs.server import application

TOKEN = "a-token-of-a-test"
METRICS = [name.split(" or ")[0].replace("*", "0") for panel in PANELS for name in panel.metrics.values()]
HEALTHY = [name for name in METRICS if "ess_fraction" in name or "kept" in name or "agreement" in name]


def row(step: int, run: int = 0, **changes: float) -> str:
    """Return a line of metrics: every curve of every panel, no two steps are alike, and nothing is worth an alarm."""
    data = {name: 0.01 * (1.5 + math.sin(step * 1.7 + run + number)) for number, name in enumerate(METRICS)}
    data |= {
        "critic/score/mean": 0.5 + 0.4 * math.tanh(step / 900) + 0.05 * math.sin(step * 1.7 + run),
        "mismatch/probs_pearson": 0.999 - 1e-4 * math.sin(step * 1.7 + run),
        "mismatch/k3_kl": 10.0 ** (-4 - run % 3) * (1 + 0.2 * math.sin(step * 1.7 + run)),
        **dict.fromkeys(HEALTHY, 0.9 + 0.05 * math.cos(step * 0.9 + run)),
        **{"weight_sync/canary_bound": 0.1, "precision/loss_scale": 2.0**15, "timing_s/step": 60.0},
        **{"precision/skipped_steps": 0.0, "alarm/rescue": 0.0, "phantom/phantom_clipped_fraction": 0.003},
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
