"""What is on disk is not done again, and every missing file is somebody's."""

from hypothesis import given
from hypothesis import strategies as st

from verl_precision.offline.plan import Work, all_work, missing, responses_asked, responses_done, split


def test_everything_is_planned_once(store):
    samples, scores = all_work(store, "sample"), all_work(store, "score")
    assert [(work.dtype, work.shards) for work in samples] == [
        ("fp16", (("fp16", 0), ("fp16", 1))),
        ("bf16", (("bf16", 0), ("bf16", 1))),
    ]
    assert [work.dtype for work in scores] == ["fp16", "bf16"]
    assert scores[0].shards == (("fp16", 0), ("fp16", 1), ("bf16", 0), ("bf16", 1))
    files = [file for work in samples + scores for file in work.files(store)]
    assert len(set(files)) == len(files) == 4 + 8


def test_a_run_that_was_killed_goes_on_where_it_was(store, fill):
    fill(store)
    for kind in ("sample", "score"):
        assert [missing(store, work) for work in all_work(store, kind)] == [None, None]
    store.sample_file("bf16", 1).unlink()
    file = store.score_file("fp16", "bf16", 0)
    file.rename(file.with_name(f".{file.name}.123"))  # half written
    assert [missing(store, work) for work in all_work(store, "sample")] == [
        None,
        Work("sample", "bf16", (("bf16", 1),)),
    ]
    fp16, bf16 = all_work(store, "score")
    assert missing(store, fp16) == Work("score", "fp16", (("bf16", 0),)) and missing(store, bf16) is None
    assert (responses_done(store, fp16), responses_asked(store, fp16)) == (8, 12)


@given(shards=st.integers(1, 40), parts=st.integers(1, 12))
def test_dealing_gives_every_shard_to_one_process(shards, parts):
    work = Work("sample", "fp16", tuple(("fp16", shard) for shard in range(shards)))
    dealt = split(work, parts)
    assert len(dealt) == min(shards, parts)
    assert sorted(shard for part in dealt for shard in part.shards) == list(work.shards)
    sizes = [len(part.shards) for part in dealt]
    assert max(sizes) - min(sizes) <= 1
