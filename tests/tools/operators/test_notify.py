"""One message a cause for the seeded collapse, none for healthy runs; a target's fault costs the run nothing."""

import http.server
import json
import logging
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from monitored import trainer_of

from verl_precision.mismatch.alarm import ADVICE, Alarm
from verl_precision.tools import operators
from verl_precision.tools.operators.notify import FAILED_MESSAGES, Notifier, message_of, to_send
from verl_precision.tools.runs.read import read_metrics

TESTS = Path(__file__).resolve().parents[2]
RECORDED = TESTS / "mismatch" / "recorded"
HEALTHY = [*RECORDED.glob("sanity_*.jsonl"), *(TESTS / "data" / "quickstart").rglob("*.jsonl")]
SECRET = "services/T0/B0/secret"


@pytest.fixture
def webhook(monkeypatch):
    """Return a server on loopback: what it got, and two events: a message has arrived; the server may answer."""
    hook = SimpleNamespace(got=[], arrived=threading.Event(), answers=threading.Event(), status=200)
    hook.answers.set()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            hook.got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            hook.arrived.set()
            hook.answers.wait()
            self.send_response(hook.status)
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("ALARM_WEBHOOK", f"http://127.0.0.1:{server.server_port}/{SECRET}")
    yield hook
    hook.answers.set()
    server.shutdown()
    server.server_close()


def trainer(**notify):
    names = {"trainer": {"experiment_name": "my_run", "logger": ["wandb", "trackio"]}}
    return trainer_of(names, {"mismatch": {"alarm": {"notify": notify}}})


def run(trainer, rows, meanwhile=lambda: None) -> list[dict]:
    """Send the rows of a run through monitor and notifier, as the trainer does; return each step's metrics."""
    notifier, steps = Notifier(trainer), [dict(row) for row in rows]

    def training():
        for row in steps:
            step = int(row["step"])
            notifier._compute_metrics(
                lambda batch, metrics, global_steps: trainer.monitor.judge(global_steps, metrics),
                *(None, row), global_steps=step,
            )  # fmt: skip
        meanwhile()

    notifier.fit(training)
    return steps


def collapse() -> list[dict]:
    return read_metrics(RECORDED / "seeded_collapse.jsonl")


def test_a_seeded_collapse_sends_one_message_and_says_no_secret(webhook, caplog):
    caplog.set_level(logging.DEBUG)
    steps = run(trainer(webhook_env="ALARM_WEBHOOK"), collapse())
    ((path, message),) = webhook.got
    assert path == f"/{SECRET}" and (message["run"], message["alarm"], message["step"]) == ("my_run", "gap_growth", 39)
    advice = ADVICE["gap_growth"]
    assert (message["meaning"], message["mistake"], message["severe"]) == (advice.meaning, advice.mistake, True)
    assert message["text"].startswith("my_run: ALARM gap_growth at step 39") and message["value"] > 1e-4
    assert steps[-1][FAILED_MESSAGES] == 0 and SECRET not in caplog.text


@pytest.mark.parametrize("path", HEALTHY, ids=lambda path: path.stem)
def test_a_healthy_run_sends_none(webhook, path):
    run(trainer(webhook_env="ALARM_WEBHOOK"), read_metrics(path))
    assert len(HEALTHY) >= 4 and webhook.got == []


def test_a_resumed_run_does_not_repeat_itself(webhook, tmp_path):
    """Resumed between the first alarm and the next of the same cause."""
    first, rows = trainer(webhook_env="ALARM_WEBHOOK"), collapse()
    run(first, [row for row in rows if row["step"] <= 42])
    first.monitor.save(tmp_path, {})
    resumed = trainer(webhook_env="ALARM_WEBHOOK")
    resumed.monitor.load(tmp_path)
    run(resumed, [row for row in rows if row["step"] > 42])
    assert len(webhook.got) == 1


def test_a_server_that_hangs_holds_no_step_and_the_end_only_for_a_bound(webhook, monkeypatch, caplog):
    """The run ends while the server still keeps its answer back."""
    webhook.answers.clear()
    monkeypatch.setattr(operators, "END_SECONDS", 0.01)
    run(trainer(webhook_env="ALARM_WEBHOOK"), collapse(), meanwhile=webhook.arrived.wait)
    assert not webhook.answers.is_set() and "may be lost" in caplog.text and SECRET not in caplog.text


def many(names: list[str]) -> list[Alarm]:
    return [Alarm(name, "m", float("nan"), "allowed 0", 5, 4, ADVICE[name]) for name in names]


def test_failures_are_said_once_counted_and_name_no_secret(webhook, caplog, tmp_path):
    webhook.status = 500
    failing = trainer(webhook_env="ALARM_WEBHOOK", command=f"{sys.executable} -c 'import sys; sys.exit(3)' {SECRET}")
    notifier = Notifier(failing)
    for name in ("k3_growth", "repeated_overflow"):
        failing.monitor.raised = many([name])
        notifier.take(5, {}, ())
    notifier.fit(lambda: None)
    notifier.take(6, metrics := {}, ("k3_growth", "repeated_overflow"))
    warned = [record.getMessage() for record in caplog.records]
    assert metrics == {FAILED_MESSAGES: 4} and len(warned) == 2 and SECRET not in caplog.text
    assert "127.0.0.1: HTTPError 500" in warned[0] and "CalledProcessError 3" in warned[1]


def test_a_command_gets_the_alarm_and_loggers_alert(tmp_path):
    said, out = [], tmp_path / "alarm.json"
    level = {"ERROR": "error", "WARN": "warn"}
    of = SimpleNamespace(alert=lambda **alert: said.append(alert), AlertLevel=level)
    words = f"{sys.executable} -c 'import sys; open(sys.argv[1], \"w\").write(sys.stdin.read())' {out}"
    telling = trainer(command=words, logger=True)
    telling.logger = SimpleNamespace(logger={"wandb": of, "trackio": SimpleNamespace(trackio=of), "console": None})
    run(telling, collapse())
    assert json.loads(out.read_text())["alarm"] == "gap_growth"
    assert [(alert["title"], alert["level"]) for alert in said] == [("ALARM gap_growth", "error")] * 2


def test_one_alarm_a_cause_is_sent_until_it_recovers_and_a_graver_one_after_a_milder():
    def names(raised, active=()):
        return [alarm.name for alarm in to_send(many(raised), active)]

    assert names(["phantom_clipping", "k3_growth", "gap_growth"]) == ["k3_growth"]
    assert names(["k3_growth"], ["phantom_clipping"]) == ["k3_growth"]
    assert names(["phantom_clipping", "policies_differ"], ["k3_growth"]) == []
    assert names(["repeated_overflow", "k3_growth"], ["trainer_not_finite"]) == ["repeated_overflow", "k3_growth"]
    page = (TESTS.parent / "docs" / "symptoms.md").read_text().partition("## Each alarm")[2]
    for name in ADVICE:
        assert names([name]) == [name] and names([name], [name]) == []
        assert re.search(rf"\| `{name}` \| \[.+ \| {re.escape(ADVICE[name].mistake)} \|\n", page)
        assert ADVICE[name].mistake and json.dumps(message_of(many([name])[0], "r"), allow_nan=False)
