"""The gradient does not change with micro-batches, padding, order of rows or ranks. verl's default does, in each test.

verl's default is its vanilla loss with seq-mean-token-sum-norm and loss_scale_factor null; what it cannot fail is the
order of the rows.
"""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cuts import VERL_DEFAULT, gradient, mini_batch, trimmed, widened
from plain_equations import ESTIMATORS, relative_error

SPLITS = [(16,), (8, 8), (4, 4, 4, 4), (1, 5, 2, 8), (1,) * 16]
RANKS = (1, 2, 4)


def holds(estimator: str, found: list[torch.Tensor], expected: torch.Tensor) -> None:
    errors = [relative_error(one, expected) for one in found]
    if estimator == VERL_DEFAULT:
        assert max(errors) > 0.05, errors
    else:
        assert max(errors) < 1e-6, errors


@pytest.mark.parametrize("estimator", [*ESTIMATORS, VERL_DEFAULT])
def test_micro_batches(estimator):
    whole, features = mini_batch(estimator)
    found = []
    for split in SPLITS:
        rows = torch.arange(16).split(split)
        found.append(gradient(estimator, whole, [trimmed(whole.rows(r), features[r]) for r in rows]))
    holds(estimator, found, found[0])


@pytest.mark.parametrize("estimator", [*ESTIMATORS, VERL_DEFAULT])
def test_padding(estimator):
    whole, features = mini_batch(estimator)
    found = [gradient(estimator, whole, [widened(whole, features, by)]) for by in (0, 1, 100)]
    holds(estimator, found, found[0])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_order_of_rows(estimator):
    whole, features = mini_batch(estimator)
    order = torch.randperm(16, generator=torch.Generator().manual_seed(0))
    found = gradient(estimator, whole, [(whole.rows(order), features[order])])
    assert relative_error(found, gradient(estimator, whole, [(whole, features)])) < 1e-6


def test_ranks(tmp_path):
    """1, 2 and 4 gloo processes; each has its share of the rows in micro-batches; gradients are averaged as by FSDP."""
    for estimator in [*ESTIMATORS, VERL_DEFAULT]:  # compose the configs once, before the processes part
        whole, features = mini_batch(estimator)
        gradient(estimator, whole, [(whole, features)])
    arguments = (str(tmp_path / "store"), str(tmp_path))
    mp.start_processes(_one_rank, args=arguments, nprocs=max(RANKS), start_method="fork")
    found = torch.load(tmp_path / "gradients.pt")
    assert set(found) == {*ESTIMATORS, VERL_DEFAULT}
    for estimator, by_ranks in found.items():
        whole, features = mini_batch(estimator)
        holds(estimator, by_ranks, gradient(estimator, whole, [(whole, features)]))


def _one_rank(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=max(RANKS))
    groups = {size: dist.new_group(list(range(size))) for size in RANKS}
    found: dict[str, list[torch.Tensor]] = {}
    for estimator in [*ESTIMATORS, VERL_DEFAULT]:
        whole, features = mini_batch(estimator)
        found[estimator] = []
        for size, group in groups.items():
            if rank < size:
                mine = torch.arange(16).chunk(size)[rank].split(3)
                pieces = [trimmed(whole.rows(rows), features[rows]) for rows in mine]
                total = gradient(estimator, whole, pieces, dp_size=size)
                dist.all_reduce(total, group=group)
                found[estimator].append(total / size)
    if rank == 0:
        torch.save(found, f"{folder}/gradients.pt")
    dist.barrier()
    dist.destroy_process_group()
