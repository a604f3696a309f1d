"""A folder belongs to one analysis: it goes on with the same settings, and with nothing else."""

import re

import pytest
from made import VERSIONS, settings_of

from verl_precision.errors import ConfigurationError
from verl_precision.offline.store import Store, create_or_resume, read_rows, write_rows

PROMPTS = [[5, 6], [7]]


def test_what_is_opened_is_what_was_made(store):
    assert Store.open(store.folder) == store
    assert create_or_resume(store.folder, settings_of(), PROMPTS, VERSIONS) == store
    assert store.total_responses == 6
    assert store.shards == [range(0, 4), range(4, 6)]


@pytest.mark.parametrize(
    ("changes", "prompts", "versions", "words"),
    [
        ({"seed": 1}, PROMPTS, VERSIONS, "seed (there 0, now 1)"),
        ({"responses": 4, "attention": "flash_attention_2"}, PROMPTS, VERSIONS, "responses (there 3, now 4)"),
        ({"rollout_dtypes": ("bf16",)}, PROMPTS, VERSIONS, "rollout_dtypes (there ['fp16', 'bf16'], now ['bf16'])"),
        ({}, [[5, 6], [8]], VERSIONS, "the prompts' tokens"),
        ({}, PROMPTS, {"verl": "2"}, "verl (there '1', now '2')"),
    ],
)
def test_other_settings_are_refused(store, changes, prompts, versions, words):
    before = (store.folder / "settings.json").read_text()
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        create_or_resume(store.folder, settings_of(**changes), prompts, versions)
    assert (store.folder / "settings.json").read_text() == before


@pytest.mark.parametrize("name", ["thesis.tex", "settings.json"])
def test_what_somebody_else_made_is_left_alone(tmp_path, name):
    (tmp_path / name).write_text('{"mine": true}')
    with pytest.raises(ConfigurationError, match="Nothing was written"):
        create_or_resume(tmp_path, settings_of(), PROMPTS, VERSIONS)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="Nothing was written"):
        create_or_resume(tmp_path / "file", settings_of(), PROMPTS, VERSIONS)


def test_an_empty_folder_will_do(tmp_path):
    create_or_resume(tmp_path, settings_of(), PROMPTS, VERSIONS)
    assert (tmp_path / "settings.json").is_file()


def test_rows_come_back_and_nothing_half_written_stays(tmp_path):
    rows = [{"response": 0, "log_probs": [-0.5, -1.25]}, {"response": 1, "log_probs": []}]
    path = tmp_path / "a" / "00000.parquet"
    write_rows(path, rows)
    assert read_rows(path) == rows
    with pytest.raises(Exception, match="object"):
        write_rows(path, [{"response": object()}])
    assert read_rows(path) == rows, "a write that fails leaves what was there"
