"""An analysis whose samples and scores are made up, with known gaps."""

from collections.abc import Callable

import numpy as np
import pytest
from made import GAPS, VERSIONS, settings_of

from verl_precision.offline.store import Store, create_or_resume, write_rows


@pytest.fixture
def store(tmp_path) -> Store:
    """Two prompts, three responses each: shards of four and two; nothing sampled yet."""
    return create_or_resume(tmp_path / "analysis", settings_of(), [[5, 6], [7]], VERSIONS)


@pytest.fixture
def fill() -> Callable[..., None]:
    def write(store: Store, lengths=(3, 40, 7, 0, 12, 25), gaps=GAPS) -> None:
        drawing = np.random.default_rng(1)
        for rollout in store.settings.rollout_dtypes:
            for shard, responses in enumerate(store.shards):
                mu = {i: drawing.uniform(-6, -0.01, lengths[i]) for i in responses}
                rows = [
                    {"response": i, "prompt": i // 3, "response_ids": [9] * lengths[i], "rollout_log_probs": mu[i]}
                    for i in responses
                ]
                write_rows(store.sample_file(rollout, shard), rows)
                for train in store.settings.train_dtypes:
                    pi = {i: mu[i] + drawing.normal(0, gaps[rollout, train], lengths[i]) for i in responses}
                    rows = [{"response": i, "trainer_log_probs": np.minimum(pi[i], 0)} for i in responses]
                    write_rows(store.score_file(train, rollout, shard), rows)

    return write
