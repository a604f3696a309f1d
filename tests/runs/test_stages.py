"""What a user is told while verl starts."""

from verl_precision.runs.stages import STAGES, TOTAL_STEPS, stage_of

# Lines as verl 0.9.1, Ray 2.60 and vLLM 0.28 print them.
LOG = [
    "INFO:2026-11-21 04:07:21,712:verl_precision 0.1.0 loaded into verl 0.9.1: platform cpu",
    "2026-11-21 04:07:31,150 INFO worker.py:2029 -- Started a local Ray instance.",
    "(TaskRunnerV1 pid=1) INFO:train and validate dataloader initialized, train dataset size: 64",
    "(WorkerDict pid=2) INFO:Platform override from VERL_PLATFORM: cpu",
    "(vLLMHttpServer pid=3) WARNING 11-21 04:08:33 [vllm.py:1285] Enforce eager set",
    "(vLLMHttpServer pid=3) (EngineCore pid=4) WARNING Model Runner V2 requires Triton",
    "(AgentLoopWorkerTQ pid=5) Using dataset class: RLHFDataset",
]


def test_every_stage_is_reached_in_order():
    stage = -1
    for index, line in enumerate(LOG):
        stage = stage_of(line, stage)
        assert stage == index, (line, STAGES[stage])


def test_stage_never_goes_back():
    assert stage_of(LOG[0], 4) == 4
    assert stage_of("anything", 2) == 2
    assert stage_of(LOG[-1], -1) == len(STAGES) - 1, "a skipped stage does not hold up the later ones"


def test_total_steps():
    line = "(TaskRunnerV1 pid=1) Training Progress:  25%|##5       | 1/4 [01:13<03:41, 73.82s/it]"
    assert TOTAL_STEPS.search(line).group(1) == "4"
