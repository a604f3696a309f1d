"""One bad run does not take the others: whatever its files are or hold, it says so, and the others are shown whole."""

import gzip
import json
import os
import socket
from pathlib import Path

import pytest
import yaml
from starlette.testclient import TestClient

from verl_precision.tools.kept_tokens.kept_file import FOLDER
from verl_precision.tools.runs.content import Live
from verl_precision.tools.runs.read import REWARD, sources_in
from verl_precision.tools.runs.server import application

STEPS = [1, 2, 3, 4]
LAYER = "mismatch/routing_agreement/layer_"


def row(step, /, **more) -> bytes:
    """Return a row whose step and values are written as they are given, JSON or not."""
    data = {REWARD: 0.25, "mismatch/k3_kl": 1e-4, "timing_s/step": 2.0} | more
    values = ",".join(f"{json.dumps(key)}:{value}" for key, value in data.items())
    return f'{{"step":{step},"data":{{{values}}}}}\n'.encode()


def every(**more) -> bytes:
    """Return the rows of a run of which each has these values."""
    return b"".join(row(step, **more) for step in STEPS)


HEALTHY = every()
THREE = HEALTHY[: HEALTHY.index(row(4))]


def linked(target: str):
    return lambda path: path.symlink_to(target)


def listening(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        os.chdir(path.parent)  # the name of a socket is short
        one.bind(path.name)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 3 * 2**30)


# What stands in place of a file, whose name is said.
NO_FILES = {
    "fifo": os.mkfifo,
    "zeros without end": linked("/dev/zero"),
    "terminal": linked("/dev/tty"),
    "folder": Path.mkdir,
    "link to a folder": linked("."),
    "nothing": linked("/nonexistent/file"),
    "itself": lambda path: path.symlink_to(path),
    "socket": listening,
    "more than is read": sparse,
}
# A line after three healthy ones, which is the fourth.
FOURTH_LINES = {
    "a number of 500 digits": row(4, a="7" * 500),
    "deep brackets": row(4, a="[" * 90_000 + "]" * 90_000),
    "step nan": row("NaN"),
    "step beyond whole numbers": row(2**53),
    "step in words": row('"four"'),
    "no step": b'{"data":{"a":1}}\n',
    "data null": b'{"step":4,"data":null}\n',
    "null": b"null\n",
    "two rows": row(4)[:-1] + b"," + row(5),
    "latin-1": '{"step":4,"data":{"ä":1}}\n'.encode("latin-1"),
    "zeros": b"\0" * 512 + b"\n",
    "too long": row(4, a="1" + " " * 2**24),
}
# Of a whole file, the line at fault.
WHOLE_FILES = {
    "utf-16": (HEALTHY.decode().encode("utf-16"), 1),
    "gzip": (gzip.compress(HEALTHY) + b"\n", 1),
    "a document in place of rows": (b"[" + HEALTHY.replace(b"\n", b",")[:-1] + b"]\n", 1),
    "after blank lines": (HEALTHY + b"\n\n\nrubbish\n", 8),
    "after more rows than are parsed at once": (b"".join(map(row, range(1, 1203))) + row("NaN") + row(1204), 1203),
}
# Unusual, and rows all the same.
READABLE = {
    "no time is finite": every(**{"timing_s/step": "Infinity"}),
    "rewards of either sign": b"".join(row(each, **{REWARD: f"{'-' * (each % 2)}1e308"}) for each in range(1, 900)),
    "rewards without end": b"".join(row(each, **{REWARD: f"{'-' * (each % 2)}Infinity"}) for each in range(1, 900)),
    "no reward": b"".join(row(each, **{REWARD: "NaN"}) for each in range(1, 900)),
    "1e999": every(**{"mismatch/k3_kl": "1e999"}),
    "a step among the data": every(step="NaN"),
    "half a character": every(**{"\ud800": 1}),
    "a key that a terminal obeys": every(**{"\x1b]0;owned\x07": 1}),
    "layer in words": every(**{LAYER + "first": 1, LAYER: 1}),
    "layer beyond numbers": every(**{LAYER + "9" * 5000: 1}),
    "windows": HEALTHY.replace(b"\n", b"\r\n"),
    "backwards": b"".join(HEALTHY.splitlines(keepends=True)[::-1]),
    "everything twice": HEALTHY + HEALTHY,
    "blank lines": HEALTHY.replace(b"\n", b"\n \t\n\n"),
    "a row that is being written": HEALTHY + row(5)[:20],
    "zeros after a crash": HEALTHY + b"\0" * 4096,
    "steps below zero": b"".join(row(step - 9) for step in STEPS) + HEALTHY,
    "a scale below zero": every(**{"precision/loss_scale": -1, "precision/skipped_steps": "1e308"}),
    "a canary of infinity": every(**{"weight_sync/canary_gap": "Infinity", "weight_sync/canary_bound": "NaN"}),
}


