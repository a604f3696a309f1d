"""What could not be found out about a run, so that a verdict says what was not looked at."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from verl_precision.base.dtypes import EXACT
from verl_precision.base.errors import sentence
from verl_precision.base.verl_config import ROLLOUT, engines
from verl_precision.check.models import Described, is_folder
from verl_precision.check.rules.memory import beyond_arithmetic, gpu_bytes
from verl_precision.check.rules.rule import Environment, Fault
from verl_precision.check.rules.run import HUB_NAME
from verl_precision.engine.arithmetic_choice import ARITHMETIC_SETTING
from verl_precision.integration.ledger import REMEDY, lost_symbols

MODEL, ADAPTER = "actor_rollout_ref.model.path", "actor_rollout_ref.model.lora_adapter_path"
GIVE = "Give --model-config FILE, the model's config.json or its folder, or check where the model is"
MEASURE = "Read perf/max_memory_allocated_gb after a first step."
# What this check asks of the hosts by symbols of the ledger, by the feature that has them.
ASKED = {
    "check of names": "names of losses, rollouts and dtypes",
    "presets=win": "words of the command against presets",
}
MEMORY, CONTEXT = "the memory of a GPU", "the length of its context"
OF_MODEL = f"{MEMORY}, attention heads over GPUs, whether vLLM takes it in FP16, {CONTEXT}, dropout"


def unknown_things(config: DictConfig, found: Environment, known: Described) -> Iterator[Fault]:
    """Yield what is unknown of a run after everything was looked for; `known` is what was found of the model."""
    yield from _of_models(config, found, known)
    for feature, subject in ASKED.items():  # a symbol of verl or Hydra that is not as tested
        for symbol, wrong in lost_symbols(feature).items():
            yield _not_looked_at("host-unknown", symbol, wrong, subject, f"{REMEDY}.", "changed")
    beyond, device = beyond_arithmetic(config), config.trainer.device
    if device == "cuda" and not beyond and gpu_bytes(config, found) is None:
        why, remedy = "no GPU is here, and neither --gpu nor a scale names one", "Give --gpu NAME, e.g. --gpu H100."
        yield _not_looked_at("gpu-unknown", "trainer.device", why, MEMORY, remedy, device)
    if device != "cpu" and beyond:
        why = "the arithmetic of a GPU's memory knows FSDP without a critic, on CUDA, and vLLM on the same GPUs"
        yield _not_looked_at("memory-unknown", beyond, why, MEMORY, MEASURE, OmegaConf.select(config, beyond))
    if found.vllm is None and config.actor_rollout_ref.rollout.name == "vllm":
        remedy, subject = "Check again in the run's environment.", "whether it loads adapters"
        yield _not_looked_at("vllm-unknown", f"{ROLLOUT}.name", "vLLM is not installed here", subject, remedy, "vllm")


def _of_models(config: DictConfig, found: Environment, known: Described) -> Iterator[Fault]:
    path = str(config.actor_rollout_ref.model.path)
    absent = "not in that folder" if is_folder(path) else "not here: there is no such folder"
    if HUB_NAME.match(path):
        absent = "not in this machine's cache of the hub"
    if not known.content:
        cache = f"; `hf download {path} config.json` puts it into the hub's cache" if HUB_NAME.match(path) else ""
        yield _not_looked_at("model-unknown", MODEL, f"its config.json is {absent}", OF_MODEL, f"{GIVE}{cache}.", path)
    elif known.taken_from and not known.is_named:
        why = f"its config.json is {absent}; its shape is taken to be that of {known.taken_from}, by its name"
        yield _not_looked_at("model-by-name", MODEL, why, CONTEXT, f"{GIVE}.", path)
    if known.content and found.shape is None and config.trainer.device != "cpu":
        why = f"the arithmetic knows no model of the kind {found.model.get('model_type', 'of its config.json')}"
        yield _not_looked_at("shape-unknown", MODEL, why, MEMORY, MEASURE, path)
    exact = OmegaConf.select(config, ARITHMETIC_SETTING) == EXACT
    has_critic = any(each.role == "critic" for each in engines(config))
    if exact and has_critic and not found.critic:
        why, remedy = "the critic's config.json is not at hand", "Check again where the critic's model is."
        critic = config.critic.model.path
        yield _not_looked_at("critic-unknown", "critic.model.path", why, "its arithmetic", remedy, critic)
    if not found.adapter and (adapter := OmegaConf.select(config, ADAPTER)) is not None:
        why, remedy = "its adapter_config.json is not at hand", "Check again where the adapter is."
        yield _not_looked_at("adapter-unknown", ADAPTER, why, "its modules, its dropout", remedy, adapter)


def _not_looked_at(name: str, setting: str, why: str, subjects: str, remedy: str, value: object) -> Fault:
    problem = sentence(f"{why}. Not looked at: {subjects}")
    return Fault(setting, problem, "", remedy, value=value, severity="unchecked", name=name)
