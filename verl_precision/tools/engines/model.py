"""Finds a model and checks that it supports the job, before an engine starts (which takes a minute)."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.base.content import content_digest
from verl_precision.base.errors import ConfigurationError
from verl_precision.check.rules.dtypes import VLLM_REFUSES_FP16

TINY = "tiny:"
Prompt = str | list[dict[str, Any]]  # text, or chat messages {role, content}


@dataclass(frozen=True)
class Model:
    """A model that was found.

    The fingerprint identifies its weights: for a folder it is a digest of the content of config.json and the
    weights, for a hub name its commit.
    """

    name: str  # what the user wrote
    fingerprint: str
    config: dict[str, Any]  # its config.json

    @property
    def context(self) -> int | None:
        """Most tokens of prompt and response together; None if config.json does not have it."""
        return self.config.get("max_position_embeddings")

    def require_dtypes(self, option: str, dtypes: Collection[str]) -> None:
        """Refuse fp16 among the dtypes of an option if vLLM refuses FP16 for this model."""
        kind = self.config.get("model_type")
        if "fp16" in dtypes and kind in VLLM_REFUSES_FP16:
            problem = f"{option} fp16 with model {self.name}: vLLM refuses FP16 for model type {kind!r}"
            remedy = f"Choose another {option}."
            raise ConfigurationError(f"{problem}, whose activations overflow", allowed="bf16, fp32", remedy=remedy)

    def require_arithmetic(self, arithmetic: str) -> None:
        """Refuse any arithmetic but native on a GPU."""
        import torch

        if arithmetic != "native" and torch.cuda.is_available():
            raise ConfigurationError(
                "this package replaces vLLM's operations only on a CPU", setting="--arithmetic", value=arithmetic,
                allowed="native on GPUs", remedy="Use --arithmetic native.",
            )  # fmt: skip


def model_location(model: str) -> str:
    """Return the folder, or the hub name, that vLLM and transformers load for a model as in `find_model`."""
    if model.startswith(TINY):
        from verl_precision.tools.tiny_model import cached_tiny_model

        return str(cached_tiny_model(model.removeprefix(TINY)))
    folder = Path(model).expanduser()
    return str(folder) if folder.exists() else model


def find_model(model: str) -> Model:
    """Return the model of a folder in Hugging Face format, a hub name, or `tiny:<architecture>`; refuse a missing one.

    A tiny model is built on first use. For a hub name only config.json is fetched; offline, the hub's cache is read.
    """
    folder = Path(model_location(model))
    if folder.is_dir():
        config = folder / "config.json"
        weights = sorted(file for kind in ("*.safetensors", "*.bin") for file in folder.glob(kind))
        if config.is_file() and weights:
            return Model(model, content_digest([config, *weights]), json.loads(config.read_text()))
        problem = f"the folder has no {'weights' if config.is_file() else 'config.json'}"
    else:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

        try:
            config = Path(hf_hub_download(model, "config.json"))
            return Model(model, config.parent.name, json.loads(config.read_text()))
        except HFValidationError:
            problem = "no such folder, and not a hub name"
        except (LocalEntryNotFoundError, HfHubHTTPError) as error:
            problem = f"no such folder, and neither the hub nor its cache here has it ({type(error).__name__})"
    allowed = f"a folder with config.json and *.safetensors or *.bin, a hub name (organisation/model), or {TINY}qwen3"
    remedy = "Check the spelling, download it first, or log in to the hub if it is gated."
    raise ConfigurationError(problem, setting="model", value=model, allowed=allowed, remedy=remedy)


def tokenize(prompts: Sequence[Prompt], model: Model) -> list[tuple[int, ...]]:
    """Return the tokens of prompts: a chat by the model's template, up to the assistant's answer; text as it is."""
    tokenizer = load_tokenizer(model.name)
    token_ids = []
    for number, prompt in enumerate(prompts):
        is_text = isinstance(prompt, str)
        if not is_text and tokenizer.chat_template is None:
            problem = f"its tokenizer has no chat template, which the messages of prompt {number} need"
            allowed, remedy = "prompts of plain text", "Add chat_template to its tokenizer_config.json."
            raise ConfigurationError(problem, setting="model", value=model.name, allowed=allowed, remedy=remedy)
        text = prompt if is_text else tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=is_text)["input_ids"]
        if not ids:
            problem = f"prompt {number} ({str(prompt)[:80]!r}) has no tokens"
            raise ConfigurationError(problem, allowed="prompts with text", remedy="Leave it out.")
        token_ids.append(tuple(ids))
    return token_ids


def load_tokenizer(model: str) -> Any:
    """Return the tokenizer of a model as in `find_model`, which must have one."""
    from transformers import AutoTokenizer

    reason = "it is empty"  # transformers returns such a tokenizer for a folder without one
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_location(model))
        if len(tokenizer) > 1:
            return tokenizer
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
    problem, remedy = f"its tokenizer cannot be loaded ({reason})", "Copy the tokenizer's files beside config.json."
    raise ConfigurationError(problem, setting="model", value=model, remedy=remedy)