def hydra(name: str, content) -> dict[str, bytes]:
    return {f".hydra/{name}": content if isinstance(content, bytes) else yaml.safe_dump(content).encode()}


def run_of(recipe, choices=("1x8_h100", "grpo"), schema="file", place: object = "{}/recipe") -> dict:
    sources = [{"schema": schema, "path": place}]
    runtime = {"config_sources": sources, "choices": dict(zip(("scale", "estimator"), choices, strict=True))}
    return {"hydra": {"job": {"config_name": recipe}, "runtime": runtime}}


KEPT = f"{FOLDER}/step_1.parquet"
CURVE = b"precision,estimator,step,reward\n"
# Beside healthy metrics: what is written, and the name of the file that is said; none where nothing is amiss.
BESIDE = {
    "config cut": (hydra("config.yaml", b"trainer: {total_training_steps: 1"), "config.yaml"),
    "config not in UTF-8": (hydra("config.yaml", b"\xff\xfe\x00a"), "config.yaml"),
    "config deep in brackets": (hydra("config.yaml", b"[" * 60_000), "config.yaml"),
    "config that grows": (hydra("config.yaml", b"a: &a [1]\nb: [*a, *a]\n"), "config.yaml"),
    "config that calls": (hydra("config.yaml", b"a: !!python/object/apply:os._exit [3]\n"), "config.yaml"),
    "config a list": (hydra("config.yaml", [1]), None),
    **{
        f"{steps!r:.20} steps": (hydra("config.yaml", {"trainer": {"total_training_steps": steps}}), None)
        for steps in (True, -5, 0, 1.5, "ten", [3], 10**400, 2**60, None)
    },
    "hydra cut": (hydra("hydra.yaml", b'hydra: {job: {config_name: "re'), "hydra.yaml"),
    "hydra without a job": (hydra("hydra.yaml", {"hydra": {"runtime": run_of("a")["hydra"]["runtime"]}}), None),
    "sources of words": (hydra("hydra.yaml", {"hydra": {"runtime": {"config_sources": ["word", None, 3]}}}), None),
    "a path with a zero": (hydra("hydra.yaml", run_of("recipe", place="/a\0b")), None),
    "a recipe with a long name": (hydra("hydra.yaml", run_of("r" * 5000)), "File name too long"),
    "choices that are lists": (hydra("hydra.yaml", run_of("recipe", ([1], [2]))) | {"expected.csv": CURVE}, None),
    **{
        f"expected {name}": (hydra("hydra.yaml", run_of("recipe")) | {"expected.csv": text}, said)
        for name, text, said in (
            ("rubbish", b"rubbish\n1,2\n", "expected.csv"),
            ("step nan", CURVE + b"fp16,grpo,nan,1\n", "expected.csv"),
            ("not in UTF-8", CURVE + b"fp16,gr\xffpo,1,1\n", "expected.csv"),
            ("in a field without end", CURVE + b'"' + b"a" * 200_000, "expected.csv"),
        )
    },
    "log without end": ({"a.log": b"Training Progress:  1%|  | 1/" + b"9" * 5000}, None),
    "log of bytes": ({"a.log": bytes(range(256)) * 50}, None),
    "kept tokens": ({KEPT: b"PAR1" + b"\0" * 50 + b"\xff\xff\xff\x7fPAR1"}, "step_1.parquet"),
}
# In place of metrics.jsonl: what is the run's only file, and what is said of it; none where it is no run's file.
ALONE = {
    "log of steps without end": ({"a.log": b"step:" + b"9" * 400 + b" - a:1\n"}, None),
    "log with a step among the values": ({"a.log": b"step:1 - step:nan - critic/score/mean:0.5\n"}, None),
    "log with a line too long": ({"a.log": b"step:1 - a:1\n" + b"x" * (2**24 + 9)}, "line 2 has more than"),
    "log of bytes": ({"a.log": b"step:1 - critic/score/mean:0.5\n" + bytes(range(256))}, None),
    "memory of a process": ({"a.jsonl": linked("/proc/self/mem")}, "it cannot be read"),
    "two files of metrics": ({"a.jsonl": HEALTHY, "b.jsonl": HEALTHY}, None),
}
CASES = {
    **{f"line: {name}": ({"metrics.jsonl": THREE + line}, "line 4") for name, line in FOURTH_LINES.items()},
    **{f"file: {name}": ({"metrics.jsonl": data}, f"line {at}:") for name, (data, at) in WHOLE_FILES.items()},
    **{f"metrics: {name}": ({"metrics.jsonl": make}, "metrics.jsonl") for name, make in NO_FILES.items()},
    **{f"alone: {name}": case for name, case in ALONE.items()},
    **{f"readable: {name}": ({"metrics.jsonl": data}, None) for name, data in READABLE.items()},
    **{f"beside: {name}": ({"metrics.jsonl": HEALTHY} | files, said) for name, (files, said) in BESIDE.items()},
    **{
        f"beside: {file}: {name}": ({"metrics.jsonl": HEALTHY, file: make}, FOLDER if FOLDER in file else None)
        for file in ("a.log", ".hydra/config.yaml", ".hydra/hydra.yaml", "recipe/expected.csv", KEPT)
        for name, make in NO_FILES.items()
    },
}  # fmt: skip
# A hole in a file of kept tokens or in a log is read as what it holds; a link that leads nowhere is no file.
for file in (".hydra/config.yaml", ".hydra/hydra.yaml"):
    CASES[f"beside: {file}: more than is read"] = ({"metrics.jsonl": HEALTHY, file: sparse}, file)
