"""The benchmarks run, in small sizes; docs/benchmarks.md is what `make bench` recorded; what got worse is said."""

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benchmarks"
COLLECTORS = {"public_commands.py", "check_commands.py"}  # of docs/public_commands.md
STUDIES = {"alarm_rates.py", "fault_injection.py", "live_page.py", "tokens_memory.py"}


def load(name):
    """Import a benchmark as the script that it is: its folder is on the path while it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def runner():
    return load("run")


def records(monkeypatch, name, *options):
    module = load(name)
    monkeypatch.setattr(sys, "argv", [name, *options])
    return module, module.parse()


@pytest.mark.parametrize(("name", "options", "rows"), [
    ("losses", ("--rows", "4", "--tokens", "32", "--repeats", "2"), 14),
    ("kept_tokens", ("--responses", "2", "--tokens", "64", "--repeats", "2"), 1),
    ("digest", ("--megabytes", "1", "--tensors", "8", "--repeats", "2"), 2),
    ("grouped_experts", ("--tokens", "8", "--repeats", "2"), 4),
])  # fmt: skip
def test_benchmark_runs_in_a_small_size(monkeypatch, name, options, rows):
    module, arguments = records(monkeypatch, name, *options)
    found = list(module.records(arguments))
    assert len({one.what for one in found}) == len(found) == rows
    for one in found:
        assert one.ours > 0 < one.theirs and one.spread[0] <= one.ratio <= one.spread[1], one
        assert all(math.isfinite(value) for value in (one.ours, one.theirs, one.ratio, one.least or 0)), one
        assert one.what in one.line()


def test_statistics_of_the_mismatch_in_a_small_size(monkeypatch):
    module, arguments = records(monkeypatch, "mismatch", "--rows", "8", "--tokens", "64", "--repeats", "2")
    assert (one := module.time_of_both(arguments)).at_most == 0.05 and one.least > 0


@pytest.fixture
def slow(runner):
    """Return a record of a benchmark that misses its target by a half."""
    return load("measure").record("digest", "SHA-256", "ms", [2.0, 3.0, 9.0], [2.0, 2.0, 2.0], at_most=1.0)


def test_record_is_of_pairs_and_its_target_in_words(slow):
    assert (slow.ours, slow.theirs, slow.ratio, slow.spread) == (3.0, 2.0, 1.5, (1.25, 3.0))
    assert slow.target() == "missed: at most 1, and it is 50.0% more"
    assert dataclasses.replace(slow, at_most=1.5).target() == "met: at most 1.5"
    assert dataclasses.replace(slow, at_most=None, ours_at_most=4).target() == "met: at most 4 ms"
    assert dataclasses.replace(slow, at_most=None).target() == ""


def test_calls_take_turns_in_both_orders():
    called = []
    times = load("measure").alternate({name: lambda name=name: called.append(name) for name in "abc"}, repeats=2)
    assert "".join(called) == "abc" + "abc" + "cba" and {len(found) for found in times.values()} == {2}


@pytest.mark.parametrize(("ratio", "noise", "said"), [
    (1.79, 0, False), (1.81, 0, True), (0.2, 0, False), (1.81, 1.6, False), (2.5, 1.6, True),
])  # fmt: skip
def test_what_got_worse_by_more_than_a_fifth_is_said(runner, slow, ratio, noise, said):
    before = dataclasses.replace(slow, noise=noise)
    found = runner.worse([before], [dataclasses.replace(before, ratio=ratio)])
    assert list(found) == ([slow.what] if said else [])
    assert "not measured now" in runner.worse([slow], [])[slow.what] and runner.worse([], [slow]) == {}


@pytest.mark.parametrize(("again", "said"), [(1.5, False), (2.0, True)])
def test_what_looks_worse_is_run_once_more(runner, slow, monkeypatch, tmp_path, capsys, again, said):
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"machine": {"cpu": "Z80"}, "records": {"d.py": [dataclasses.asdict(slow)]}}))
    monkeypatch.setattr(runner, "RESULTS", results)
    monkeypatch.setattr(runner, "run", lambda command: [dataclasses.replace(slow, ratio=again)])
    assert runner.say_worse("d.py", [dataclasses.replace(slow, ratio=2.0)]) == said
    printed = capsys.readouterr().out
    assert ("WORSE digest: ratio 2, recorded 1.5, 33% more" in printed) == said
    assert ("another machine: Z80" in printed) == said
    assert not runner.say_worse("d.py", [slow]) and capsys.readouterr().out == ""


def test_page_is_made_from_the_recorded_results(runner):
    assert runner.RESULTS.exists(), "nothing is recorded: make bench"
    results = json.loads(runner.RESULTS.read_text())
    assert runner.PAGE.read_text() == runner.page(results), "make bench writes both; or one was edited"
    failed = [command for command, why in results["not_run"].items() if why == "failed"]
    assert not failed and set(results["records"]) >= set(runner.ON_CPU)


def test_page_of_injected_faults_is_made_from_what_was_recorded():
    module = load("fault_injection")
    founds = json.loads(module.RECORDED.read_text())
    assert (ROOT / "docs" / "fault_injection.md").read_text() == module.page(founds), "make fault-injection writes both"
    drawn = [(each.number, each.words, each.seed) for each in module.draw(len(founds), seed=1)]
    assert [(one["number"], one["words"], one["seed"]) for one in founds] == drawn
    assert founds == [module.recorded(one) for one in founds]


def test_every_benchmark_is_run_or_named_as_a_study(runner):
    run = {command.split()[0] for command in (*runner.ON_CPU, *runner.ON_GPU)}
    others = {"measure.py", "run.py", "injected_faults.py"} | COLLECTORS
    assert {file.name for file in FOLDER.glob("*.py")} - others == run | STUDIES
    assert all(f"`{name}`" in runner.INTRODUCTION for name in STUDIES)
