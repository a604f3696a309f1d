"""Which data set is where, how many problems it has, and by whose word."""

from dataclasses import dataclass

from verl_precision.errors import ConfigurationError

MATH = "DigitalLearningGmbH/MATH-lighteval"  # where verl's own example reads MATH, too


@dataclass(frozen=True)
class Entry:
    """One data set.

    Attributes:
        hub: its name on Hugging Face.
        splits: read one after the other.
        layouts: keys of `LAYOUTS` that it may have; the first whose columns are there is used.
        data_source: chooses verl's reward function.
        template: key of `TEMPLATES` used if none is given.
        fewest: distinct problems, at least.
        most: distinct problems, at most.
        said_by: where the number is from.
        data_files: the file of the repository to read, if not all.
    """

    hub: str
    splits: tuple[str, ...]
    layouts: tuple[str, ...]
    data_source: str
    template: str
    fewest: int
    most: int
    said_by: str
    data_files: str | None = None


CATALOG = {
    "sanity": Entry(
        MATH,
        ("train", "test"),
        ("math",),
        MATH,
        "r1_distill",
        12_490,  # room for problems that are there twice
        12_500,
        "Hendrycks et al. (2021): 7,500 and 5,000. All of MATH is what the sanity test filters (section 4)",
    ),
    "sanity_r1d": Entry(
        "sail/Sanity-Test-R1D-1.5B",
        ("train",),
        ("problem_answer", "verl"),
        MATH,
        "r1_distill",
        1_460,
        1_460,
        "section 4: what the authors' own filter left for DeepSeek-R1-Distill-Qwen-1.5B",
    ),
    "math": Entry(
        MATH,
        ("train",),
        ("math",),
        MATH,
        "qwen_math",
        7_490,
        7_500,
        "Hendrycks et al. (2021); for LoRA (section 5.2) and OctoThinker (5.4)",
    ),
    "dapo_math_17k": Entry(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        ("train",),
        ("verl",),
        "math_dapo",
        "dapo",
        17_398,
        17_398,
        "its deduplicated copies on the hub; the file repeats each problem about 100 times (verl issue 3065)",
    ),
    "aime_2024": Entry(
        "Maxwell-Jia/AIME_2024",
        ("train",),
        ("aime",),
        "math_dapo",
        "dapo",
        30,
        30,
        "AIME 2024 I and II, 15 problems each",
    ),
    "guru_math": Entry(
        "LLM360/guru-RL-92k",
        ("train",),
        ("verl",),
        "math_dapo",
        "qwen3_base",
        54_350,
        54_449,
        "appendix A.2: 54.4k, from Cheng et al. (2025), arXiv:2506.14965",
        data_files="train/math__combined_54.4k.parquet",
    ),
}


def entry(name: str) -> Entry:
    """Return a data set's entry.

    Raises:
        ConfigurationError: for another name.
    """
    if name not in CATALOG:
        raise ConfigurationError(f"data {name}: no such data set", allowed=", ".join(CATALOG))
    return CATALOG[name]
