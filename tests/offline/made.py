"""A made-up analysis: settings, and gaps whose ranking is known."""

from pathlib import Path

from verl_precision.offline.settings import OfflineSettings

DTYPES = ("fp16", "bf16")
# Standard deviation of a token's gap: the ranking that the figures and the table must show.
GAPS = {("fp16", "fp16"): 1e-4, ("bf16", "fp16"): 1e-3, ("fp16", "bf16"): 2e-3, ("bf16", "bf16"): 4e-3}
VERSIONS = {"verl": "1"}


def settings_of(**changes) -> OfflineSettings:
    values = {
        "model": "tiny:qwen3",
        "prompts": "built-in",
        "rollout_dtypes": DTYPES,
        "train_dtypes": DTYPES,
        "responses": 3,
        "max_response_tokens": 40,
        "shard_responses": 4,
    }
    return OfflineSettings(**{**values, **changes})


def written(folder: Path) -> dict[str, int]:
    """Every file of samples and scores, and when it was written."""
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*.parquet"))}
