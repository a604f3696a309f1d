"""A model that cannot do the job is refused by name."""

import pytest
from cases import cases

from verl_precision.base.errors import ConfigurationError
from verl_precision.tools.engines import model as model_module
from verl_precision.tools.engines.model import find_model, load_tokenizer, tokenize
from verl_precision.tools.tiny_model import IM_START

CHAT = [{"role": "user", "content": "2+2="}]


@pytest.mark.parametrize(("model", "words"), cases(__file__, "REFUSED"))
def test_a_model_that_is_not_there(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for folder in ("empty", "weightless"):
        (tmp_path / folder).mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    with pytest.raises(ConfigurationError, match=words):
        find_model(model)


def test_weights_and_config_have_a_fingerprint(tmp_path):
    def fingerprint(config: str, weights: bytes) -> str:
        (tmp_path / "config.json").write_text(config)
        (tmp_path / "model.safetensors").write_bytes(weights)
        return find_model(str(tmp_path)).fingerprint

    found = [fingerprint(*given) for given in (("{}", b"a"), ("{}", b"b"), ('{"a": 1}', b"a"), ("{}", b"a"))]
    assert len(set(found)) == 3 and found[0] == found[3]
    with pytest.raises(ConfigurationError, match="its tokenizer cannot be loaded"):
        load_tokenizer(str(tmp_path))


def test_chats_go_through_the_template_and_text_does_not(monkeypatch):
    model = find_model("tiny:qwen3")
    assert model.config["model_type"] == "qwen3"
    tokenizer = load_tokenizer(model.name)
    chat, text = tokenize([CHAT, "2+2="], model)
    assert tokenizer.decode(text) == "2+2=" and len(text) == 4
    assert tokenizer.decode(chat).endswith(f"{IM_START}assistant\n")
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert chat == tuple(ids), "jobs of the former version continue: their prompts were made this way"
    with pytest.raises(ConfigurationError, match=r"prompt 1 \(''\) has no tokens"):
        tokenize([CHAT, ""], model)
    tokenizer.chat_template = None
    monkeypatch.setattr(model_module, "load_tokenizer", lambda name: tokenizer)
    with pytest.raises(ConfigurationError, match="has no chat template"):
        tokenize(["a", CHAT], model)
