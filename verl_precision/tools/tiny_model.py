"""Tiny models with tokenizer, built in seconds, without download, the same on every machine.

The weights are random, so the text has no meaning. The architecture is the real model's, so that a run on a CPU takes
the same code path. The tokenizer has one token for each printable ASCII character. `len(tokenizer) == vocab_size`:
verl masks surplus vocabulary in the rollout only, and that alone would be a mismatch.
"""

import json
import os
from collections.abc import Iterable, Sequence
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.files import new_folder, table_of

PAD, IM_START, IM_END = "<|pad|>", "<|im_start|>", "<|im_end|>"
VOCABULARY = [PAD, IM_START, IM_END, "\n", *map(chr, range(32, 127))]

_KNOWN = table_of(__file__)
_CHAT_TEMPLATE: str = _KNOWN["chat_template"]
_SHAPE: dict[str, Any] = _KNOWN["shape"]
# architecture -> (transformers model type, settings that differ from _SHAPE)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = _KNOWN["architectures"]
SEED = 0
# model type -> the further tokens that verl's agent loop needs of its family
_NEEDED: dict[str, list[str]] = _KNOWN["needed_tokens"]


def settings(architecture: str) -> tuple[str, dict[str, Any]]:
    """Return the transformers model type and all config values of a tiny model, one of `ARCHITECTURES`."""
    if architecture not in ARCHITECTURES:
        problem, allowed = "there is no such tiny model", ", ".join(ARCHITECTURES)
        raise ConfigurationError(problem, setting="tiny_architecture", value=architecture, allowed=allowed)
    model_type, changes = ARCHITECTURES[architecture]
    return model_type, {**_SHAPE, **changes}


def build_tiny_model(architecture: str, folder: Path) -> None:
    """Write an architecture's model, tokenizer and generation config to a new folder in Hugging Face format."""
    model_type, values = settings(architecture)
    if os.path.lexists(folder):
        raise ConfigurationError(f"{folder} exists; nothing was written. Name a new folder.")
    tokenizer = build_tokenizer(_CHAT_TEMPLATE, VOCABULARY + _NEEDED.get(model_type, []), model_type=model_type)
    with new_folder(folder) as scratch:
        save(random_model(model_type, values), tokenizer, values, scratch)


def random_model(model_type: str, values: dict[str, Any], seed: int = SEED) -> Any:
    """Return a random FP32 model of a transformers model type; the caller's random state does not change."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)


def save(model: Any, tokenizer: Any, values: dict[str, Any], folder: Path) -> None:
    """Write a model with these config values, its tokenizer and its generation config into a folder that exists."""
    from transformers import GenerationConfig

    model.generation_config = GenerationConfig(
        eos_token_id=values["eos_token_id"], pad_token_id=values["pad_token_id"], do_sample=True
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def cached_tiny_model(architecture: str) -> Path:
    """Return the absolute path of an architecture's cached model, which is built on first use.

    The cache is `$VERL_PRECISION_CACHE`, by default `~/.cache/verl_precision`. The folder's name ends with a digest of
    everything that the content depends on.
    """
    hosts = [version("torch"), version("transformers")]
    identity = json.dumps([settings(architecture), VOCABULARY, _NEEDED, _CHAT_TEMPLATE, SEED, hosts])
    cache = Path(os.environ.get("VERL_PRECISION_CACHE", Path.home() / ".cache" / "verl_precision"))
    folder = cache / "tiny_models" / f"{architecture}-{sha256(identity.encode()).hexdigest()[:12]}"
    if not folder.exists():
        try:
            build_tiny_model(architecture, folder)
        except (OSError, ConfigurationError):
            if not folder.exists():  # otherwise another process has built the same content first
                raise
    return folder.resolve()


def build_tokenizer(
    chat_template: str,
    vocabulary: Sequence[str] = VOCABULARY,
    unknown: str = "?",
    words: bool = False,
    positions: int = _SHAPE["max_position_embeddings"],
    model_type: str = "",
) -> Any:
    """Return a tokenizer with one token for each character or, with `words`, for each word between two spaces.

    Its end token is `IM_END`, which must be in the vocabulary. Its padding token is `PAD`, or `IM_END` if there is no
    `PAD`. `positions` and `model_type` are the model's. `AutoTokenizer` always loads a `Qwen2Tokenizer` for `qwen2`,
    so this function builds one for that type: byte-level BPE without merges also has one token for each character.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

    common: dict[str, Any] = {
        "pad_token": PAD if PAD in vocabulary else IM_END,
        "eos_token": IM_END,
        "additional_special_tokens": [IM_START] if IM_START in vocabulary else [],
        "chat_template": chat_template,
        "model_max_length": positions,
        "clean_up_tokenization_spaces": False,
    }
    if model_type == "qwen2":
        byte_level = {" ": "Ġ", "\n": "Ċ"}  # how byte-level BPE writes space and newline
        ids = {byte_level.get(token, token): i for i, token in enumerate(vocabulary)}
        return Qwen2Tokenizer(vocab=ids, merges=[], unk_token=PAD, **common)
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=unknown))
    if words:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="removed")
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **common)


def write_problems(path: Path, source: str, problems: Iterable[tuple[str, str]]) -> None:
    """Write the problems of a task, each with prompt and right answer, to a JSONL file in verl's format.

    `source` is the name of the task, verl's `data_source`.
    """
    with path.open("w", encoding="utf-8") as file:
        for index, (prompt, answer) in enumerate(problems):
            row = verl_row(source, [{"role": "user", "content": prompt}], source, answer, index=index)
            file.write(json.dumps(row) + "\n")


def verl_row(source: str, prompt: list[dict[str, str]], ability: str, truth: str, /, **about: Any) -> dict[str, Any]:
    """Return a problem as a row in verl's format: chat messages, right answer, and `extra_info` about the problem."""
    rewarded = {"style": "rule", "ground_truth": truth}
    return {"data_source": source, "prompt": prompt, "ability": ability, "reward_model": rewarded, "extra_info": about}
