"""Dumps in each framework's own layout give the metrics of the same tokens measured at once; others are refused."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl_precision.losses.settings import ClipRange
from verl_precision.mismatch.phantom import PhantomStatistics
from verl_precision.mismatch.statistics import MismatchStatistics
from verl_precision.tools.tokens import formats

RANDOM = torch.Generator().manual_seed(0)
B, T = 6, 9
MU = -torch.rand(B, T, generator=RANDOM)
SHADOW = (MU + 0.05 * torch.randn(B, T, generator=RANDOM)).clamp(max=0)
PI = (SHADOW + 0.2 * torch.randn(B, T, generator=RANDOM)).clamp(max=0)
MASK = torch.rand(B, T, generator=RANDOM) > 0.3
ADVANTAGES = torch.randn(B, 1, generator=RANDOM).expand(B, T).contiguous()
EACH = list(zip(*(tensor.tolist() for tensor in (PI, MU, MASK, ADVANTAGES, SHADOW)), strict=True))
STEPS = (2, 10)  # in this order, although "10" < "2"


def write_lines(path, records):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def prime_rl(folder):
    """Two ranks; a token of weight 0 is of a frozen model, and has no log-prob of sampling."""
    for step in STEPS:
        for rank in (0, 1):
            records = [{
                "schema_version": 1, "step": step, "rank": rank, "token_ids": [0] * (T + 1), "loss_mask": [*mask, True],
                "trainer_logprobs": [*pi, -3.0], "inference_logprobs": [*mu, 0.0], "advantages": [*a, 1.0],
                "rl_weights": [1.0] * T + [0.0], "ref_kl_weights": [None] * (T + 1), "ce_weights": [0.0] * T + [1.0],
            } for pi, mu, mask, a, _ in EACH[rank::2]]  # fmt: skip
            write_lines(folder / "token_exports" / f"step_{step}" / f"rank_{rank}.jsonl", records)


def nemo_rl(folder):
    """Each value is a slice of one of a batch; there are more rewards than responses, and a response that is out."""
    for step in STEPS:
        out = ([-9.0] * T, [-1.0] * T, [1] * T, [0.0] * T)
        names = "prev_logprobs", "generation_logprobs", "token_loss_mask", "advantages", "sample_loss_mask"
        records = [
            {"rewards": [0.5], "idx": n, **{name: [value] for name, value in zip(names, each, strict=True)}}
            for n, each in enumerate([*((*each[:4], 1.0) for each in EACH), (*out, 0.0)])
        ]
        write_lines(folder / f"train_data_step{step}.jsonl", [*records, {"rewards": [0.5]} | dict.fromkeys(names, [])])


def slime_dump(step):
    samples = [{"log_probs": pi, "rollout_log_probs": mu, "loss_masks": mask.int(), "advantages": a}
               for pi, mu, mask, a in zip(PI, MU, MASK, ADVANTAGES, strict=True)]  # fmt: skip
    return {"format_version": 2, "rollout_id": step, "samples": samples, "dp_shards": [], "raw_reward": [0.5] * B}


def slime(folder):
    (folder / "train_data").mkdir(parents=True)
    for step in STEPS:
        torch.save(slime_dump(step), folder / "train_data" / f"{step}.pt")


def plain_rows(step=STEPS[0], **others):
    names = "trainer_log_probs", "rollout_log_probs", "mask", "advantages"
    return [{"format": 1, "step": step, **dict(zip(names, each, strict=False)), **others} for each in EACH]


def plain(folder):
    for step in STEPS:
        rows = plain_rows(step, reward=0.5)
        write_lines(folder / f"{step}.tokens.jsonl", rows[:2])
        pq.write_table(pa.Table.from_pylist(rows[2:]), folder / f"{step}.tokens.parquet")


@pytest.mark.parametrize("write", [prime_rl, nemo_rl, slime, plain], ids=lambda write: write.__name__)
@pytest.mark.parametrize("chunk", [1 << 19, 2 * T])
def test_dump_gives_the_metrics_of_its_tokens(tmp_path, typed, monkeypatch, write, chunk):
    monkeypatch.setattr(formats, "CHUNK_TOKENS", chunk)
    write(tmp_path / "dump")
    code, said = typed("tokens", tmp_path / "dump", "-o", tmp_path / "out")
    assert code == 0 and (tmp_path / "out" / "report.html").exists()
    assert "(2 steps)" in said and "too short to judge: 28 more measured steps" in said
    expected = MismatchStatistics.measure(PI, MU, MASK, ADVANTAGES).metrics()
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(STEPS)
    for row in rows:
        assert row["data"].pop("critic/score/mean", 0.5) == 0.5
        assert {name: row["data"][name] for name in expected} == pytest.approx(expected, rel=1e-9)
        assert row["data"]["mismatch/nonfinite_trainer_tokens"] == 0, "the alarms of each engine have their metric"


def test_results_are_not_replaced_unasked_and_are_those_of_a_run(tmp_path, typed):
    plain(tmp_path / "dump")
    words = "tokens", tmp_path / "dump", "-o", tmp_path / "out"
    assert typed(*words)[0] == 0
    before = (tmp_path / "out" / "metrics.jsonl").stat()
    assert typed(*words)[0] == 1 and (tmp_path / "out" / "metrics.jsonl").stat() == before
    assert typed(*words, "--force")[0] == 0
    assert "out" in typed("watch", tmp_path / "out", "--once")[1]


def test_shadow_and_clip_give_phantom_clipping(tmp_path, typed):
    rows = [row | {"shadow_log_probs": each[4]} for row, each in zip(plain_rows(), EACH, strict=True)]
    write_lines(tmp_path / "a.tokens.jsonl", rows)
    assert typed("tokens", tmp_path, "-o", tmp_path / "out", "--clip", 0.2, 0.28)[0] == 0
    found = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())["data"]
    clip = ClipRange(False, torch.tensor(0.8).double().log().item(), torch.tensor(1.28).double().log().item())
    expected = PhantomStatistics.measure(PI, SHADOW, MU, MASK, ADVANTAGES, clip).metrics()
    assert expected["phantom/phantom_clipped_fraction"] > 0
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    unsigned = [{name: value for name, value in row.items() if name != "advantages"} for row in rows]
    write_lines(tmp_path / "a.tokens.jsonl", unsigned)
    typed("tokens", tmp_path, "-o", tmp_path / "unsigned", "--clip", 0.2, 0.28)
    found = json.loads((tmp_path / "unsigned" / "metrics.jsonl").read_text())["data"]
    assert "phantom/beta_mean" in found and "phantom/clipped_fraction" not in found, "no sign, no word on clipping"


class Runs:
    """A pickle that runs code when it is opened."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_pickle_that_runs_code_is_opened_only_after_the_word(tmp_path, typed):
    slime(tmp_path)
    torch.save(slime_dump(3) | {"args": Runs(tmp_path / "ran")}, tmp_path / "train_data" / "3.pt")
    code, said = typed("tokens", tmp_path, "-o", tmp_path / "out")
    assert code == 1 and "--allow-pickle" in said and not (tmp_path / "ran").exists()
    assert typed("tokens", tmp_path, "-o", tmp_path / "out", "--allow-pickle")[0] == 0 and (tmp_path / "ran").exists()


