"""What a teacher's signal is made of: tables of a teacher that is the student, and a figure of a student nearby.

    python recipes/distillation/read_noise.py outputs/distillation/*-* --figure docs/distillation.png

The first table has means over all steps. A student's distance is KL(student || teacher) over the whole vocabulary, from
forward passes in FP32, on responses that the teacher samples: before the first update and after the last.
"""

from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_precision.tools.runs.read import Run, read_runs
from verl_precision.tools.show.colours import PRECISIONS
from verl_precision.tools.show.figures import new_figure, style
from verl_precision.tools.show.scripts import folders_of, parser_for_runs
from verl_precision.tools.show.tables import markdown_table, number_text

TEACHER, NEAR = Path("outputs/collapse/task/logits_20"), Path("outputs/distillation/near")
K3, SQUARE, FLOOR = "mismatch/k3_kl", "distillation/teacher_gap_square_mean", "distillation/floor_square_mean"
SAMPLED = {
    "2 k3": K3, "signal": SQUARE, "floor": FLOOR, "noise share": "distillation/noise_share",
    "sign is noise": "distillation/sign_noise_fraction", "equal": "distillation/teacher_equal_fraction",
    "teacher and rollout": "distillation/teacher_rollout_square_mean",
}  # fmt: skip
TRUNCATED = {"clamped at 0": "distillation/clamped_fraction", "size of the KL": "distillation/loss_abs_mean"}
QUESTIONS, TOKENS = 16, 130


def mean_of(run: Run, metric: str) -> float | None:
    """Return the mean of a metric over the steps that have it; None without one."""
    values = [step[metric] for step in run.rows if metric in step]
    return sum(values) / len(values) if values else None


def table(runs: dict[str, Run]) -> str:
    """Return a row for each run as Markdown."""
    columns = SAMPLED | TRUNCATED
    rows = []
    for arm, run in runs.items():
        values = [mean_of(run, metric) for metric in columns.values()]
        values[0] = None if values[0] is None else 2 * values[0]
        rows.append([arm, *("" if value is None else number_text(value) for value in values)])
    return "\n".join(markdown_table(["run", *columns], rows))


@torch.no_grad()
def distances(students: dict[str, Path]) -> dict[str, float]:
    """Return KL(student || teacher) of each student in nats per token, on the same responses of the teacher."""
    torch.manual_seed(0)

    def log_probs_of(folder: Path, token_ids: Tensor) -> Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return model(token_ids).logits[:, 1:-1].double().log_softmax(-1)

    teacher = AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float32)
    questions = torch.tensor([[2 + question, 1] for question in range(QUESTIONS)])  # a question and "="
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    token_ids = teacher.generate(questions, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **sampling)
    of_teacher = log_probs_of(TEACHER, token_ids)
    found = {}
    for name, folder in students.items():
        of_student = log_probs_of(folder, token_ids)
        found[name] = (of_student.exp() * (of_student - of_teacher)).sum(-1).mean().item()
    return found


def draw(runs: dict[str, Run]) -> Figure:
    """Return the truncated KL by step: of the students nearby, and dotted where the teacher is the student."""
    figure = new_figure(6, 4)
    axes, size = figure.subplots(), TRUNCATED["size of the KL"]
    for arm, run in runs.items():
        near, _, precision = arm.partition("_")
        if near == "near":
            line = [step[size] for step in run.rows]
            axes.plot(
                range(1, len(line) + 1), line, color=PRECISIONS[precision], label=f"{precision}: a student nearby"
            )
        elif arm in ("bf16_topk", "fp16_topk"):
            label = f"{near}: the teacher is the student"
            axes.axhline(mean_of(run, size), color=PRECISIONS[near], linestyle=":", label=label)
    style(axes, "step", "mean size of the truncated KL, nats per token")
    axes.set_yscale("log")
    axes.legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    """Read the folders, print and draw."""
    arguments = parser_for_runs(__doc__, "of a comparison, with <arm>/metrics.jsonl in it").parse_args()
    runs = {run.path.parent.name: run for run in read_runs(folders_of(arguments))}
    print(table(runs))
    near = {arm: run for arm, run in runs.items() if arm.startswith("near")}
    if near:
        students = {"before": NEAR, **{arm: weights_of(run) for arm, run in near.items()}}
        rows = [[name, number_text(distance)] for name, distance in distances(students).items()]
        print("", *markdown_table(["student", "KL to the teacher"], rows), sep="\n")
    if near and arguments.figure:
        draw(runs).savefig(arguments.figure, dpi=100)


def weights_of(run: Run) -> Path:
    """Return the folder of the weights that a run has saved at its end."""
    return max(run.path.parent.glob("checkpoints/global_step_*/actor/huggingface"))


if __name__ == "__main__":
    main()
