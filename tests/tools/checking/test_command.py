"""What a user types, and the main, the config and the overrides that it means."""

import ast
import shlex
from pathlib import Path

import pytest
import verl

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.checking.composing import MAIN, mains, read_command

VLLM = "actor_rollout_ref.rollout.name=vllm"
EXPERIMENTAL = "verl.experimental"
ASYNC, ONE_STEP = f"{EXPERIMENTAL}.fully_async_policy.fully_async_main", f"{EXPERIMENTAL}.one_step_off_policy.main_ppo"
LACKS, OWN = "verl 0.9.1 has no such module", "it is not a main of verl"
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


@pytest.mark.parametrize(("typed", "name"), [
    (f"ray job submit --working-dir verl --address http://x -- python3 -m {MAIN} a=1", "ppo_trainer"),
    (f"env X=1 nohup python -u -m {MAIN} a=1", "ppo_trainer"),
    (f"srun -m block --ntasks 2 python -m {MAIN} a=1", "ppo_trainer"),
    (f"torchrun --nproc_per_node 8 -m {ONE_STEP} a=1", "one_step_off_ppo_trainer"),
    (f"python -m {ASYNC} --config-name=fully_async_ppo_megatron_trainer.yaml a=1", "fully_async_ppo_megatron_trainer"),
    ("python /src/verl/verl/experimental/one_step_off_policy/main_ppo.py a=1", "one_step_off_ppo_trainer"),
    ("python verl/trainer/main_ppo.py a=1", "ppo_trainer"),
    (f"python -m {MAIN} --config-path=pkg://verl.trainer.config -cn ppo_megatron_trainer a=1", "ppo_megatron_trainer"),
    (f"-m {MAIN} a=1", "ppo_trainer"),
    ("a=1", "ppo_trainer"),
    ("reward.custom_reward_function.path=my_main.py", "ppo_trainer"),
])  # fmt: skip
def test_a_command_is_composed_by_its_own_main(typed, name):
    words = shlex.split(typed)
    path, overrides = read_command(words)
    assert path.is_file() and path.stem == name and overrides == words[-1:]


@pytest.mark.parametrize(("command", "problem", "remedy"), [
    ("-m my_pkg.main_ppo a=1", OWN, "check KEY=VALUE"),
    ("src/train.py a=1", OWN, "check YAML"),
    ("-m recipe.prime.main_prime a=1", LACKS, "Use verl-recipe with the verl that it names"),
    ("-m verl.trainer.fsdp_sft_trainer a=1", "it was not an RL run", ""),
    ("-m verl.trainer.main_pp0", LACKS, "Check the spelling."),
    ("-m verl.model_merger merge", NO_RL, f"runs {MAIN}"),
    ("", "does not start a main of verl", f"e.g. python -m {MAIN}"),
    (f"-m {MAIN} --config-name", "it is given without a value", "Write --config-name=VALUE."),
    (f"-m {MAIN} -x", "there is no such option", ""),
    (f"-m {MAIN} {VLLM} trainer.experiment_name=it's", "Hydra cannot read `trainer.experiment_name=it's`", "quotes"),
    (f"-m {MAIN} {VLLM} +precision=fp61", "Available options in 'precision'", ""),
    (f"-m {MAIN} {VLLM} precision=fp16", "No match in the defaults list", ""),
])  # fmt: skip
def test_what_cannot_be_checked_is_told_in_words(findings, command, problem, remedy):
    code, (finding,) = findings("--", "python", *command.split())
    assert code == 1 and problem in finding["problem"] and remedy in finding["remedy"], finding


@pytest.mark.parametrize(("module", "instead"), [
    ("recipe.dapo.main_dapo", MAIN),
    ("recipe/dapo/src/main_dapo.py", MAIN),
    ("recipe.entropy.main_entropy", MAIN),
    ("verl.trainer.main_ppo_sync", MAIN),
    ("recipe.fully_async_policy.fully_async_main", ASYNC),
    ("recipe.one_step_off_policy.async_main_ppo", ONE_STEP),
])  # fmt: skip
def test_a_main_that_is_gone_is_named_with_the_one_to_take(findings, module, instead):
    """And its words are looked at."""
    words = ["python", *([] if "/" in module else ["-m"]), module, "trainer.save_frq=5"]
    code, (gone, key) = findings("--", *words)
    assert code == 1 and gone["name"] == "main-gone" and f"Start {instead}" in gone["remedy"]
    assert LACKS in gone["problem"] and key["remedy"] == "Did you mean trainer.save_freq?"
    with pytest.raises(ConfigurationError, match="no such module"):
        read_command(words)
