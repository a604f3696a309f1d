"""Docs are code: what they say of files, commands and names is compared with the disk."""

import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import verl
from composer import RECIPES, ROOT
from omegaconf import OmegaConf

from verl_precision.base.verl_config import CASTING, GLOO
from verl_precision.cli import app
from verl_precision.integration.resolvers import sync_is_verified
from verl_precision.presets import preset_names
from verl_precision.tools.checking.composing import read_command
from verl_precision.tools.data.catalog import NAMES, TEMPLATES
from verl_precision.tools.selftest.session import CHECKS

PAGES = sorted(p for p in ROOT.rglob("*.md") if not {".venv", "outputs"} & set(p.relative_to(ROOT).parts))
LOG = ROOT / "docs" / "log"
DOCUMENTS = [page for page in PAGES if page.parent != LOG]  # its entries are history
FENCE = re.compile(r"```bash\n(.*?)```", re.S)
# A folder (ends in /) or a file (has an extension); `a/b` alone is a metric.
PATH = re.compile(r"`((?:[\w-]+/)+(?:[\w.-]+\.\w+)?)`")


def _commands(document: Path) -> list[str]:
    programs = "make|verl-precision|pytest|python|bash"  # not in a table's first column: the changelog's old names
    return re.findall(rf"(?<=.)\| *`((?:{programs}) [^`]+)` *(?=\|)", document.read_text()) + [
        line.partition("  #")[0].strip()
        for block in FENCE.findall(document.read_text())
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_named_in_backticks_exist(document):
    for name in PATH.findall(document.read_text()):
        candidates = [ROOT / name, ROOT / "verl_precision" / name, document.parent / name]
        generated = name.startswith(("outputs/", "pkg/"))
        assert generated or any(path.exists() for path in candidates), f"{document.name}: `{name}`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_name_things_that_exist(document):
    """make targets, recipes given to Hydra, scripts."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in _commands(document):
        if target := re.search(r"^make ([\w-]+)", command):
            assert target.group(1) in targets, command
        if recipe := re.search(r"--config-dir (\S+) --config-name (\S+)", command):
            assert (ROOT / recipe.group(1) / f"{recipe.group(2)}.yaml").is_file(), command
        if script := re.search(r"^(?:\w+=(?:\S+|\"[^\"]*\") )*(?:python|bash|pytest) ((?:[\w.-]+/)+[\w.-]+)", command):
            assert (ROOT / script.group(1)).is_file(), command


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_our_own_commands_parse(document):
    """Every option exists and every value has its type; nothing runs, since many need a network or GPUs."""
    verbs = typer.main.get_command(app)
    for command in _commands(document):
        words = shlex.split(command, comments=True)
        if words[:1] != ["verl-precision"] or words[1] in ("--help", "--version"):
            continue
        assert words[1] in verbs.commands, command
        given = verbs.get_command(None, words[1]).make_context(words[1], words[2:]).params
        if words[1] == "check" and given["config"]:  # a recipe, overrides, or the command that one has
            given["config"], given["overrides"] = read_command([given["config"], *(given["overrides"] or ())])
        for override in given.get("overrides") or ():
            assert not override.startswith("-"), f"{command}: no option {override}"
            group, _, name = override.partition("=")
            assert group != "estimator" or name in preset_names("estimator"), command
        if words[1] in ("check", "compare") and given["config"]:
            assert (ROOT / given["config"]).is_file(), command
        if words[1] == "data":
            assert given["name"] in NAMES and given["template"] in {None, *TEMPLATES}, command


def test_make_help_names_every_target():
    makefile = (ROOT / "Makefile").read_text()
    said = subprocess.run(["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = re.search(r"^\.PHONY: (.+)$", makefile, re.M).group(1).split()
    assert {f"make {target}" for target in targets} <= set(re.findall(r"^make [\w-]+", said, re.M))
    assert "WORKERS" not in said, "the comments below it are for who reads the file"


def _anchors(page: Path) -> list[str]:
    """GitHub's anchors of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document):
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", document.read_text()):
        name, _, anchor = link.partition("#")
        page = (document.parent / name).resolve() if name else document
        assert page.exists(), link
        assert not anchor or anchor in _anchors(page), link


def test_index_of_the_log_has_every_entry():
    rows = re.findall(r"^\| (\S+) \| \[(.+)\]\((\w+\.md)#\S+\) \| .+ \|$", (LOG / "README.md").read_text(), re.M)
    entries = {
        (date, subject, page.name)
        for page in LOG.glob("*.md")
        for date, subject in re.findall(r"^## (\d{4}-\d\d-\d\d): (.+)$", page.read_text(), re.M)
    }
    assert set(rows) == entries and len(rows) == len(entries)


def test_python_prints_the_text_below_it(capsys):
    """Where a page shows an output."""
    shown = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.S)
    pairs = [pair for document in DOCUMENTS for pair in shown.findall(document.read_text())]
    assert pairs
    for code, text in pairs:
        exec(compile(code, "page", "exec"), {})
        assert capsys.readouterr().out == text


