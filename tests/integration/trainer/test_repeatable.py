"""Names, order and seeds of a run that repeats."""

from types import SimpleNamespace

from verl.trainer.ppo.v1 import trainer_base

from verl_precision.base.content import response_seed
from verl_precision.integration.trainer.repeatable import SortedReplayBuffer, name_prompts


def test_prompts_are_named_by_step_and_place(monkeypatch):
    monkeypatch.setattr(trainer_base, "uuid", trainer_base.uuid)
    trainer = SimpleNamespace(global_steps=3)
    name_prompts(trainer)
    first = [str(trainer_base.uuid.uuid4()) for _ in range(2)]
    trainer.global_steps = 4
    names = [*first, str(trainer_base.uuid.uuid4())]
    assert names == ["00000003x000001", "00000003x000002", "00000004x000001"]
    assert names == sorted(names) and not any("_" in name for name in names), "verl splits a key at underscores"


def test_a_batch_is_sorted_whatever_the_order_of_arrival(monkeypatch):
    off_policy = {"max_off_policy_threshold": None, "max_off_policy_strategy": "drop"}
    buffer = SortedReplayBuffer(trainer_mode="sync", trainer_config={}, sampler_kwargs={}, **off_policy)
    monkeypatch.setattr("transfer_queue.kv_clear", lambda **_: None)
    keys = ["b_0_0", "a_10_0", "c_0_0", "a_2_0", "a_2_1"]
    buffer.partitions["train"] = {key: {"key": key} for key in keys}
    selected, partition, _ = buffer._select_prompt_uids("train", {"c", "a", "b"}, 2)
    assert selected == ["a", "b"]
    batch = buffer._materialize_batch("train", selected, partition)
    assert batch.keys == ["a_2_0", "a_2_1", "a_10_0", "b_0_0"]
    assert [tag["key"] for tag in batch.tags] == batch.keys


def test_each_response_has_a_seed_of_its_own():
    seeds = {response_seed(seed, uid, session) for seed in (0, 1) for uid in "ab" for session in range(8)}
    assert len(seeds) == 32 and all(0 <= seed < 2**31 for seed in seeds)
    assert response_seed(0, "a", 1) == response_seed(0, "a", 1)
    assert response_seed(0, "a", 11) != response_seed(0, "a1", 1)
