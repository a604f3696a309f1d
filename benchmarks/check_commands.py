"""The answers of `verl-precision check` to published commands of verl, with this package's presets and without.

    python benchmarks/public_commands.py CHECKOUT --name "verl v0.9.0" --output commands.jsonl
    python benchmarks/check_commands.py commands.jsonl --output report.json

Each command is checked in this process: unchanged, with `+precision=fp16 +estimator=pg_seq_is`, and with
`+presets=win` too. This script does not rely on the check: it reads the presets' settings from their own YAML, compares
these settings with the composed config, and looks for each difference in the findings. A difference without a finding
is silent. The exit code is 1 if a difference is silent, or if the check raised an unexpected error.
"""

import argparse
import json
import os
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from typer.testing import CliRunner

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import verl_precision.presets
from verl_precision.cli import app
from verl_precision.tools.checking import recipe_config

WORDS = {"precision": "fp16", "estimator": "pg_seq_is"}
WAYS = {
    "as it is": [],
    "with the two words": [f"+{group}={name}" for group, name in WORDS.items()],
    "with presets=win": [*(f"+{group}={name}" for group, name in WORDS.items()), "+presets=win"],
}
# No preset of WORDS sets these settings, but they replace the presets' loss or weights.
BESIDE = {"algorithm.rollout_correction.rollout_is": None, "algorithm.rollout_correction.rollout_rs": None,
          "distillation.enabled": False}  # fmt: skip
