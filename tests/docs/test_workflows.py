"""GitHub's workflows call the Makefile and do nothing of their own. With actionlint: CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))


def jobs_of(workflow: Path) -> dict[str, dict]:
    return yaml.safe_load(workflow.read_text())["jobs"]


def commands(job: dict) -> list[str]:
    """Return what a job runs, with the words that its matrix puts in."""
    found = [step["run"] for step in job["steps"] if "run" in step]
    targets = job.get("strategy", {}).get("matrix", {}).get("target", [])
    return [each.replace('"$TARGET"', target) for each in found for target in targets or [""]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_is_a_target_of_the_makefile(workflow):
    for job in jobs_of(workflow).values():
        for command in commands(job):
            assert re.fullmatch(r"make [\w-]+", command) and command.removeprefix("make ") in TARGETS, command
        assert job["timeout-minutes"] <= 90
        assert all("@" in step["uses"] for step in job["steps"] if "uses" in step)


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_only_the_last_job_may_write_and_only_what_it_is_for(workflow):
    assert yaml.safe_load(workflow.read_text())["permissions"] == {"contents": "read"}
    allowed = {"ci": {}, "site": {"pages", "id-token"}, "release": {"id-token"}}[workflow.stem]
    *first, last = jobs_of(workflow).values()
    assert not any("permissions" in job for job in first) and set(last.get("permissions", ())) == set(allowed)


def test_ci_is_what_the_projects_own_ci_runs():
    own = set(re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.M))
    (job,) = jobs_of(ROOT / ".github" / "workflows" / "ci.yml").values()
    matrix = job["strategy"]["matrix"]
    assert set(matrix["target"]) == own
    pythons = [*matrix["python"], *(each["python"] for each in matrix["include"])]
    assert pythons == re.findall(r"Python :: (3\.\d+)", (ROOT / "setup.py").read_text())
