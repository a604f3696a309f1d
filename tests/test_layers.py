"""Dependencies point one way: the core needs torch alone, or nothing."""

import pytest

PURE = [
    "verl_precision.aggregation",
    "verl_precision.losses",
    "verl_precision.mismatch.alarm",
    "verl_precision.mismatch.phantom",
    "verl_precision.mismatch.statistics",
    "verl_precision.weight_sync.manifest",
    "verl_precision.weight_sync.verify",
]
HOSTS = ("verl", "vllm", "ray", "transformers", "hydra", "omegaconf", "tensordict", "wrapt", "typer", "rich", "psutil")


@pytest.mark.parametrize("module", PURE)
def test_pure_module_imports_without_any_host(run_python, module):
    done = run_python(
        f"""
import importlib, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HOSTS!r}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
importlib.import_module({module!r})
"""
    )
    assert done.returncode == 0, done.stderr


def test_package_itself_imports_nothing(run_python):
    done = run_python(
        "import sys; before = set(sys.modules); import verl_precision; print(sorted(set(sys.modules) - before))"
    )
    assert done.stdout.strip() == "['verl_precision']"