ABSENT = object()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commands", type=Path, nargs="+", help="files of public_commands.py")
    parser.add_argument("--output", type=Path, help="report as JSON")
    parser.add_argument("--gpu", help="GPU of the run, as `check --gpu`")
    parser.add_argument("--every", type=int, default=1, help="check only every n-th command")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="default: all")
    arguments = parser.parse_args()
    lines = [line for file in arguments.commands for line in file.read_text("utf-8").splitlines()]
    given = [json.loads(line) for line in lines[:: arguments.every]]
    results = []
    for number, command in enumerate(given, start=1):
        for way in arguments.ways:
            results.append({"source": command["source"], "way": way, **answer(command["words"], way, arguments.gpu)})
        print(f"\r{number} of {len(given)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(results, indent=1, default=str), encoding="utf-8")
    for way in arguments.ways:
        show(way, [each for each in results if each["way"] == way])
    raise SystemExit(any(each["traceback"] or each["silent"] for each in results))


def answer(words: Sequence[str], way: str, gpu: str | None) -> dict[str, Any]:
    """Return the check's answer to one command, and the differences that this script finds."""
    composed: list[DictConfig] = []
    result: dict[str, Any] = {"findings": [], "differences": [], "silent": [], "traceback": ""}
    options = ["--json", *(["--gpu", gpu] if gpu else [])]
    start = time.process_time()
    with remembered(composed):
        answered = CliRunner().invoke(app, ["check", *options, "--", *words, *WAYS[way]])
    result["seconds"] = time.process_time() - start
    if answered.exception is not None and not isinstance(answered.exception, SystemExit):
        result["traceback"] = "".join(traceback.format_exception(answered.exception))
    else:
        result["findings"] = json.loads(answered.stdout)["findings"]
    refused = any(finding["name"] == "config-refused" for finding in result["findings"])
    result["composed"] = bool(composed) and not refused and not result["traceback"]
    if result["composed"] and WAYS[way]:
        for key, wanted, got in differences(composed[0]):
            result["differences"].append({"setting": key, "preset": wanted, "config": got})
            if not any(names(finding, key) for finding in result["findings"]):
                result["silent"].append(key)
    return result


class remembered:
    """Appends each config that the check composes in the block to `composed`, before any rule reads it."""

    def __init__(self, composed: list[DictConfig]):
        self.composed, self.own = composed, recipe_config.compose_recipe

    def __enter__(self) -> None:
        def compose(*arguments: Any, **options: Any) -> Any:
            config = self.own(*arguments, **options)
            self.composed.append(deepcopy(config))
            return config

        recipe_config.compose_recipe = compose

    def __exit__(self, *_: object) -> None:
        recipe_config.compose_recipe = self.own


def differences(config: DictConfig) -> Iterator[tuple[str, object, object]]:
    """Yield each setting of a preset of WORDS that has another value in the config, with both values."""
    for key, text in sorted({**BESIDE, **preset_settings()}.items()):
        got = OmegaConf.select(config, key, default=ABSENT)
        wanted = meant(config, text)
        got = OmegaConf.to_container(got) if OmegaConf.is_config(got) else got
        if got is ABSENT and key in BESIDE:
            continue
        if got != wanted:
            yield key, wanted, "absent" if got is ABSENT else got


def meant(config: DictConfig, text: object) -> object:
    """Return the value of a preset's text; references to other settings take the config's values."""
    if not (isinstance(text, str) and "${" in text):
        return text
    beside = deepcopy(config)
    OmegaConf.update(beside, "meant_by_the_preset", text, force_add=True)
    return beside.meant_by_the_preset


def preset_settings() -> dict[str, object]:
    """Return each setting of the presets of WORDS and of the presets' parts, read from their YAML."""
    root, found = Path(verl_precision.presets.__file__).parent, {}

    def read(file: Path) -> None:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        for entry in content.pop("defaults", []):
            if entry != "_self_":
                group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
                folder = root if name.startswith("/") else file.parent / group
                read(folder / f"{name.strip('/')}.yaml")
        found.update(leaves(content))

    for group, name in WORDS.items():
        read(root / group / f"{name}.yaml")
    return {key: value for key, value in found.items() if not key.startswith("hydra.")}


def leaves(node: dict[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def names(finding: dict[str, Any], key: str) -> bool:
    """Return whether a finding names a setting: as its subject, inside a block, or by its last name in the text."""
    setting, block = str(finding["setting"]), key.removesuffix(".enabled")
    if setting.startswith(f"{block}.") and block != key:
        return True
    if setting and (setting == key or setting.startswith(f"{key}.") or key.startswith(f"{setting}.")):
        return True
    text = " ".join(str(finding[field]) for field in ("setting", "problem", "allowed", "remedy"))
    return key.rpartition(".")[2] in text.replace("=", " ").replace(",", " ").replace("`", " ").split()


def show(way: str, results: list[dict[str, Any]]) -> None:
    """Print the results of one way: counts, times, each kind of finding with its first source."""
    tracebacks = [each for each in results if each["traceback"]]
    composed = [each for each in results if each["composed"]]
    print(f"\n## {way}: {len(results)} commands")
    refused = len(results) - len(composed) - len(tracebacks)
    print(f"composed {len(composed)}, refused {refused}, tracebacks {len(tracebacks)}")
    if WAYS[way]:
        untouched = sum(not each["differences"] for each in composed)
        named = sum(bool(each["differences"]) and not each["silent"] for each in composed)
        silent = len(composed) - untouched - named
        print(f"presets in force {untouched}, every difference named {named}, silent {silent}")
        for key, count in Counter(key for each in composed for key in each["silent"]).most_common():
            print(f"  silent: {key} in {count}")
    times = sorted(each["seconds"] for each in results)
    print(f"CPU seconds a check: median {times[len(times) // 2]:.2f}, longest {times[-1]:.2f}")
    kinds: dict[tuple[str, str], list[str]] = defaultdict(list)
    for each in results:
        for kind in sorted({(finding["severity"], finding["name"]) for finding in each["findings"]}):
            kinds[kind].append(each["source"])
    for (severity, name), sources in sorted(kinds.items(), key=lambda pair: (pair[0][0], -len(pair[1]))):
        print(f"  {severity:9} {name:32} {len(sources):4}  e.g. {sources[0]}")
    for each in tracebacks:
        print(f"  TRACEBACK {each['source']}: {each['traceback'].splitlines()[-1]}")


if __name__ == "__main__":
    main()
