"""`cpu_products=rounded_once`: what a tensor core computes, on any CPU, in the trainer and in vLLM."""

import forked
import pytest
import torch

from verl_precision.integration.cpu import products

HALF = [torch.bfloat16, torch.float16]
# The rest are near a tie, where the rounding of FP32's own sums decides. Of 512 terms these are off by about
# sqrt(512) * 2**-24, against steps of 2**-11: 0.3% of FP16's numbers at most. Seen: 0.2% on an Intel Xeon.
ALMOST_ALL = 0.995


def operands(dtype: torch.dtype, depth: int = 512) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (64, depth), (96, depth), (96,)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def correctly_rounded(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the share of numbers that are the exact ones, rounded once."""
    return (found == exact.to(found.dtype)).double().mean().item()


@pytest.mark.parametrize("dtype", HALF)
def test_products_are_exact_but_for_one_rounding(dtype):
    x, w, b = operands(dtype)
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
    found = products.linear(x, w, b)
    assert found.dtype == dtype
    assert correctly_rounded(found, exact) > ALMOST_ALL
    native = torch.nn.functional.linear(x, w, b)
    assert (found - exact).abs().mean() <= (native - exact).abs().mean() * 1.0001


@pytest.mark.parametrize("dtype", HALF)
def test_so_are_the_gradients(dtype):
    x, w, b = (tensor.requires_grad_() for tensor in operands(dtype))
    above = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    products.linear(x, w, b).backward(above)
    assert correctly_rounded(x.grad, above.double() @ w.double()) > ALMOST_ALL
    assert correctly_rounded(w.grad, above.double().T @ x.double()) > ALMOST_ALL
    assert correctly_rounded(b.grad, above.double().sum(0)) > 0.99  # a sum, in torch's order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_dtypes_are_torchs(dtype):
    x, w, b = operands(dtype)
    assert torch.equal(products.linear(x, w, b), torch.nn.functional.linear(x, w, b))


@pytest.mark.parametrize(("asked", "dtype", "ours"), [
    ("rounded_once", torch.float16, True), ("rounded_once", torch.bfloat16, True),
    ("rounded_once", torch.float32, False), ("native", torch.float16, False), (None, torch.bfloat16, False),
])  # fmt: skip
def test_vllms_linear_layers(asked, dtype, ours, monkeypatch):
    from vllm.model_executor.layers import utils

    products.round_once_in_the_rollout(utils)
    monkeypatch.delenv(products.VARIABLE, raising=False)
    if asked:
        monkeypatch.setenv(products.VARIABLE, asked)
    layer = torch.nn.Linear(64, 32, bias=False, dtype=dtype).requires_grad_(False)
    x, expected = torch.ones(3, 64, dtype=dtype), products.linear(torch.ones(3, 64, dtype=dtype), layer.weight)
    utils.dispatch_cpu_unquantized_gemm(layer, True)
    assert (layer.cpu_linear is products.linear) == ours
    if ours:
        assert torch.equal(utils.cpu_unquantized_gemm(layer, x, layer.weight, None), expected)


@pytest.mark.parametrize(("asked", "ours"), [("rounded_once", True), ("native", False)])
def test_a_process_that_trains(asked, ours, tmp_path):
    program = (
        "import torch; before = torch.nn.functional.linear\n"
        "import verl.workers.engine.fsdp.transformer_impl\n"
        f"assert (torch.nn.functional.linear is not before) == {ours}\n"
        "layer = torch.nn.Linear(8, 8, dtype=torch.float16); layer(torch.ones(1, 8).half()).sum().backward()\n"
    )
    done = forked.run(program, tmp_path, **{products.VARIABLE: asked, "VERL_PLATFORM": "cpu"})
    assert done.returncode == 0, done.stderr
