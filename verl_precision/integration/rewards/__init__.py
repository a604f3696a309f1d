"""The name under which recipes of before 0.1.0's release have the rewards of `tools/rewards/`; use that one."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "tools" / "rewards")]
