"""Part B: short runs of verl's own `main_ppo` with vLLM and Ray, and faults that must stop a run."""

import json
import os
from pathlib import Path

from verl_precision.base.errors import CheckFailedError, RunFailedError, require
from verl_precision.mismatch.metric_names import K3_KL
from verl_precision.tools.runs.fork_server import fork_server_on_cpu
from verl_precision.tools.runs.launch import Progress, quoted, run_verl
from verl_precision.tools.runs.read import Rows, read_metrics
from verl_precision.tools.selftest.checks import Figures

RECIPE = Path(__file__).with_name("stack.yaml")
_EXTENSION = (
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_precision.tools.selftest.selftest_faults.{}"
)


class _KilledError(Exception):
    """Ends a run from outside."""


def tied_model(device: str, folder: Path) -> Figures:
    """Train three steps with tied embeddings: the rollout sleeps and wakes, and every layer is verified."""
    rows = _run(device, folder, "tiny_architecture=qwen3_tied", sleeps=True)
    _healthy(rows, steps=3)
    return {"verified_layers": rows[-1]["weight_sync/verified_layers"], K3_KL: rows[-1][K3_KL]}


def precision_gap(device: str, folder: Path) -> Figures:
    """Train three steps in FP16 and in BF16; compare the mismatch."""
    gaps = {}
    for precision in ("fp16", "bf16"):
        rows = _run(device, folder / precision, f"precision={precision}")
        _healthy(rows, steps=3)
        gaps[precision] = sum(row[K3_KL] for row in rows) / len(rows)
    times = gaps["bf16"] / gaps["fp16"]
    require(times > 10, f"the k3 KL is only {times:.1f} times smaller in FP16; expected are 50 to 100 times")
    return {"k3_fp16": gaps["fp16"], "k3_bf16": gaps["bf16"], "times": times}


def moe(device: str, folder: Path) -> Figures:
    """Train three steps with a mixture of experts in FP16."""
    rows = _run(device, folder, "tiny_architecture=qwen3_moe")
    _healthy(rows, steps=3)
    return {"unverified_layers": rows[-1]["weight_sync/unverified_layers"], K3_KL: rows[-1][K3_KL]}


def lora_merged(device: str, folder: Path) -> Figures:
    """Train two steps with LoRA; the rollout gets merged weights."""
    rows = _run(device, folder, *_lora(merge=True))
    _healthy(rows, steps=2)
    return {"verified_layers": rows[-1]["weight_sync/verified_layers"], K3_KL: rows[-1][K3_KL]}


def lora_adapter(device: str, folder: Path) -> Figures:
    """Train two steps with LoRA; the rollout gets the adapter."""
    rows = _run(device, folder, *_lora(merge=False))
    _healthy(rows, steps=2)
    return {K3_KL: rows[-1][K3_KL]}


def _lora(merge: bool) -> list[str]:
    model = "actor_rollout_ref.model"
    adapter = [f"{model}.lora_rank=8", f"{model}.lora_alpha=16", f"{model}.target_modules=all-linear"]
    return [*adapter, f"{model}.lora.merge={merge}", "trainer.total_training_steps=2"]


