"""The recipe's own reader of the stall: gains, the step at which it is read, and the alarms, from known curves."""

import pytest

from verl_precision.tools.runs.read import read_runs


@pytest.fixture
def reader(load_script):
    return load_script("recipes/phantom_clipping/read_stall.py")


@pytest.fixture
def runs(write_run, tmp_path):
    """Write a stalled arm, a cured one that reaches half of the gain when its mean does, and a matched one."""

    def write(arm: str, seed: int, rewards: list[float], clipped: float) -> None:
        # the last as 0.1 wrote it
        same = {"phantom/final_token_clip_fraction": clipped, "phantom/fraction": clipped}
        write_run(arm, seed, [{"critic/score/mean": reward, **same} for reward in rewards])

    for seed in (0, 1):
        write("clipped", seed, [-8.0] * 30 + [-7.6] * 30, clipped=0.8)
        write("shadow", seed, [-8.0] * 20 + [-3.0] * 40, clipped=0.0)
    write("fp32", 0, [-8.0] * 10 + [-1.0] * 50, clipped=0.0)
    return read_runs([tmp_path])


def test_the_stall_is_read_where_the_cured_runs_have_half(reader, runs):
    text = reader.tables(runs)
    # mean of nine: -8 + 5 k/9 passes -4 with k = 8 of its nine steps behind step 20
    assert "At step 28 the median of 2 cured runs" in text
    assert "| `clipped` | 0%, 0% |" in text and "| `fp32` | 88% |" in text and "| `shadow` | 56%, 56% |" in text
    assert "| `clipped` | 0 | -8.00 | -7.60 | none | 80% |" in text
    rows = {line.split("|")[1].strip(" `"): line for line in text.splitlines() if "| 0 |" in line}
    assert "phantom_clipping 5" in rows["clipped"] and rows["fp32"].endswith("| none |")
