"""The live page: who may ask what, what changes while it is open, and what it never shows as HTML."""

import json
import os
import re
import shlex
import socket
import threading
import urllib.request
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import uvicorn
from hypothesis import example, given
from kept_responses import response
from starlette.testclient import TestClient
from typer.testing import CliRunner

from verl_precision.base.errors import ConfigurationError
from verl_precision.cli import app
from verl_precision.tools.kept_tokens.kept_file import DECISIONS, FOLDER, KeptResponse, append, cut_after
from verl_precision.tools.runs import content as content_module
from verl_precision.tools.runs.content import Live
from verl_precision.tools.runs.curves import BUCKETS, band_of, downsampled
from verl_precision.tools.runs.read import REWARD
from verl_precision.tools.runs.server import application, serve

TOKEN = "a-token_of_the_test"
EVIL = '</script><img src=x onerror="alert(1)">&amp;'


def line(step: int, **more: float) -> str:
    data = {REWARD: step / 10, "mismatch/k3_kl": 1e-5, "timing_s/step": 10.0, **more}
    return json.dumps({"step": step, "data": data}) + "\n"


def write(path: Path, text: str, mode: str = "w") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write(text)
    os.utime(path)
    return path


def kept(step: int = 1, tokens: int = 4, **more) -> KeptResponse:
    fields = {"identity": EVIL, "damage": float(step), "prompt_text": "What?", "token_ids": np.arange(tokens) % 2}
    fields |= {"prompt_ids": np.arange(3), "shadow_log_probs": None, "texts": ([EVIL, "\n"] * tokens)[:tokens]}
    return response(step, tokens, **fields | more)


@pytest.fixture
def ask(tmp_path):
    """Ask a server of the runs in `tmp_path`; without a token of its own, a path gets the right one."""
    client = []

    def get(path: str, token: str = f"/{TOKEN}/", method: str = "GET", host: str = "localhost:8421"):
        if not client:
            app = application(Live([tmp_path], pause_seconds=0), TOKEN)
            client.append(TestClient(app, base_url="http://localhost:8421"))
        return client[0].request(method, token + path, headers={"host": host}, follow_redirects=False)

    return get


@pytest.fixture
def run(tmp_path):
    return write(tmp_path / "fp16" / "metrics.jsonl", line(1) + line(2))


# Who may ask, and what


TOKENS = ("/", "//", f"/{TOKEN}x/", f"/{TOKEN[:-1]}/", f"//{TOKEN}/", "/\N{EURO SIGN}/", "/%00/")
FOREIGN = ("evil.example", "localhost.evil.example", "127.0.0.1.evil.example:8421", "", "[::2]")
PATHS = {
    404: ("..%2f..%2fetc%2fpasswd", "fp16/metrics.jsonl", "static/page.js", "responses?run=7"),
    400: ("responses?run=-1", "responses?run=../fp16", "responses", "responses?run=0&step=x",
          "responses?run=0&step=-5", "response?run=0&at=1e3",
          "response?run=0&at=" + "9" * 30, "response?run=0&at=\N{ARABIC-INDIC DIGIT ONE}", "state?since=x"),
    409: ("response?run=0&at=0",),
}  # fmt: skip