def fsdp1(device: str, folder: Path) -> Figures:
    """Train two steps under FSDP1."""
    strategies = [f"{role}.strategy=fsdp" for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")]
    rows = _run(device, folder, *strategies, "trainer.total_training_steps=2")
    _healthy(rows, steps=2)
    return {K3_KL: rows[-1][K3_KL]}


def flipped_bit(device: str, folder: Path) -> Figures:
    """Flip one bit of one tensor on its way to the rollout."""
    return _fault_stops_the_run(device, folder, "arrived with other values", _EXTENSION.format("FlippedBit"))


def lost_tensor(device: str, folder: Path) -> Figures:
    """Lose one tensor on its way to the rollout."""
    return _fault_stops_the_run(device, folder, "never received", _EXTENSION.format("LostTensor"))


def bf16_sender(device: str, folder: Path) -> Figures:
    """Round the weights to BF16 before they are sent to an FP16 rollout."""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "verl_precision.tools.selftest.selftest_bf16_sender"  # of this process
    return _fault_stops_the_run(device, folder, "too coarse for a rollout in float16")


def _fault_stops_the_run(device: str, folder: Path, words: str, *plant: str) -> Figures:
    try:
        _run(device, folder, "trainer.total_training_steps=1", *plant)
    except RunFailedError as error:
        first = next((line for line in str(error).splitlines() if words in line), None)
        require(first is not None, f"the run stopped for another reason: {error}")
        return {"message": str(first).strip()[:200]}
    raise CheckFailedError("the run went on with the planted fault")


def resume(device: str, folder: Path) -> Figures:
    """Save every step, kill the run after two, start it again: it goes on with the same loss scale and metrics."""
    saving = [
        *("trainer.save_freq=1", "trainer.total_training_steps=4", "trainer.resume_mode=auto"),
        f"trainer.default_local_dir={quoted(folder / 'checkpoints')}",
    ]
    marker = folder / "checkpoints" / "latest_checkpointed_iteration.txt"

    def kill_after_two(progress: Progress) -> None:
        if marker.exists() and marker.read_text().strip().isdigit() and int(marker.read_text()) >= 2:
            raise _KilledError

    try:
        _run(device, folder, *saving, on_progress=kill_after_two)
    except _KilledError:
        pass
    else:
        raise CheckFailedError("the run ended before its second checkpoint was seen")
    saved = int(marker.read_text())
    state = next((folder / "checkpoints" / f"global_step_{saved}").rglob("loss_scale.json"), None)
    require(state is not None, f"the checkpoint of step {saved} has no loss_scale.json")
    rows = _run(device, folder, *saving)
    _healthy(rows, steps=4)
    log = (folder / "run" / "train-2.log").read_text()
    require(f"global_step_{saved}, setting global step" in log, f"the run did not go on from step {saved}")
    steps = [int(row["training/global_step"]) for row in rows]
    require(steps == [1, 2, 3, 4], f"the metrics of both starts have the steps {steps}")
    scale = json.loads(Path(str(state)).read_text())["scale"]
    return {"saved_at": saved, "went_on_at": saved + 1, "loss_scale": scale}


def _healthy(rows: Rows, steps: int) -> None:
    require(len(rows) == steps, f"{len(rows)} of {steps} steps were done")
    for row in rows:
        gap, bound = row.get("weight_sync/canary_gap"), row.get("weight_sync/canary_bound", 0.0)
        require(gap is None or gap < bound, f"the canary's gap is {gap} nats, its bound {bound}")
        require(row[K3_KL] < 0.1, f"{K3_KL} is {row[K3_KL]:g}: the rollout samples from another policy")


def _run(device: str, folder: Path, *overrides: str, sleeps: bool = False, on_progress=lambda progress: None) -> Rows:
    data = _prompts(folder / "prompts.jsonl")
    own = [
        f"scale={'cpu' if device == 'cpu' else '1x1_gpu'}",
        f"data.train_files={quoted(data)}",
        f"data.val_files={quoted(data)}",
        f"reward.custom_reward_function.path={quoted(Path(__file__).with_name('reward.py'))}",
    ]
    if device != "cpu":  # start-up is the check's time: no graphs; no profiling of memory that others may use as well
        rollout = "actor_rollout_ref.rollout"
        own += [f"{rollout}.enforce_eager=True", f"+{rollout}.engine_kwargs.vllm.kv_cache_memory_bytes={2**30}"]
        own += [f"{rollout}.free_cache_engine={sleeps}", f"++{rollout}.enable_sleep_mode={sleeps}"]
    with fork_server_on_cpu() as python:
        run_verl(RECIPE, [*own, *overrides], folder / "run", on_progress, python, goes_on=True)
    return read_metrics(folder / "run" / "metrics.jsonl")


def _prompts(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for index in range(32):
            prompt = [{"role": "user", "content": f"say {index}"}]
            model = {"style": "rule", "ground_truth": ""}
            row = {"data_source": "selftest", "prompt": prompt, "ability": "length", "reward_model": model}
            file.write(json.dumps({**row, "extra_info": {"index": index}}) + "\n")
    return path
