"""The figure of a comparison, read from matplotlib's objects."""

from pathlib import Path

from matplotlib.colors import to_hex
from matplotlib.image import imread

from verl_precision.tools.runs.compare.summary import draw_comparison
from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.read import REWARD, Run
from verl_precision.tools.show.colours import COLOURS
from verl_precision.tools.show.figures import write_png


def run_of(name: str, rewards=(0.0, 1.0), k3=(1e-5, 1e-4), **more) -> Run:
    measured = enumerate(zip(rewards, k3, strict=True), start=1)
    rows = [{"step": n, REWARD: reward, "mismatch/k3_kl": each, **more} for n, (reward, each) in measured]
    return Run(name, Path(name), rows)


def drawn(*runs: Run):
    return draw_comparison(recorded_content(runs))


def lines_of(axes) -> list[tuple[str, list[float]]]:
    return [(to_hex(line.get_color()), list(line.get_ydata())) for line in axes.lines]


def test_seeds_are_one_line_at_the_mean_and_a_shade():
    runs = [run_of(f"bf16/seed_{seed}", (0.0, seed)) for seed in (1, 2, 6)] + [run_of("fp16", (0.5, 0.5))]
    figure = drawn(*runs)
    reward, k3 = figure.axes
    assert lines_of(reward) == [(COLOURS[0], [0, 3]), (COLOURS[1], [0.5, 0.5])]
    (shade,) = reward.collections
    assert {tuple(point) for point in shade.get_paths()[0].vertices} == {(1, 0), (2, 1), (2, 6)}
    assert to_hex(shade.get_facecolor()[0]) == COLOURS[0] and k3.get_yscale() == "log" and len(k3.lines) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["bf16", "fp16"]


def test_a_panel_that_no_run_has_measured_is_left_out_and_zeros_alone_are_on_a_linear_axis():
    clipped = {"phantom/phantom_clipped_fraction": 0.25}
    _, k3, phantom = drawn(run_of("a", k3=(0.0, 0.0), **clipped), run_of("b", k3=(0.0, 0.0))).axes
    assert k3.get_yscale() == "linear" and lines_of(phantom) == [(COLOURS[0], [0.25, 0.25])]


def test_of_more_arms_than_colours_no_two_look_alike():
    axes, _ = drawn(*(run_of(f"arm{number}") for number in range(20)), run_of("bf16")).axes
    assert len({(to_hex(line.get_color()), line.get_linestyle()) for line in axes.lines}) == 21


def test_it_is_written_over_an_earlier_one(tmp_path):
    path = tmp_path / "comparison.png"
    path.write_text("an earlier one")
    write_png(path, drawn(run_of("bf16")), "a title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert imread(path)[0, 0, 3] == 0, "no ground: it is put on a white page or a dark one"
