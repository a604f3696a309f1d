"""What an offline analysis measures; what cannot work is refused here, before a model loads."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_precision.engine.settings import DTYPES
from verl_precision.errors import ConfigurationError
from verl_precision.rules.dtype_rules import VLLM_REFUSES_FP16

TINY = "tiny:"
ATTENTION = ("sdpa", "flash_attention_2")


@dataclass(frozen=True)
class OfflineSettings:
    """Everything a sample or a score depends on; a folder belongs to one of these.

    Attributes:
        model: folder or hub name of a Hugging Face model, or `tiny:<architecture>` for a built-in tiny one.
        prompts: where the prompts came from; their token ids are kept beside.
        rollout_dtypes: vLLM samples in each; bf16, fp16, fp32.
        train_dtypes: the trainer's engine scores in each.
        responses: sampled for each prompt, in each rollout dtype.
        max_response_tokens: a response ends there, if not before.
        seed: of the sampling; each response has a seed of its own, the same in every dtype.
        shard_responses: responses in one file. What is lost when a run is killed, and what a GPU is given.
        attention: the trainer's; vLLM chooses its own. With flash_attention_2 the trainer packs without padding.
        micro_batch_tokens: tokens of one forward of the trainer, padding included.
    """

    model: str
    prompts: str
    rollout_dtypes: tuple[str, ...]
    train_dtypes: tuple[str, ...]
    responses: int = 8
    max_response_tokens: int = 1024
    seed: int = 0
    shard_responses: int = 256
    attention: str = "sdpa"
    micro_batch_tokens: int = 16384

    def __post_init__(self) -> None:
        """Check dtypes and bounds.

        Raises:
            ConfigurationError: naming option, value, what is allowed and what to do.
        """
        for option, dtypes in (("--rollout-dtype", self.rollout_dtypes), ("--train-dtype", self.train_dtypes)):
            for dtype in dtypes:
                if dtype not in DTYPES:
                    raise ConfigurationError(
                        f"{option} {dtype}: there is no such dtype. Allowed: {', '.join(DTYPES)}; repeat the option "
                        "for several."
                    )
            if not dtypes or len(set(dtypes)) != len(dtypes):
                raise ConfigurationError(f"{option} {' '.join(dtypes)}: give at least one dtype, and each once.")
        for option in ("responses", "max_response_tokens", "shard_responses", "micro_batch_tokens"):
            if getattr(self, option) < 1:
                raise ConfigurationError(
                    f"--{option.replace('_', '-')} {getattr(self, option)}: allowed is 1 or more. Leave it out for the "
                    "default."
                )
        if self.seed < 0:
            raise ConfigurationError(f"--seed {self.seed}: allowed is 0 or more.")
        self._check_attention()

    def _check_attention(self) -> None:
        if self.attention not in ATTENTION:
            raise ConfigurationError(f"--attention {self.attention}: allowed is {', '.join(ATTENTION)}.")
        if self.attention == "flash_attention_2" and "fp32" in self.train_dtypes:
            raise ConfigurationError(
                "--attention flash_attention_2 with --train-dtype fp32: flash-attn computes in 16 bits only. Allowed: "
                "bf16, fp16. Use --attention sdpa, or leave fp32 out."
            )

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All (rollout dtype, train dtype)."""
        return [(rollout, train) for rollout in self.rollout_dtypes for train in self.train_dtypes]


def model_folder(model: str) -> str:
    """Return what vLLM and transformers load: a tiny model's folder, or the name as it is.

    Args:
        model: folder, hub name, or `tiny:<architecture>`, which is built on first use.

    Raises:
        ConfigurationError: for an unknown tiny architecture.
    """
    if not model.startswith(TINY):
        return str(Path(model).expanduser()) if Path(model).expanduser().is_dir() else model
    from verl_precision.tiny_model import cached_tiny_model

    return str(cached_tiny_model(model.removeprefix(TINY)))


def described_model(model: str) -> dict[str, Any]:
    """Return the model's `config.json`, from its folder or the hub.

    Args:
        model: as in `OfflineSettings`.

    Raises:
        ConfigurationError: if there is no such model.
    """
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(model_folder(model))[0]
    except ConfigurationError:  # names the tiny models
        raise
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(
            f"--model {model}: no model could be read there ({reason[:160]}). Allowed: a folder with config.json, a "
            f"hub name, or {TINY}qwen3. Check the spelling."
        ) from error


def load_tokenizer(model: str) -> Any:
    """Return the model's tokenizer.

    Args:
        model: as in `OfflineSettings`.

    Raises:
        ConfigurationError: if it has none.
    """
    from transformers import AutoTokenizer

    reason = "it is empty"  # what transformers gives for a folder without one
    try:
        tokenizer = AutoTokenizer.from_pretrained(model_folder(model))
        if len(tokenizer) > 1:
            return tokenizer
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:160]
    raise ConfigurationError(
        f"--model {model}: its tokenizer cannot be loaded ({reason}). Allowed: a folder or hub name with model and "
        "tokenizer. Copy the tokenizer's files beside config.json."
    )


def check_model(settings: OfflineSettings, description: Mapping[str, Any], longest_prompt: int) -> None:
    """Refuse what this model cannot do.

    Args:
        settings: what is asked.
        description: the model's `config.json`.
        longest_prompt: in tokens.

    Raises:
        ConfigurationError: for FP16 where vLLM refuses it, and for responses that do not fit the context.
    """
    model_type = str(description.get("model_type"))
    if "fp16" in settings.rollout_dtypes and model_type in VLLM_REFUSES_FP16:
        raise ConfigurationError(
            f"--rollout-dtype fp16 with --model {settings.model}: vLLM refuses FP16 for model type {model_type!r} "
            f"(and {', '.join(t for t in VLLM_REFUSES_FP16 if t != model_type)}), whose activations overflow it. "
            "Allowed: bf16, fp32. Leave --rollout-dtype fp16 out."
        )
    context = description.get("max_position_embeddings")
    needed = longest_prompt + settings.max_response_tokens
    if context is not None and needed > context:
        raise ConfigurationError(
            f"--max-response-tokens {settings.max_response_tokens}: with the longest prompt ({longest_prompt} tokens) "
            f"a sequence has {needed} tokens, and the model's context {context}. Allowed: up to "
            f"{max(context - longest_prompt, 0)}. Lower it, or leave long prompts out."
        )
