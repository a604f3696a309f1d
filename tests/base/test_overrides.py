"""Hydra reads back what was written, whatever characters it has; what no config can have is refused."""

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_precision.base.errors import ConfigurationError
from verl_precision.base.overrides import quoted

PARSER = OverridesParser.create()
# Characters that mean something to Hydra, OmegaConf, YAML or a shell, among any others.
ODD = "'\"\\\\''$#@~&%:;,=+-/. \t\n\r[]{}()<>*?|!äé实\x7f\x85\u2028\U0001f600"
TEXTS = st.text(st.sampled_from(ODD) | st.characters())
FOLDERS = [
    *("/data/Läufe/run", "/data/实验/run", "/a b", "/a'b", '/a"b', "/a\\'b", "/a\\", "\\\\'\\", "'", "\\", "", " "),
    *("-x", "/pbs.12[3].srv", "/a\nb", "/a,b=c{d}(e)", "$x", "null", "true", "1e5", "[1]", "a: b", "# c", "~", "????"),
]


def refused(text: str) -> bool:
    return "${" in text or "\0" in text or text == "???" or any("\ud800" <= each <= "\udfff" for each in text)


@settings(max_examples=300)
@example("a\\${x}")
@example("/tmp/${oc.env:HOME}/run")
@example("???")
@example("a\0b")
@example("a\udce4b")
@given(TEXTS)
def test_hydra_reads_what_was_written(text):
    if refused(text):
        with pytest.raises(ConfigurationError, match="cannot be a setting"):
            quoted(text)
    else:
        override = PARSER.parse_override(f"++a.b={quoted(text)}")
        assert override.value() == text and override.key_or_group == "a.b"


def test_a_config_has_it_in_every_process(tmp_path):
    """verl resolves its config in place, and hands it to its workers as plain containers."""
    (tmp_path / "config.yaml").write_text("{}\n")
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("config", overrides=[f"+folder_{at}={quoted(text)}" for at, text in enumerate(FOLDERS)])
    assert [*config.values()] == FOLDERS
    OmegaConf.resolve(config)
    again = OmegaConf.create(OmegaConf.to_container(config, resolve=True))
    assert [*OmegaConf.create(OmegaConf.to_yaml(again)).values()] == FOLDERS
