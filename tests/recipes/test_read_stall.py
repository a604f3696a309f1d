"""The recipe's own reader of the stall: gains, the step at which it is read, and the alarms, from known curves."""

import json

import pytest

from verl_precision.tools.runs.read import read_runs

STEPS = 60


@pytest.fixture
def reader(load_script):
    return load_script("recipes/phantom_clipping/read_stall.py")


@pytest.fixture
def runs(tmp_path):
    """Write a stalled arm, a cured one that reaches half of the gain when its mean does, and a matched one."""

    def write(arm: str, seed: int, reward, clipped: float) -> None:
        folder = tmp_path / arm / f"seed_{seed}"
        folder.mkdir(parents=True)
        rows = (
            {
                "critic/score/mean": reward(step),
                "phantom/final_token_clip_fraction": clipped,
                "phantom/fraction": clipped,  # as 0.1 wrote it
            }
            for step in range(1, STEPS + 1)
        )
        lines = [json.dumps({"step": step, "data": row}) for step, row in enumerate(rows, 1)]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    for seed in (0, 1):
        write("clipped", seed, lambda step: -8 + 0.4 * (step > 30), clipped=0.8)
        write("shadow", seed, lambda step: -8.0 if step <= 20 else -3.0, clipped=0.0)
    write("fp32", 0, lambda step: -8.0 if step <= 10 else -1.0, clipped=0.0)
    return read_runs([tmp_path])


def test_the_stall_is_read_where_the_cured_runs_have_half(reader, runs):
    text = reader.tables(runs)
    # mean of nine: -8 + 5 k/9 passes -4 with k = 8 of its nine steps behind step 20
    assert "At step 28 the median of 2 cured runs" in text
    assert "| `clipped` | 0%, 0% |" in text and "| `fp32` | 88% |" in text and "| `shadow` | 56%, 56% |" in text
    assert "| `clipped` | 0 | -8.00 | -7.60 | none | 80% |" in text
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if "| 0 |" in line}
    assert "phantom_clipping 5" in rows["clipped"] and rows["fp32"].endswith("| none |")