@pytest.mark.parametrize(("record", "named"), [
    (plain_rows()[0] | {"format": 2}, "format is 2"),
    (plain_rows()[0] | {"advantage": [0.0] * T}, "`advantage`"),
    (plain_rows()[0] | {"mask": [1]}, "'mask': (1,)"),
    (plain_rows()[0] | {"step": "7"}, "step '7'"),
    ({"format": 1, "step": 2, "trainer_log_probs": [-1.0]}, "`rollout_log_probs` is missing"),
    ({"format": 1, "step": 2, "trainer_log_probs": [[-1.0]], "rollout_log_probs": [-1.0]}, "(1, 1)"),
    ({"format": 1, "step": 2, "trainer_log_probs": "abc", "rollout_log_probs": [-1.0]}, "ValueError"),
    ([1], "line 2"),
])  # fmt: skip
def test_record_of_another_form_is_refused_by_file_line_and_name(tmp_path, typed, record, named):
    write_lines(tmp_path / "a.tokens.jsonl", [plain_rows()[0], record])
    code, said = typed("tokens", tmp_path, "-o", tmp_path / "out")
    assert code == 1 and named in said and "a.tokens.jsonl" in said and ("line 2" in said or named == "ValueError")
    assert not (tmp_path / "out").exists()


def test_folder_of_no_or_two_formats_and_other_versions_are_refused(tmp_path, typed):
    assert "no token dumps" in typed("tokens", tmp_path)[1]
    torch.save(slime_dump(1) | {"format_version": 3}, tmp_path / "1.pt")
    assert "format_version is 3" in typed("tokens", tmp_path, "-o", tmp_path / "out")[1]
    nemo_rl(tmp_path)
    assert "NeMo-RL and slime" in typed("tokens", tmp_path)[1]
