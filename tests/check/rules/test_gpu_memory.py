"""Arithmetic of docs/scales.md, by hand; sizes of published models."""

from verl_precision.check.rules import gpu_memory as memory
from verl_precision.check.rules.gpu_memory import GIB, ModelShape

# 2 layers; attention 2*8*4*(2+1) = 192, MLP 3*8*16 = 384, ends 2*10*8 = 160
SMALL = ModelShape(2, 8, 10, 2, 1, 4, 16)
EXPERTS = ModelShape(2, 8, 10, 2, 1, 4, 16, experts=4, experts_per_token=2)


def test_parameters_by_hand():
    assert SMALL.layer_parameters == 192 + 384
    assert SMALL.parameters == 2 * 576 + 160
    assert ModelShape(2, 8, 10, 2, 1, 4, 16, tied=True).parameters == 2 * 576 + 80
    assert EXPERTS.layer_parameters == 192 + 8 * 4 + 4 * 384


def test_bytes_by_hand():
    assert memory.state_bytes(SMALL, 4) == 16 * 1312 // 4
    assert memory.gathered_bytes(SMALL) == 8 * 160 + 10 * 576
    # inputs 2*2*8*5, layer 34*8*5, logits 4*10*5, chunk 5*4*512*10
    assert memory.activation_bytes(SMALL, 5) == 160 + 1360 + 200 + 102400
    assert memory.activation_bytes(EXPERTS, 5) - memory.activation_bytes(SMALL, 5) == 2 * 2 * (2 * 8 + 3 * 16) * 5
    assert memory.state_bytes(SMALL, 2) == 16 * 1312 // 2


def test_memory_of_a_gpu_by_its_name():
    sizes = {"H200": 141, "NVIDIA H100 80GB HBM3": 80, "NVIDIA A100-SXM4-40GB": 40, "A100": 80, "L40S": 48}
    sizes |= {"NVIDIA B200": 180, "NVIDIA GB200": 186}
    found = {name: memory.gpu_memory(name) for name in (*sizes, "?")}
    assert found == {name: gb * GIB for name, gb in sizes.items()} | {"?": None}