CASES[f"beside: {KEPT}: nothing"] = ({"metrics.jsonl": HEALTHY, KEPT: NO_FILES["nothing"]}, None)
CASES[f"beside: {FOLDER}: a file"] = ({"metrics.jsonl": HEALTHY, FOLDER: b"x"}, FOLDER)


BAD = {f"run{number:03}": case for number, case in enumerate(CASES)}


def build(folder: Path, files: dict) -> None:
    folder.mkdir(parents=True)
    for name, content in files.items():
        path = folder / ("recipe" if name == "expected.csv" else "") / name
        path.parent.mkdir(exist_ok=True)
        if isinstance(content, bytes):
            path.write_bytes(content.replace(b"{}/recipe", os.fsencode(folder / "recipe")))
        else:
            content(path)
    if "expected.csv" in files:
        (folder / "recipe" / "recipe.yaml").write_text("a: 1")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder of every bad run, and of two good ones, the first and the last."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("runs")
    for name, case in BAD.items():
        build(folder / name, CASES[case][0])
    for name in ("good", "weighed"):
        build(folder / name, {"metrics.jsonl": HEALTHY})
    os.chdir(before)
    return folder


def asked(*paths: Path) -> TestClient:
    return TestClient(application(Live(paths, pause_seconds=0), "token"), base_url="http://localhost")


