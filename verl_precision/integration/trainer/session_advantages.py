"""One advantage for each session of an agent loop, however many outputs it returns.

verl takes the last output of a session, and gives its advantage to the others, for `adv_estimator=grpo` only. With
`rloo`, which the estimator presets set, each output would count as a response of its own in the mean of its group.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar

import torch

from verl_precision.integration.ledger import set_within, wrapping

_by_session: ContextVar[bool] = ContextVar("by_session", default=False)


def advantages_by_session() -> AbstractContextManager[None]:
    """Return a context in which `rloo` counts each session once."""
    return set_within(_by_session, True)


@wrapping("compute_advantage_for_multi_trajectories")
def wrap_advantages(wrapped, instance, args, kwargs):
    """Compute advantages; outside `advantages_by_session` as verl does."""
    if not _by_session.get() or kwargs.get("adv_estimator") != "rloo":
        return wrapped(*args, **kwargs)
    data, keys = args[0] if args else kwargs["data"], kwargs["batch_keys"]
    sessions = [key.rpartition("_")[0] for key in keys]  # uid_session_output
    in_order = sorted(range(len(keys)), key=lambda row: int(keys[row].rpartition("_")[2]))
    final = {sessions[row]: row for row in in_order}  # the last output stays
    if len(final) == len(keys):
        return wrapped(*args, **kwargs)
    rows = list(final.values())
    chosen = data.select_idxs(rows)
    chosen.batch["response_mask"] = torch.ones_like(chosen.batch["response_mask"])  # rejected rows have a reward too
    chosen = wrapped(chosen, **{**kwargs, "batch_keys": [keys[row] for row in rows]})
    place = {session: number for number, session in enumerate(final)}
    scores = chosen.batch["advantages"][[place[session] for session in sessions], 0]
    advantages = scores.unsqueeze(-1) * data.batch["response_mask"]
    data.batch["advantages"], data.batch["returns"] = advantages, advantages
    return data
