"""Fifty random fault injections: the faults that `explain` finds, misses, or reports falsely.

    python benchmarks/fault_injection.py FOLDER [--count 50] [--seed 1] [--processes 2] [--page PAGE.md]

Each case has a random model, a random pair of dtypes, a random seed, and up to two random faults of random size, in
real engines. Results in FOLDER are not computed again. A case takes about a minute of one process.
"""

import argparse
import io
import json
import os
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import injected_faults
import numpy as np
from rich.console import Console

from verl_precision.tools.engines.engine import SampleRequest, SamplerSettings, ScorerSettings
from verl_precision.tools.engines.engine_process import EngineProcess
from verl_precision.tools.engines.fsdp_scorer import TrainerEngine
from verl_precision.tools.engines.vllm_sampler import VllmEngine
from verl_precision.tools.gap.explain.session import explain
from verl_precision.tools.jobs.settings import Explanation
from verl_precision.tools.show.tables import markdown_table

MODELS = ("tiny:qwen3", "tiny:llama", "tiny:qwen2", "tiny:qwen3_moe", "tiny:qwen3_rough")
FOUND = "found.json"
SIZE = re.compile(r"\{.*?\}")
RECORDED = Path(__file__).with_name("fault_injection.json")  # the page's data
PAIRS = (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp16", "bf16"))  # trainer, rollout


@dataclass(frozen=True)
class Fault:
    """A fault: the name of its step in `explain`, its sizes (from, to), and the cases that can have it."""

    cause: str
    sizes: tuple[float, float]
    what: str
    only_models: tuple[str, ...] = MODELS
    only_pairs: tuple[tuple[str, str], ...] = PAIRS
    place: str = "vllm"  # where it is injected; two faults need two places


FAULTS = {
    "epsilon": Fault("engine", (10, 1000), "vLLM's norms: epsilon x {:.0f}"),
    "rotary": Fault("engine", (1, 1), "vLLM's rotary cache in BF16", only_pairs=PAIRS[1:3]),
    "softmax_scale": Fault("engine", (1e-3, 1e-1), "vLLM's attention scores x (1 + {:.0e})"),
    "head": Fault("engine", (1e-3, 1e-1), "vLLM's output head stale by {:.0e}"),
    "decode": Fault("decode", (1e-3, 1e-1), "vLLM's decode off by {:.0e}"),
    "batch": Fault("batch", (1e-3, 1e-1), "vLLM off by {:.0e} in a batch"),
    "trainer_epsilon": Fault("engine", (10, 1000), "trainer's norms: epsilon x {:.0f}", place="trainer"),
    "16_bit_log_probs": Fault("log_probs", (1, 1), "log-probs in 16 bits", only_pairs=(PAIRS[0],), place="log_probs"),
    "softmax_in_16_bits": Fault(
        "attention", (1, 1), "trainer's attention with BF16 scores", only_pairs=(PAIRS[1],), place="attention"
    ),
    "across_sequences": Fault("layout", (1, 1), "packed, attention across sequences", place="attention"),
    "top_p": Fault("sampling", (0.5, 0.95), "top_p {:.2f}", place="sampling"),
    "raw_log_probs": Fault("temperature", (0.6, 0.95), "raw log-probs at temperature {:.2f}", place="sampling"),
    "stale_head": Fault("weights", (1e-3, 1e-1), "rollout's weights: head stale by {:.0e}", place="weights"),
    "version_behind": Fault("weights", (1e-6, 1e-4), "rollout one Adam step of {:.0e} behind", place="weights"),
    "near_tie": Fault(
        "routing", (1e-5, 1e-3), "router with ties to {:.0e}", only_models=("tiny:qwen3_moe",), place="model"
    ),
}


@dataclass
class Case:
    """The faults of a case, and the settings of its `explain`."""

    number: int
    model: str
    train: str
    rollout: str
    seed: int
    faults: dict[str, float] = field(default_factory=dict)

    @property
    def words(self) -> str:
        return "; ".join(FAULTS[name].what.format(size) for name, size in self.faults.items()) or "nothing"


def draw(count: int, seed: int) -> list[Case]:
    """Return the cases: three without a fault, one for each fault alone, and random ones."""
    generator = random.Random(seed)
    wanted: list[list[str]] = [[], [], [], *([name] for name in FAULTS)]
    while len(wanted) < count:
        wanted.append(generator.sample(list(FAULTS), generator.choice((0, 1, 1, 2, 2, 2))))
    found = []
    for number, names in enumerate(wanted):
        while True:
            model, pair = generator.choice(MODELS), generator.choice(PAIRS)
            if number < 3:
                pair = PAIRS[number]
            faults = [FAULTS[name] for name in names]
            places = {fault.place for fault in faults}
            causes = {fault.cause for fault in faults}
            if len(places) < len(faults) or len(causes) < len(faults):
                names = generator.sample(list(FAULTS), 2)
            elif all(model in fault.only_models and pair in fault.only_pairs for fault in faults):
                break
            elif len(names) == 2 and generator.random() < 0.2:  # perhaps no model and pair allows both
                names = generator.sample(list(FAULTS), 2)
        sizes = {name: float(np.exp(generator.uniform(*np.log(FAULTS[name].sizes)))) for name in names}
        found.append(Case(number, model, *pair, generator.randrange(1000), sizes))
    return found


def inject(case: Case, folder: Path) -> dict[str, Any]:
    """Inject the faults of a case, run `explain`, and return its findings with the causes of the faults."""
    faults, model, rollout_model = case.faults, case.model, None
    settings: dict[str, Any] = {}
    if "near_tie" in faults:
        model = _once(injected_faults.near_tie, model, folder / "model", faults["near_tie"])
    for name in ("stale_head", "version_behind"):
        if name in faults:
            rollout_model = _once(getattr(injected_faults, name), model, folder / "rollout_model", faults[name])
    if "top_p" in faults:
        settings |= {"temperature": 0.8, "top_p": faults["top_p"]}
    if "raw_log_probs" in faults:
        settings |= {"temperature": faults["raw_log_probs"], "raw_log_probs": True}
    for name in ("softmax_in_16_bits", "across_sequences"):
        if name in faults:
            settings["attention"] = name
    settings["packed"] = "across_sequences" in faults
    in_vllm = {name: size for name, size in faults.items() if name in injected_faults.IN_VLLM}
    job = Explanation(
        model=model, rollout_model=rollout_model, train_dtype=case.train, output=folder / "job",
        rollout_dtype=case.rollout, seed=case.seed, max_response_tokens=48,
        fp32_log_probs="16_bit_log_probs" not in faults, **settings,
    )  # fmt: skip
    vllm = partial(injected_faults.faulty_vllm, faults=in_vllm) if in_vllm else VllmEngine
    trainer = TrainerEngine
    if "attention" in settings or "trainer_epsilon" in faults:
        trainer = partial(injected_faults.faulty_trainer, epsilon=faults.get("trainer_epsilon", 1.0))
    result = explain(job, Console(file=io.StringIO()), vllm=vllm, trainer=trainer)
    made = None
    if in_vllm and len(faults) == 1:
        made = _made(job, folder / "job", "rollout")
    elif "trainer_epsilon" in faults and len(faults) == 1:
        made = _made(job, folder / "job", "trainer")
    shares = {each.variant.cause: result.attribution.share(each.part) for each in result.findings}
    return {
        "injected": sorted({FAULTS[name].cause for name in faults}),
        "named": [each.variant.cause for each in result.findings if each.fault],
        "first": result.findings[0].variant.cause,
        "k3": result.attribution.k3,
        "made": made,
        "shares": shares,
        "undone": {each.variant.cause: 1 - each.part.without / result.attribution.k3 for each in result.findings},
        "sizes": {each.variant.cause: [each.part.size, each.expected] for each in result.findings},
    }


def _made(job: Explanation, folder: Path, side: str) -> float:
    """Return the share of the k3 that a correct engine on one side removes, on the same tokens."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    prompts = lines[0]["settings"]["prompt_token_ids"]
    drawn = {one["problem"]: one for one in lines[1:] if one["rollout"] == "rollout" and one.get("train") is None}
    trained = {one["problem"]: one for one in lines[1:] if one.get("train") == "trainer"}
    length = 48 + max(map(len, prompts)) + 1
    if side == "rollout":
        more = {"enforce_eager": True, "enable_prefix_caching": False}
        names = {"model": job.rollout_model or job.model, "dtype": job.rollout_dtype}
        build = partial(VllmEngine, SamplerSettings(**names, max_model_len=length, log_probs=True, more=more))
    else:
        sizes = {"micro_batch_tokens": job.micro_batch_tokens, "packed": job.packed}
        settings = ScorerSettings(model=job.model, dtype=job.train_dtype, attention="sdpa", **sizes)
        build = partial(TrainerEngine, settings)
    right = {}
    with closing(EngineProcess(build, "right", folder / "logs")) as engine:
        for problem, one in drawn.items():
            engine.submit(
                [SampleRequest(problem, 0, tuple(prompts[int(problem)]), response_token_ids=tuple(one["token_ids"]))]
            )
            (response,) = engine.poll()
            right[problem] = response.log_probs

    def k3(replaced: str) -> float:
        sides = {"rollout": drawn, "trainer": trained}
        values = {
            name: np.concatenate([right[p] if name == replaced else records[p]["log_probs"] for p in drawn])
            for name, records in sides.items()
        }
        gap = values["trainer"] - values["rollout"]
        return float((np.expm1(gap) - gap).mean())

    return 1 - k3(side) / k3("")


def _once(write: Any, model: str, folder: Path, size: float) -> str:
    return str(folder) if folder.exists() else write(model, folder, size)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", type=int, help="one case, by its number")
    parser.add_argument("--page", type=Path, help="file to write, e.g. docs/fault_injection.md")
    return parser.parse_args()


PAGE = """# Fault injection: which faults does `explain` find?

<!-- written by `make fault-injection` from benchmarks/fault_injection.json; do not edit -->

**You need this when** you decide how far to trust the verdict of [`verl-precision explain`](gap.md).

```bash
make fault-injection  # 25 minutes on two cores; writes this page
```

```text
{right} of {count} answers are right: every injected fault is named, and nothing else. {named} of {injected} injected
faults are named, and {false} that were not injected. A missed fault causes at most {missed:.0%} of its gap.
```

**How.** Each case has a random model (`tiny:` qwen3, llama, qwen2, qwen3_moe or qwen3_rough), random dtypes and a
random seed. Up to two faults of random size were injected into real engines on a CPU: into vLLM's model, the trainer's
attention and norms, weights, routers or settings. Then `explain` ran on 16 responses of up to 48 tokens. In {healthy}
cases nothing was injected. In {quiet} of these, `explain` named nothing.

**Why faults are missed.** `explain` names most steps only if they move log-probs more than 1.7 times as far as the
rounding of the dtype, because two correct computations may differ by nearly that much ([all bounds](gap.md#why)).

## By fault
Part of k3: the step's share of k3, from the smallest to the largest case. The share can be small if a second fault
causes nearly all of the gap.

"""
WRONG = """
## Wrong answers
Part of k3: the share of the missed fault.

"""


def page(founds: list[dict[str, Any]]) -> str:
    """Return the results as a page in Markdown."""
    missed = [one["undone"][cause] for one in founds for cause in set(one["injected"]) - set(one["named"])]
    healthy = [one for one in founds if not one["injected"]]
    heading = PAGE.format(
        right=sum(sorted(one["named"]) == one["injected"] for one in founds),
        count=len(founds),
        named=sum(len(set(one["injected"]) & set(one["named"])) for one in founds),
        injected=sum(len(one["injected"]) for one in founds),
        false=sum(len(set(one["named"]) - set(one["injected"])) for one in founds),
        missed=max(missed, default=0.0),
        healthy=len(healthy),
        quiet=sum(not one["named"] for one in healthy),
    )
    return heading + _by_fault(founds) + WRONG + _wrong(founds)


def _by_fault(founds: list[dict[str, Any]]) -> str:
    rows = []
    for name, fault in FAULTS.items():
        if not (cases := [one for one in founds if name in one["faults"]]):
            continue
        named = sum(fault.cause in one["named"] for one in cases)
        parts = sorted(one["shares"][fault.cause] for one in cases)
        sizes = sorted(one["faults"][name] for one in cases)
        template = SIZE.search(fault.what)
        amounts = (
            " to ".join(dict.fromkeys(template.group().format(size) for size in (sizes[0], sizes[-1])))
            if template
            else ""
        )
        words = SIZE.sub(amounts, fault.what)
        of_cases = f"{named} of {len(cases)}"
        part = " to ".join(dict.fromkeys(f"{each + 0.0:.0%}" for each in (parts[0], parts[-1])))
        rows.append([words, f"`{fault.cause}`", of_cases if named == len(cases) else f"**{of_cases}**", part])
    return "\n".join(markdown_table(["injected", "cause", "named", "part of k3"], rows)) + "\n"


def _wrong(founds: list[dict[str, Any]]) -> str:
    rows = []
    for one in founds:
        missed = [cause for cause in one["injected"] if cause not in one["named"]]
        false = [cause for cause in one["named"] if cause not in one["injected"]]
        if missed or false:
            words = [f"{what} {_names(causes)}" for what, causes in (("missed", missed), ("false", false)) if causes]
            part = ", ".join(f"{one['shares'][cause]:.0%}" for cause in missed)
            dtypes = f"{one['train']}, {one['rollout']}"
            rows.append(
                [one["model"].removeprefix("tiny:"), dtypes, one["words"], f"{one['k3']:.1e}", "; ".join(words), part]
            )
    columns = ["model", "trainer, rollout", "injected", "k3", "answer", "part of k3"]
    return "\n".join(markdown_table(columns, rows)) + "\n"


def recorded(found: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a case in `RECORDED`: the fields of the page, with the page's digits."""
    kept = {
        key: found[key]
        for key in ("number", "model", "train", "rollout", "seed", "faults", "words", "injected", "named")
    }
    of_injected = {
        key: {cause: round(found[key][cause], 2) for cause in found["injected"]} for key in ("shares", "undone")
    }
    made = None if found["made"] is None else round(found["made"], 2)
    return {**kept, "k3": float(f"{found['k3']:.1e}"), **of_injected, "made": made}


def _names(causes: list[str]) -> str:
    return ", ".join(f"`{cause}`" for cause in causes)


def main() -> None:
    options = _arguments()
    cases = draw(options.count, options.seed)
    if options.only is not None:
        case = cases[options.only]
        folder = options.folder / f"{case.number:02d}"
        folder.mkdir(parents=True, exist_ok=True)
        found = inject(case, folder)
        (folder / FOUND).write_text(json.dumps({**vars(case), "words": case.words, **found}, indent=1))
        return
    paths = [Path(injected_faults.__file__).parent, Path(__file__).resolve().parents[1]]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths)), "OMP_NUM_THREADS": "1"}

    def compute(case: Case) -> None:
        command = [sys.executable, __file__, str(options.folder), "--count", str(options.count)]
        print(case.number, case.model, case.train, case.rollout, case.words, flush=True)
        subprocess.run([*command, "--seed", str(options.seed), "--only", str(case.number)], env=environment)

    with ThreadPoolExecutor(options.processes) as pool:
        list(pool.map(compute, (one for one in cases if not (options.folder / f"{one.number:02d}" / FOUND).exists())))
    if options.page is not None:
        found = [json.loads((options.folder / f"{one.number:02d}" / FOUND).read_text()) for one in cases]
        rows = ",\n".join(json.dumps(recorded(one)) for one in found)
        RECORDED.write_text(f"[\n{rows}\n]\n")
        options.page.write_text(page(json.loads(RECORDED.read_text())))


if __name__ == "__main__":
    main()