def is_unreadable(case: str) -> bool:
    return CASES[case][1] is not None and not case.startswith("beside")


def test_the_page_shows_every_run_and_says_what_is_wrong_until_it_is_right(runs):
    client = asked(runs)
    for steps in (STEPS, STEPS, [*STEPS, 5]):  # it stays said while the others go on
        (runs / "good" / "metrics.jsonl").write_bytes(HEALTHY + row(5) * (len(steps) - 4))
        answer = client.get("/token/state")
        assert answer.status_code == 200, answer.text
        curves = answer.json()["curves"]
        found = {Path(run["path"]).relative_to(runs).parts[0]: run for run in answer.json()["runs"]}
        assert curves[found["good"]["curve"]]["reward/reward"][0] == steps
        assert {found[name]["problem"] for name in ("good", "weighed")} == {""}
        wrong = []
        for name, case in BAD.items():
            files, words = CASES[case]
            run = found.get(name, {"problem": "", "standing": {"state": ""}})  # a folder without a run's file is none
            said = words in run["problem"] if words else not run["problem"]
            right = said and (run["standing"]["state"] == "unreadable") == is_unreadable(case)
            if "metrics.jsonl" in files and not is_unreadable(case):
                shown = curves[run["curve"]]["reward/reward"][0]
                right &= {*STEPS} <= {*shown} or len(shown) > 100
            wrong += [] if right else [(case, run["standing"]["state"], run["problem"])]
        assert wrong == []
    (runs / "good" / "metrics.jsonl").write_bytes(HEALTHY)


def test_every_request_is_answered_in_words(runs):
    client = asked(runs)
    for run in [each for each in client.get("/token/state").json()["runs"] if FOLDER in each["problem"]]:
        for kind in ("responses", "response"):
            assert client.get(f"/token/{kind}?run={run['id']}&at=0").status_code < 500


def test_the_terminal_shows_every_run(runs, typed):
    code, said = typed("watch", runs, "--once")
    assert code == 1 and "\x1b" not in said and "weighed" in said
    for case in filter(is_unreadable, CASES):
        assert CASES[case][1] in said
    assert said.count("unreadable") >= len([*filter(is_unreadable, CASES)])


def test_a_report_has_every_run_that_can_be_read(runs, typed, tmp_path):
    names = list(BAD)
    for start in range(0, len(names), 7):  # a report has eight colours
        some = {name: BAD[name] for name in names[start : start + 7] if sources_in(runs / name)}
        code, said = typed("report", runs / "good", *(runs / name for name in some), "--output", tmp_path / "page.html")
        text = (tmp_path / "page.html").read_text()
        unread = [case for case in some.values() if is_unreadable(case)]
        assert "wrote" in said and '/good/metrics.jsonl"' in text and all(CASES[case][1] in said for case in unread)
        assert code == 1 or not unread


def test_a_folder_whose_name_a_terminal_would_obey(tmp_path, typed):
    name = "\x1b]0;owned\x07\r\u202e"
    build(tmp_path / name, {"metrics.jsonl": HEALTHY})
    build(tmp_path / os.fsdecode(b"\xff\xfe"), {"metrics.jsonl": THREE + b"rubbish\n"})
    build(tmp_path / "good", {"metrics.jsonl": HEALTHY})
    code, said = typed("watch", tmp_path, "--once")
    assert code == 1 and "\\x1b" in said and not {*name} & {*said} - {*"]0;owned"}
    assert len(asked(tmp_path).get("/token/state").json()["runs"]) == 3
    code, said = typed("report", tmp_path, "--output", tmp_path / "page.html")
    assert code == 1 and "\x1b" not in said + (tmp_path / "page.html").read_text()
