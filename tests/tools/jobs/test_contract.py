"""One contract for the verbs that draw and score: killed and resumed, nothing twice, one folder, one envelope."""

import json
import shlex
import sys
from collections import Counter

import pytest
from cases import cases
from made_up import six_characters, two_tokens

from verl_precision.base.versions import installed_versions
from verl_precision.tools.gap import pairs as mismatch_job
from verl_precision.tools.jobs import job

# verb -> its answers, how often it dies, its results, its options
VERBS = {
    "mismatch": (two_tokens, (4, 15), "table.md summary.json", "--max-prompts 2 --responses 3"),
    "explain": (two_tokens, (2, 11), "explanation.json", "--max-prompts 3"),
    "evaluate": (six_characters, (4, 13), "table.md summary.json",
        "-m tiny:qwen3 --data data.jsonl --context 200 --dtype bf16 --dtype fp16 -n5 --reward reward.py --in-flight 1"),
    "sanity-set": (six_characters, (2, 6), "summary.json kept.parquet",
        "data.jsonl --model tiny:qwen3 -n 10 --reward reward.py --in-flight 1"),
}  # fmt: skip


@pytest.fixture(params=VERBS)
def verb(request, made_up, reward_name, tmp_path, monkeypatch, row, write_rows, typed):
    """Type one of the verbs in an empty folder; return how, and the files that it leaves."""
    made_up.answer, lives, results, options = VERBS[request.param]
    monkeypatch.chdir(tmp_path)
    # Drawing takes seconds; tests/tools/gap/test_pairs.py looks at the figures.
    monkeypatch.setattr(mismatch_job, "write_figures", lambda folder, pairs, title: [])
    write_rows(tmp_path / "data.jsonl", [row(n, reward_model={"ground_truth": str(n)}) for n in range(2)])

    def run(*more: str, lives: int = 0) -> tuple[int, str]:
        made_up.lives = lives
        return typed(request.param, *options.split(), *more)

    return run, tmp_path / "outputs" / request.param / "tiny-qwen3", lives, results.split()


def test_a_job_interrupted_twice_and_cut_ends_as_if_it_were_not(verb, made_up, tmp_path):
    run, folder, deaths, results = verb
    code, shown = run("--output", "whole")
    assert code == 0, shown
    assert " to whole" in shown and results[-1] in shown
    whole, once = list(made_up.requests), (tmp_path / "whole" / "journal.jsonl").read_text()
    made_up.seen.clear()
    journal, place = folder / "journal.jsonl", folder.relative_to(tmp_path)
    for lives in deaths:
        code, shown = run(lives=lives)
        assert code == 130
        assert f"interrupted; every process has ended. Finished work is in {place}; the same command continues" in shown
        assert not any((folder / name).exists() for name in results)
    written = journal.read_bytes()
    journal.write_bytes(written[:-5])
    code, shown = run()
    assert code == 0
    left = written.count(b"\n") - 2  # but for the settings and the torn one
    assert f"resuming: {left} responses are in the journal; an incomplete last line was removed" in shown

    again = Counter(str(each).replace(str(place), "whole") for each in made_up.requests)
    assert (again - Counter(map(str, whole))).total() == 1, "the torn one alone is asked for twice"
    assert not Counter(map(str, whole)) - again, "nothing is left out, and seeds are the same"
    assert sorted(journal.read_text().splitlines()) == sorted(once.splitlines())

    before, made = {name: (folder / name).read_bytes() for name in results}, len(made_up.seen)
    code, shown = run()
    assert code == 0 and "resuming: " in shown and len(made_up.seen) == made, "a finished job starts no engine"
    assert {name: (folder / name).read_bytes() for name in results} == before


def test_results_say_how_they_were_made_and_a_folder_of_another_job_is_refused(verb, monkeypatch):
    run, folder, _, results = verb
    assert run()[0] == 0
    (name,) = (name for name in results if name.endswith(".json"))
    content = json.loads((folder / name).read_text())
    assert content["versions"] == installed_versions() and content["settings"]["seed"] == 0
    assert content["settings"]["model"] == "tiny:qwen3" and not {"output", "in_flight"} & content["settings"].keys()
    assert content["command"] in (sys.argv, shlex.join(sys.argv))
    journal = folder / "journal.jsonl"
    before = journal.read_bytes()
    code, shown = run("--seed", "1")
    assert code == 1 and "begun with other settings (seed: 0 there, 1 now)" in shown
    with monkeypatch.context() as patch:
        patch.setattr(job, "installed_versions", lambda: {"verl": "0"})
        code, shown = run()
        assert "version of verl: '" in shown or "sanity-set" in str(folder), "which goes on with other versions"
    assert journal.read_bytes() == before
    journal.unlink()
    code, shown = run()
    assert code == 1 and any(f"it has {name} and no journal.jsonl" in shown for name in (*results, "logs"))


@pytest.mark.parametrize(("command", "words"), cases(__file__, "refused"))
def test_bad_input_is_refused_leaving_nothing(command, words, tmp_path, monkeypatch, row, write_rows, made_up, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").touch()
    write_rows(tmp_path / "data.jsonl", [row(1, data_source="math_dapo")])
    (tmp_path / "gemma").mkdir()
    (tmp_path / "gemma" / "config.json").write_text('{"model_type": "gemma3"}')
    (tmp_path / "gemma" / "model.safetensors").touch()
    named = {"DATA": "data.jsonl", "VLLM_REFUSES": "gemma"}
    given = [named.get(word, word) for word in command.split()]
    code, shown = typed(*given, "--output", "out")
    assert code == 1 and words in shown, shown
    assert not (tmp_path / "out").exists() and not made_up.seen
