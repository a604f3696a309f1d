"""What a user types, and the main, the config and the overrides that it means."""

import ast
import shlex
from pathlib import Path

import pytest
import verl
from cases import cases

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.checking.composing import MAIN, mains, read_command

LACKS = "verl 0.9.1 has no such module"
NO_RL = "it is not an RL run, so there is nothing to check"


def test_every_main_of_the_installed_verl_is_read_from_its_decorator():
    root = Path(verl.__file__).parent
    decorated = {}
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(text)) if "hydra.main(" in (text := path.read_text()) else ():
            if isinstance(node, ast.FunctionDef) and any("hydra.main" in ast.unparse(d) for d in node.decorator_list):
                decorated[".".join(path.relative_to(root.parent).with_suffix("").parts)] = ast.unparse(node)
    assert set(mains()) == {name for name, text in decorated.items() if "run_ppo" in text} and mains()[0] == MAIN
    for module, text in decorated.items():
        words = ["python", "-m", module, "a=1"]
        if module in mains():
            path, overrides = read_command(words)
            assert path.is_file() and f"config_name='{path.stem}'" in text and overrides == ["a=1"]
        else:
            with pytest.raises(ConfigurationError, match=NO_RL):
                read_command(words)


@pytest.mark.parametrize(("typed", "name"), cases(__file__, "commands"))
def test_a_command_is_composed_by_its_own_main(typed, name):
    words = shlex.split(typed)
    path, overrides = read_command(words)
    assert path.is_file() and path.stem == name and overrides == words[-1:]


@pytest.mark.parametrize(("command", "problem", "remedy"), cases(__file__, "refused"))
def test_what_cannot_be_checked_is_told_in_words(findings, command, problem, remedy):
    code, (finding,) = findings("--", "python", *command.split())
    assert code == 1 and problem in finding["problem"] and remedy in finding["remedy"], finding


@pytest.mark.parametrize(("module", "instead"), cases(__file__, "gone"))
def test_a_main_that_is_gone_is_named_with_the_one_to_take(findings, module, instead):
    """And its words are looked at."""
    words = ["python", *([] if "/" in module else ["-m"]), module, "trainer.save_frq=5"]
    code, (gone, key) = findings("--", *words)
    assert code == 1 and gone["name"] == "main-gone" and f"Start {instead}" in gone["remedy"]
    assert LACKS in gone["problem"] and key["remedy"] == "Did you mean trainer.save_freq?"
    with pytest.raises(ConfigurationError, match="no such module"):
        read_command(words)