def test_figures_of_the_readme_stand_in_the_log():
    log = "".join(page.read_text() for page in LOG.glob("*.md"))
    figures = set(re.findall(r"\d\.\d+e-\d+|\d\.\d\d\b|\d+ to \d+(?= times)", (ROOT / "README.md").read_text()))
    assert figures >= {"1.92e-3", "3.08e-5", "25 to 104"}
    assert {figure for figure in figures if figure not in log} <= {"51 to 111"}, "of two entries"


def test_shell_is_in_bash_fences():
    """The tests above read no others."""
    assert ROOT / "README.md" in DOCUMENTS and any(_commands(document) for document in DOCUMENTS)
    for document in DOCUMENTS:
        assert not re.search(r"^```(?:sh|shell|console)$", document.read_text(), re.M), document


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipe_header_teaches_a_command_that_resolves(recipe):
    header = recipe.read_text().partition("\ndefaults:")[0]
    found = re.search(r"--config-dir (\S+) --config-name (\S+)", header)
    assert found and ROOT / found.group(1) / f"{found.group(2)}.yaml" == recipe


def test_modules_are_read_in_one_sitting_and_every_public_name_exists():
    for module in (ROOT / "verl_precision").rglob("*.py"):
        assert len(module.read_text().splitlines()) <= 300, module
    for init in (ROOT / "verl_precision").rglob("__init__.py"):
        name = ".".join(init.parent.relative_to(ROOT).parts)
        module = importlib.import_module(name)
        for public in getattr(module, "__all__", ()):
            assert hasattr(module, public), f"{name}.{public}"


def test_selftest_page_has_every_check_of_the_self_test_and_why_a_cpu_does_not_run_it():
    text = (ROOT / "docs" / "selftest.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (yes|not run: .+) \|$", text, re.M)
    on_a_cpu = [f"not run: {check.needs_gpu}" if check.needs_gpu else "yes" for check in CHECKS.values()]
    assert rows == [(name, check.shows, cpu) for (name, check), cpu in zip(CHECKS.items(), on_a_cpu, strict=True)]


def test_every_number_of_the_pre_trained_model_is_the_logs():
    page, log = ((folder / "real_model.md").read_text() for folder in (LOG.parent, LOG))
    numbers = set(re.findall(r"\d+\.\d+(?:e[-+]\d+)?%?", page)) - {"0.24.0", "0.24"}
    assert len(numbers) > 50 and {number for number in numbers if number not in log} <= {"0.3", "0.1"}, "rounded here"


SYNCS = re.findall(r"^\| `.*", (ROOT / "docs" / "weight_sync.md").read_text(), re.M)
SYNCS = [[cell.strip() for cell in row.split("|")[1:-1]] for row in SYNCS]
ROADS = {road: row for row in SYNCS if len(row) == 5 for road in re.findall(r"`(\w+)`", row[0])}


def test_every_checkpoint_engine_of_verl_has_a_row():
    sources = (Path(verl.__file__).parent / "checkpoint_engine").glob("*.py")
    names = {name for source in sources for name in re.findall(r"Registry\.register\(\"(\w+)\"\)", source.read_text())}
    assert ROADS.keys() == names | {GLOO}


def test_digests_are_sent_where_the_page_says_so_and_casting_is_the_reason_elsewhere():
    for road, (_, digests, *_) in ROADS.items():
        kwargs = {"vllm": {"worker_extension_cls": "verl_precision."}}
        rollout = {"name": "vllm", "checkpoint_engine": {"backend": road}, "engine_kwargs": kwargs}
        assert sync_is_verified(OmegaConf.create({"actor_rollout_ref": {"rollout": rollout}})) == (digests == "yes")
        assert ("BF16" in digests) == (road in CASTING)
