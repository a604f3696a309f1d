"""What every node said, compared: no Ray here. tests/e2e/test_cluster_check.py asks two real nodes."""

import pytest

from verl_precision.tools.checking.installation import Node, compare_nodes, look_here, needs_of

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


def test_needs_of_a_recipe(compose_recipe, root, monkeypatch):
    monkeypatch.chdir(root)
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
