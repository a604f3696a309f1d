"""Imports point downwards: no arrow up, no circle, the host only at the rim, and rooms of a size that can be walked."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "verl_precision"

# From the bottom up. A room imports rooms that stand before it, and itself: the plugin never imports its tools.
PLUGIN = ("base", "presets", "losses", "weight_sync", "engine", "mismatch", "integration", "check", "plugin", "cli")
# What most runs never switch on, which enters a run by entry points; then what a person starts.
TOOLS = ["tiny_model", "arithmetic", "actions", "kept_tokens", "operators", "rewards", "patching", "checking", "show"]
TOOLS += ["export", "runs", "tokens", "selftest", "engines", "jobs", "data", "evaluate"]
TOOLS += ["gap.pairs", "gap.explain", "gap"]
ROOMS = (*PLUGIN, *(f"tools.{room}" for room in TOOLS), "tools")
# Rooms and modules that import verl or vLLM.
RIM = (
    *("integration", "check.loss_trial", "check.preflight", "check.probe", "check.verl_refusals"),
    *("tools.checking.composing", "tools.arithmetic.trainer_model", "tools.arithmetic.vllm_operations"),
    *("tools.actions.learning_rate", "tools.actions.rescue"),
    *("tools.engines.fsdp_scorer", "tools.engines.vllm_sampler", "tools.jobs.problems"),
    "tools.rewards.math_answers",
)
# The budget: most lines of Python of the plugin, and with its tools. It is not raised.
SIZES = {PLUGIN: 15_500, (*PLUGIN, "tools"): 25_500}
# Modules that need torch, NumPy and PyYAML at most: hosts and their companions may be missing.
PURE = ("losses", "mismatch.alarm", "mismatch.phantom", "mismatch.statistics")
PURE += ("weight_sync.manifest", "weight_sync.verify")
HOSTS = ("verl", "vllm", "ray", "transformers", "hydra", "omegaconf", "tensordict", "wrapt", "typer", "rich", "psutil")

MODULES: dict[str, ast.Module] = {}  # every module's name below the package, and its syntax tree
for path in sorted(PACKAGE.rglob("*.py")):
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    MODULES[".".join(part for part in parts if part != "__init__")] = ast.parse(path.read_text())


def imports(tree: ast.Module) -> set[str]:
    """Return the full names of all modules and members that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports."""
    found = set()
    for full in imports(MODULES[name]):
        package, _, member = full.partition(".")
        while package == "verl_precision" and member not in MODULES:
            member = member.rpartition(".")[0]
        found |= {member} if package == "verl_precision" else set()
    return found - {name, ""}


def within(name: str, places: tuple[str, ...]) -> bool:
    """Return whether a module is one of these places or stands in one."""
    return any(name == place or name.startswith(f"{place}.") for place in places)


def room_of(name: str) -> str:
    """Return the innermost room of a module."""
    return max((room for room in ROOMS if within(name, (room,))), key=len)


def test_every_room_has_its_place():
    assert {room_of(name) for name in MODULES if name} == set(ROOMS)


def test_the_map_of_the_package_has_its_rooms_from_the_top_down():
    drawn = re.findall(r"^    (\w+) ", ast.get_docstring(MODULES[""]), re.M)
    assert drawn == [room for room in reversed(ROOMS) if "." not in room]


@pytest.mark.parametrize("room", ROOMS)
def test_no_import_points_upwards(room):
    above = ROOMS[ROOMS.index(room) + 1 :]
    for name in MODULES:
        if name and room_of(name) == room:
            up = {other for other in own_imports(name) if room_of(other) in above}
            assert not up, f"{name} imports {up}, which stand above it"


def test_no_circle():
    """The error names the modules of a circle."""
    graphlib.TopologicalSorter({name: own_imports(name) for name in MODULES}).prepare()


def test_only_the_rim_imports_a_host():
    for name, tree in MODULES.items():
        if not within(name, RIM):
            hosts = {full for full in imports(tree) if full.partition(".")[0] in ("verl", "vllm")}
            assert not hosts, f"{name} imports {hosts}: such modules live in integration/, or are named in RIM"


@pytest.mark.parametrize("module", PURE)
def test_pure_module_imports_without_any_host(run_python, module):
    done = run_python(f"""
import importlib, sys
sys.modules |= dict.fromkeys({HOSTS!r})  # none of them can be imported
importlib.import_module("verl_precision.{module}")
""")
    assert done.returncode == 0, done.stderr


def test_package_itself_imports_nothing(run_python):
    done = run_python("import sys; before = {*sys.modules}; import verl_precision; print({*sys.modules} - before)")
    assert done.stdout.strip() == "{'verl_precision'}"


def test_helpers_of_tests_stand_in_modules_with_a_name():
    """Of two folders with a `conftest`, one import gets the other's."""
    files = Path(__file__).parent.rglob("*.py")
    wrong = [path for path in files if re.search(r"^\s*from conftest import", path.read_text(), re.M)]
    assert not wrong


def lines_of(places: tuple[str, ...]) -> int:
    """Return the lines of the modules in some places."""
    files = [file for place in places for file in (PACKAGE / place).rglob("*.py")]
    files += [PACKAGE / f"{place}.py" for place in places if (PACKAGE / f"{place}.py").exists()]
    return sum(len(file.read_text().splitlines()) for file in files)


@pytest.mark.parametrize("places", SIZES, ids=["plugin", "with its tools"])
def test_the_house_stays_small(places):
    assert lines_of(places) <= SIZES[places], "make something once, or make room, before you build on"