@pytest.mark.parametrize(("asked", "code"), [
    *(({"host": host}, 200) for host in ("localhost", "127.0.0.1:9000", "[::1]:8421", "LOCALHOST:1")),
    *(({"host": host}, 400) for host in FOREIGN),
    *(({"token": token, "path": path}, 403) for token in TOKENS for path in ("", "state")),
    ({"token": f"/{TOKEN}", "path": ""}, 307),
    *(({"method": method}, 405) for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS")),
    ({"token": "/", "method": "POST"}, 403),
    *(({"path": path}, code) for code, paths in PATHS.items() for path in paths),
])  # fmt: skip
def test_who_may_ask_what(ask, run, asked, code):
    append(run.with_name(FOLDER), [kept()])
    answer = ask(**{"path": "state"} | asked)
    assert answer.status_code == code and ("fp16" in answer.text) == (code in (200, 409))


def test_the_page_loads_nothing_and_knows_nothing(ask, run):
    answer = ask("")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "connect-src 'self'" in policy
    assert "http" not in policy and "unsafe-eval" not in policy and answer.headers["referrer-policy"] == "no-referrer"
    assert TOKEN not in answer.text and "fp16" not in answer.text and answer.headers["cache-control"] == "no-store"


def test_a_real_server_sends_a_dotted_path_nowhere(tmp_path, run, monkeypatch):
    """Over a socket, where no client tidies the path up."""
    said, told, servers = [], threading.Event(), []
    start = uvicorn.Server.run
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, **more: (servers.append(self), start(self, **more)))
    thread = threading.Thread(target=serve, args=(Live([tmp_path]), 0, lambda url: (said.append(url), told.set())))
    thread.start()
    try:
        assert told.wait(60)
        with urllib.request.urlopen(said[0] + "state", timeout=60) as answer:
            assert json.load(answer)["runs"][0]["name"] == "fp16"
        port, token = re.fullmatch(r"http://127.0.0.1:(\d+)/([\w-]{32})/", said[0]).groups()
        with socket.create_connection(("127.0.0.1", int(port)), timeout=60) as raw:
            raw.sendall(f"GET /{token}/../../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert raw.recv(12) == b"HTTP/1.1 404"
        with pytest.raises(ConfigurationError, match=f"--port {port}: this port cannot be used.*--port 0"):
            serve(Live([tmp_path]), int(port), said.append)
    finally:
        for server in servers:
            server.should_exit = True
        thread.join(60)
    assert not thread.is_alive()


# What changes while it is open


def state_of(ask, since: int = 0) -> dict:
    return ask(f"state?since={since}").json()


def test_nothing_is_sent_when_nothing_is_new(ask, tmp_path, run):
    write(tmp_path / "bf16" / "metrics.jsonl", line(1))
    first = state_of(ask)
    assert [each["name"] for each in first["runs"]] == ["bf16", "fp16"] and first["curves"].keys() == {"bf16", "fp16"}
    assert ask(f"state?since={first['version']}").status_code == 204
    write(run, line(3), "a")
    second = state_of(ask, first["version"])
    assert second["curves"]["fp16"]["reward/reward"] == [[1, 2, 3], [0.1, 0.2, 0.3]]
    assert second["runs"][1]["standing"]["step"] == 3


def test_a_resumed_series_goes_back_and_on(ask, run):
    """Our file logger empties the file, writes rows up to the checkpoint, and goes on."""
    write(run, "".join(line(step, **{"mismatch/k3_kl": 1e-5 if step < 40 else 1e-3}) for step in range(1, 61)))
    sick = state_of(ask)["runs"][0]
    assert [alarm["name"] for alarm in sick["alarms"]] == [sick["verdict"]["alarm"]] == ["k3_growth"]
    write(run, "".join(line(step) for step in range(1, 31)))
    found = state_of(ask)
    assert found["runs"][0]["standing"]["step"] == 30 and found["runs"][0]["alarms"] == []
    write(run, line(31, **{"mismatch/k3_kl": 0.5}), "a")
    assert state_of(ask)["curves"]["fp16"]["k3/k3"][1][-1] == 0.5


def test_a_run_begins_while_the_page_is_open(ask, tmp_path):
    run = tmp_path / "metrics.jsonl"
    for text, state in ((None, "waiting"), ("", "waiting"), (line(1), "running")):
        if text is not None:
            write(run, text)
        (found,) = state_of(ask)["runs"]
        assert (found["standing"]["state"], found["curve"]) == (state, tmp_path.name)


def test_arms_join_a_comparison_and_seeds_are_one_curve(ask, tmp_path):
    write(tmp_path / "grpo" / "seed_1" / "metrics.jsonl", line(1))
    one = state_of(ask)
    write(tmp_path / "grpo" / "seed_2" / "metrics.jsonl", line(1, **{REWARD: 0.3}))
    write(tmp_path / "gspo" / "seed_1" / "metrics.jsonl", line(1))
    many = state_of(ask, one["version"])
    assert [each["name"] for each in many["runs"]] == ["grpo/seed_1", "grpo/seed_2", "gspo/seed_1"]
    assert many["curves"]["grpo"]["reward/reward"] == [[1], [0.2], [0.1], [0.3]]
    assert many["runs"][0]["id"] == one["runs"][0]["id"]


def test_what_breaks_is_said_and_the_others_go_on(ask, tmp_path, run):
    other = write(tmp_path / "bf16" / "metrics.jsonl", line(1))
    state_of(ask)
    write(other, "no row\n", "a")
    broken, fine = state_of(ask)["runs"]
    assert broken["standing"]["state"] == "unreadable" and "not a metrics file" in broken["problem"]
    assert fine["standing"]["state"] == "running"
    other.unlink()
    other.parent.rmdir()
    assert [each["name"] for each in state_of(ask)["runs"]] == ["fp16"]
    write(other, line(1))
    assert [each["standing"]["state"] for each in state_of(ask)["runs"]] == ["running"] * 2


# Where a run stands


@pytest.mark.parametrize(("age", "total", "state", "left"), [
    (1.0, None, "running", None), (1.0, 12, "running", 100.0), (59.0, 12, "running", 100.0),
    (61.0, 12, "stopped growing", None), (10**6, 2, "finished", None), (10**6, None, "stopped growing", None),
])  # fmt: skip
def test_the_state_is_judged_by_the_newest_row_and_the_time_of_a_step(run, monkeypatch, age, total, state, left):
    if total is not None:
        text = f"Training Progress:   0%|  | 0/9\nTraining Progress:  8%|▊  | 2/{total} [1\n"
        write(run.with_name("train.log"), text)
    monkeypatch.setattr(content_module.time, "time", lambda: run.stat().st_mtime + age)
    (found,) = Live([run]).views().values()
    assert (found.status.state, found.status.total, found.status.seconds_left) == (state, total, left)
    write(run, line(1, **{"timing_s/step": 900.0}))
    (slow,) = Live([run]).views().values()
    assert age > 3600 or slow.status.state == "running", "slow steps are waited for"


def test_its_config_says_how_long_a_run_is(tmp_path):
    run = write(tmp_path / "metrics.jsonl", line(100))
    write(tmp_path / "hydra" / ".hydra" / "config.yaml", "trainer: {total_training_steps: 150}")
    (found,) = Live([run]).views().values()
    assert found.status.total == 150 and found.status.seconds_left == 500.0


def test_numbers_at_the_top(run):
    write(run, line(1) + line(2, **{"actor/is_weight_ess_fraction": 0.25, "weight_sync/canary_gap": 1e-6}))
    (found,) = Live([run]).views().values()
    assert found.status.now == {"reward": "0.2", "k3": "1e-05", "effective sample": "0.25", "canary": "1e-06"}


def test_once_prints_the_same(tmp_path, typed, run):
    write(run, "".join(line(step, **{"mismatch/k3_kl": 1e-5 if step < 40 else 1e-3}) for step in range(1, 61)))
    (tmp_path / "later").mkdir()
    code, said = typed("watch", run, tmp_path / "later", "--once")
    assert code == 0 and "fp16: act now: k3_growth since step 40" in said.partition("state")[0]
    assert "match the precisions" in said
    assert re.search(r"later +waiting", said) and re.search(r"fp16 +running .* 60 ", said)


FP16 = {"strategy": "fsdp2", "fsdp_config": {"mixed_precision": {"param_dtype": "fp16"}}}
HYDRA = {"actor_rollout_ref": {"actor": FP16, "rollout": {"dtype": "float16"}, "model": {"path": "${oc.env:NOWHERE}"}}}
HYDRA |= {"mismatch": {"alarm": {"notify": {"webhook_env": "OF_THE_RUN_ALONE"}}}}


def test_diagnose_says_how_each_run_is_in_ten_lines_and_its_exit_code_is_that_of_the_worst(tmp_path, typed):
    text = "".join(line(step, **{"mismatch/k3_kl": 1e-5 if step < 40 else 1e-3}) for step in range(1, 61))
    sick, short = (write(tmp_path / name / "metrics.jsonl", text) for name in ("sick", "short"))
    fine = write(tmp_path / "fine" / "metrics.jsonl", "".join(map(line, range(1, 40))))
    write(short, line(1))
    codes = [typed("diagnose", *runs)[0] for runs in ([fine], [fine, short], [tmp_path])]
    assert codes == [0, 1, 2]
    assert CliRunner().invoke(app, ["diagnose", str(sick)]).output.count("\n") in range(4, 11)
    assert "next: match the precisions" in typed("diagnose", sick)[1]
    write(sick.parent / "hydra" / ".hydra" / "config.yaml", json.dumps(HYDRA))
    code, said = typed("diagnose", sick, "--json")
    (found,) = json.loads(said)
    assert code == 2 and found["verdict"]["word"] == "act now" and "precision=fp16" not in found["verdict"]["action"]
    assert found["problem"] == ""
    write(short, "no row\n")
    assert typed("diagnose", tmp_path)[0] == 3
    rewards = "".join(line(step, **{"critic/score/mean": 1.0 if step < 40 else 0.1}) for step in range(1, 61))
    assert f"report {shlex.quote(str(write(tmp_path / 'a b' / 'r.jsonl', rewards)))}" in typed("diagnose", tmp_path)[1]


# Curves


@example([0.0, np.inf, -np.inf, 0.0], 2)
@given(st.lists(st.floats(width=32), min_size=3, max_size=3000), st.integers(2, 40))
def test_a_thinned_curve_keeps_its_extremes_its_ends_its_gaps_and_the_steps_of_its_spikes(values, buckets):
    steps, means, lows, highs = downsampled(range(len(values)), [values], buckets)
    assert steps == sorted(set(steps)) and {0, len(values) - 1} <= {*steps} and len(steps) <= buckets
    finite = [value for value in values if np.isfinite(value)]
    if finite:
        assert (np.nanmin(lows), np.nanmax(highs)) == (min(finite), max(finite))
    assert all(map(np.isfinite, values)) == all(map(np.isfinite, means))
    for mean, low, high in zip(means, lows, highs, strict=True):
        assert not np.isfinite(mean) or low <= mean <= high or np.isclose(mean, [low, high]).any()


def test_five_thousand_steps_are_a_few_hundred_points_and_a_spike_has_its_own():
    steps, means, lows, highs = band_of([{step: 1.0 if step == 3333 else 0.0 for step in range(5000)}])
    assert len(steps) == BUCKETS and max(highs) == 1.0 and max(lows) == 0.0
    assert steps[highs.index(1.0)] == 3333 and 0 < means[highs.index(1.0)] < 0.1


# Kept tokens


def test_responses_are_listed_by_damage_and_a_step_without_any_leads_to_the_nearest(ask, run):
    append(run.with_name(FOLDER), [kept(step, damage=damage) for step, damage in ((1, 5.0), (1, 7.0), (4, 6.0))])
    assert state_of(ask)["runs"][0]["kept"] == 3

    def listed(more: str = "") -> list[tuple[int, float]]:
        return [(row["step"], row["damage"]) for row in ask(f"responses?run=0{more}").json()["rows"]]

    assert listed() == [(1, 7.0), (4, 6.0), (1, 5.0)]
    assert listed("&step=1") == [(1, 7.0), (1, 5.0)] and listed("&step=3") == listed("&step=90") == [(4, 6.0)]


def test_responses_that_come_and_go_while_the_page_is_open(ask, run):
    path = run.with_name(FOLDER)
    assert state_of(ask)["runs"][0]["kept"] is None and ask("responses?run=0").json()["rows"] == []
    append(path, [kept(1), kept(2), kept(2)])
    assert state_of(ask)["runs"][0]["kept"] == 3
    cut_after(path, 1)  # a resume has cut it
    append(path, [kept(2)])
    assert state_of(ask)["runs"][0]["kept"] == 2
    (path / "step_2.parquet").write_bytes(b"something else")
    assert state_of(ask)["runs"][0]["kept"] == 1
    answer = ask("responses?run=0").json()
    assert "step_2.parquet" in answer["problem"] and len(answer["rows"]) == 1, "the others are shown"


def test_a_response_has_its_tokens_as_data(ask, run):
    odd = {"log_probs": np.array([np.nan, -np.inf, 0, 0], "f4"), "largest_gap": float("nan"), "reward": None}
    bare = kept(2, prompt_text=None, texts=None, **odd)
    append(run.with_name(FOLDER), [kept(turn=np.array([1, 0, 2, 2]), decisions=np.array([1, 0, 3, 1])), bare])
    without_text, row = ask("responses?run=0").json()["rows"]
    assert without_text["largest_gap"] == "NaN" and without_text["reward"] is None
    found = ask(f"response?run=0&at={without_text['offset']}").json()
    assert found["texts"] is found["prompt_text"] is None and found["token_ids"] == [0, 1, 0, 1]
    assert found["log_probs"] == ["NaN", "-Infinity", 0, 0]
    answer = ask(f"response?run=0&at={row['offset']}")
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("application/json", "nosniff")
    found = answer.json()
    assert found["texts"] == [EVIL, "\n"] * 2 and found["identity"] == EVIL and found["prompt_text"] == "What?"
    assert found["turn"] == [1, 0, 2, 2] and found["words"] == list(DECISIONS)
    assert found["words"][found["decisions"][2]] == "phantom-clipped"


def test_it_starts_without_torch_and_matplotlib(run_python):
    """Seconds on a slow machine. The file of kept tokens is read without them, too."""
    show = "print({'torch', 'matplotlib', 'verl'} & {*sys.modules})"
    done = run_python(f"import sys, verl_precision.tools.runs.server; {show}")
    assert done.stdout.strip() == "set()", done.stderr
