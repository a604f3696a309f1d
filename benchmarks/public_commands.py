"""The commands that a repository's launch scripts start verl with, as JSON lines. Nothing is started.

    python benchmarks/public_commands.py CHECKOUT
    python benchmarks/public_commands.py CHECKOUT --name "verl v0.9.0" --output commands.jsonl
    python benchmarks/public_commands.py CHECKOUT --set HDFS_ROOT=/data --set MODEL_PATH=/data/model

Each *.sh that names a main of verl is run by bash in a throw-away copy of the checkout, with a time limit and an empty
home. PATH holds a few text tools, and stand-ins for python, ray and other launchers, which record arguments. Every
other program (rm, pkill, git, pip, wget, nvidia-smi, ...) is recorded and does nothing (stand_ins.bash). This is not
a sandbox: a script can still write to a file that it names. Read untrusted scripts first, or run them in a container.
A script that has started nothing is run again with the variables of --set, since some scripts need a path.

A line is {"source": "NAME path/of/script.sh", "words": ["python3", "-m", "verl.trainer.main_ppo", ...]}.
`benchmarks/check_commands.py` puts such files through `verl-precision check`.
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

MAIN = re.compile(r"(?:^|[./])(?:main_\w+|\w+_main)(?:\.py)?$")
NAMES_A_MAIN = re.compile(r"\b(?:main_\w+|\w+_main)\b")
LAUNCHERS = ("python", "python3", "ray", "torchrun", "accelerate", "deepspeed", "srun", "uv", "numactl", "nsys")
TEXT_TOOLS = (
    *("awk", "basename", "bash", "cat", "cut", "date", "dirname", "env", "expr", "grep", "head", "hostname", "ls"),
    *("mktemp", "nohup", "nproc", "readlink", "realpath", "sed", "seq", "sort", "tail", "timeout", "tr", "uname"),
    *("uniq", "wc", "whoami", "xargs"),
)
STAND_IN = """#!{bash}
[[ "$*" != *torch_npu* ]] || exit 1  # scripts test for an NPU by importing torch_npu
printf '%s\\0' "${{0##*/}}" "$@" >"$(mktemp "$STAND_INS_CALLS/$EPOCHREALTIME.XXXXXX")"
"""


def main() -> None:
    arguments = parse()
    checkout = arguments.checkout.resolve()
    scripts = sorted(each for each in checkout.rglob("*.sh") if starts_a_main(each))
    print(f"{len(scripts)} scripts name a main", file=sys.stderr)
    silent, lines = [], []
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(Path(folder).resolve(), checkout)
        variables = dict(each.split("=", 1) for each in arguments.set)
        for script in (each.relative_to(checkout) for each in scripts):
            found = sandbox.commands(script, arguments.seconds) or (
                sandbox.commands(script, arguments.seconds, variables) if variables else []
            )
            source = f"{arguments.name or checkout.name} {script}"
            lines += [json.dumps({"source": source, "words": words}, ensure_ascii=False) for words in found]
            if not found:
                silent.append(source)
    text = "".join(f"{line}\n" for line in lines)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    print(f"{len(lines)} commands. Scripts without one: {len(silent)}", *silent, sep="\n  ", file=sys.stderr)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="folder of a repository with launch scripts")
    parser.add_argument("--name", help="name of the sources (default: the folder's name)")
    parser.add_argument("--output", type=Path, metavar="FILE.jsonl", help="default: the terminal")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a variable that scripts need")
    parser.add_argument("--seconds", type=float, default=10, help="time limit of a script (default 10)")
    return parser.parse_args()


def starts_a_main(script: Path) -> bool:
    return script.is_file() and bool(NAMES_A_MAIN.search(script.read_text(encoding="utf-8", errors="replace")))


class Sandbox:
    """A copy of the checkout, an empty home, and stand-ins for the programs."""

    def __init__(self, root: Path, checkout: Path):
        self.root, self.checkout = root, checkout
        self.copy, self.home, self.calls = root / "checkout", root / "home", root / "calls"
        shutil.copytree(checkout, self.copy, symlinks=True, ignore=shutil.ignore_patterns(".git"))
        self.home.mkdir()
        programs = root / "programs"
        programs.mkdir()
        for tool in TEXT_TOOLS:
            (programs / tool).symlink_to(program(tool))
        for launcher in LAUNCHERS:
            (programs / launcher).write_text(STAND_IN.format(bash=program("bash")), encoding="utf-8")
            (programs / launcher).chmod(0o755)
        (programs / "sh").write_text(f'#!{program("bash")}\nexec {program("bash")} "$@"\n', encoding="utf-8")
        (programs / "sh").chmod(0o755)
        self.environment = {
            "BASH_ENV": str(Path(__file__).with_name("stand_ins.bash")),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "PATH": str(programs),
            "STAND_INS_CALLS": str(self.calls),
            "STAND_INS_MKDIR": program("mkdir"),
            "STAND_INS_PATH": str(programs),
            "STAND_INS_ROOT": str(root),
            "USER": "user",
        }

    def commands(self, script: Path, seconds: float, variables: Mapping[str, str] | None = None) -> list[list[str]]:
        """Return the commands by which `script` starts a main from the repository's root, in order."""
        self.calls.mkdir()
        run(["bash", str(script)], self.copy, {**(variables or {}), **self.environment}, seconds)
        recorded = [call.read_text("utf-8", "surrogateescape") for call in sorted(self.calls.iterdir())]
        shutil.rmtree(self.calls)
        calls = [[self.outside(word) for word in text.split("\0")[:-1]] for text in recorded]
        return [[Path(words[0]).name, *words[1:]] for words in calls if any(map(MAIN.search, words))]

    def outside(self, word: str) -> str:
        """Return `word` with the checkout's path instead of the copy's, and /home/user instead of the empty home."""
        return word.replace(str(self.copy), str(self.checkout)).replace(str(self.home), "/home/user")


def run(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> None:
    """Run `command`; end it and all processes that it started after `seconds` at the latest."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    try:
        process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        print(f"{command[-1]}: ended after {seconds:g} s", file=sys.stderr)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise SystemExit(f"{name} is not on this machine. It is needed to run launch scripts.")
    return path


if __name__ == "__main__":
    main()
