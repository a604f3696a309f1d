"""The GPU scales hold every recipe, by the arithmetic of docs/scales.md, whose table is this module's."""

import re

import pytest
from composer import PAPER, ROOT, compose_recipe

from verl_precision.check.models import known_models
from verl_precision.check.rules import gpu_memory as memory
from verl_precision.check.rules.gpu_memory import GIB, REST

SHAPES = {name: memory.shape_of(described) for name, described in known_models().items()}
GPU = 80 * GIB
FILLED = 0.9  # of a GPU, at most, since the arithmetic is good to some GiB
SCALES = ("1x8_a100", "1x8_h100", "2x8_h100", "8x8_h100")
TRAINED = [path.stem for path in PAPER if path.stem != "precision_ablation"]


def composed(recipe: str, scale: str):
    return compose_recipe(f"recipes/{recipe}/{recipe}.yaml", f"scale={scale}")


def training_bytes(model, gpus: int, tokens: int, offloaded: bool = False) -> int:
    """Return the peak of a GPU while the trainer works and vLLM sleeps."""
    state = 0 if offloaded else memory.state_bytes(model, gpus)
    return state + memory.gathered_bytes(model) + memory.activation_bytes(model, tokens) + REST


def rollout_bytes(model, gpus: int, share: float, width: int = 12) -> int:
    """Return the peak of a GPU while vLLM has its share and `width` bytes a parameter of the trainer's state stay."""
    return memory.state_bytes(model, gpus, width) + int(share * GPU) + REST


def kv_tokens(model, parallel: int, share: float) -> int:
    """Return how many tokens of KV cache a replica of vLLM holds; a tenth of its share is for its own work."""
    left, heads = 0.9 * share * GPU - 2 * model.parameters / parallel, max(model.kv_heads / parallel, 1)
    return int(left // (2 * 2 * model.layers * heads * model.head_dim))


def row(recipe: str, scale: str) -> dict[str, float]:
    """Return the arithmetic of one recipe at one scale, in GiB."""
    config = composed(recipe, scale)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    model, fsdp = SHAPES[config.actor_rollout_ref.model.path], actor.fsdp_config
    gpus, tokens = config.trainer.nnodes * config.trainer.n_gpus_per_node, actor.ppo_max_token_len_per_gpu
    away = fsdp.offload_policy or (fsdp.param_offload and fsdp.optimizer_offload)
    share, parallel = rollout.gpu_memory_utilization, rollout.tensor_model_parallel_size
    return {
        "state": 0 if fsdp.offload_policy else memory.state_bytes(model, gpus) / GIB,
        "gathered": memory.gathered_bytes(model) / GIB,
        "activations": memory.activation_bytes(model, tokens) / GIB,
        "training": training_bytes(model, gpus, tokens, fsdp.offload_policy) / GIB,
        "rollout": rollout_bytes(model, gpus, share, 0 if away else 12) / GIB,
        "host": memory.state_bytes(model, config.trainer.nnodes) / GIB if away else 0,
        "longest responses at a time": kv_tokens(model, parallel, share) / rollout.max_model_len,
    }


def line(recipe: str, scale: str) -> str:
    return f"| {recipe} | `{scale}` | " + " | ".join(f"{value:.0f}" for value in row(recipe, scale).values()) + " |"


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("recipe", TRAINED)
def test_fits(recipe, scale):
    numbers = row(recipe, scale)
    assert max(numbers["training"], numbers["rollout"]) < FILLED * GPU / GIB, numbers
    assert numbers["longest responses at a time"] > 8
    config = composed(recipe, scale)
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = config.trainer.nnodes * config.trainer.n_gpus_per_node
    assert gpus % rollout.tensor_model_parallel_size == 0
    assert actor.ppo_mini_batch_size * rollout.n % gpus == 0, "every GPU gets as many sequences of a mini-batch"
    longest = config.data.max_prompt_length + config.data.max_response_length
    assert min(actor.ppo_max_token_len_per_gpu, rollout.max_model_len) >= longest


@pytest.mark.parametrize("recipe", TRAINED)
def test_a_recipe_says_truly_whether_its_state_fits_8_gpus(recipe):
    config = composed(recipe, "1x8_h100")
    model, actor = SHAPES[config.actor_rollout_ref.model.path], config.actor_rollout_ref.actor
    peak = max(training_bytes(model, 8, actor.ppo_max_token_len_per_gpu), rollout_bytes(model, 8, 0.6))
    assert bool(config.get("state_exceeds_8_gpus")) is (peak >= FILLED * GPU)


def test_the_expected_hours_are_those_of_their_seconds():
    """A fifth is for all else."""
    table = r"^\| (\w+)(?:, (\w+))? \| `(\w+)` \| .*\| ([\d,]+) s \| ([\d,]+) s \| ([\d,]+) \| ([\d,]+) \|"
    rows = re.findall(table, (ROOT / "recipes" / "README.md").read_text(), re.M)
    assert {recipe for recipe, *_ in rows} == set(TRAINED)
    assert {precision for _, precision, *_ in rows} == {"", "BF16", "FP16"}, "experts in FP16 have hours of their own"
    for _, _, _, *numbers in rows:
        generation, training, iterations, hours = (float(number.replace(",", "")) for number in numbers)
        assert hours == pytest.approx(1.2 * (generation + training) * iterations / 3600, rel=0.05, abs=0.5)


def checkpoint_line(recipe: str) -> str:
    """Return a row of the page's table of checkpoints, in GB."""
    config = composed(recipe, "8x8_h100")
    # FP32 weights, and Adam's moments of those trained
    width = 4 if config.actor_rollout_ref.model.get("lora_rank") else 12
    one = width * SHAPES[config.actor_rollout_ref.model.path].parameters / 1e9
    kept = config.trainer.max_actor_ckpt_to_keep
    return f"| {recipe} | {one:.0f} | {kept} | {(kept + 1) * one:.0f} | {one / 2:.0f} | {one / 8:.1f} |"


def test_the_tables_of_the_docs_are_this_arithmetic():
    text = (ROOT / "docs" / "scales.md").read_text()
    found = re.findall(r"^\| \w+ \| `\w+` \|.*$", text, re.M)
    assert found == [line(recipe, scale) for recipe in TRAINED for scale in SCALES[1:]]
    for recipe in TRAINED:
        assert line(recipe, "1x8_a100").replace("a100", "h100") == line(recipe, "1x8_h100")
        assert checkpoint_line(recipe) in text.splitlines()


if __name__ == "__main__":
    print("\n".join(map(checkpoint_line, TRAINED)))
    print("\n".join(line(recipe, scale) for recipe in TRAINED for scale in SCALES[1:]))
