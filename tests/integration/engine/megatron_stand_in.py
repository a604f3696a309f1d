"""verl's own Megatron engine on a CPU without Megatron: its modules are empty, its model and its optimizer stand-ins.

What runs is verl's: the engine's steps (`train_batch`, `optimizer_step`, `lr_scheduler_step`, loss and metrics of a
micro-batch, the entry of the weight stream), `init_megatron_optim_config`, the training hooks. What Megatron would do
is done by two classes here, after megatron-core 0.16.1: a model of 16-bit weights without parallelism, and an
optimizer with FP32 main weights and `MixedPrecisionOptimizer`'s contract: `step()` returns (False, None, None) on
overflow.
"""

import importlib.machinery
import sys
import types
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

ABSENT = ("megatron", "mbridge", "transformer_engine", "modelopt")


class Anything(type):
    """The type of a class that takes anything, does nothing, and has every attribute, as an enumeration has."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Empty(types.ModuleType):
    """A module in which every name is such a class."""

    __path__: list[str] = []
    __version__ = "0.16.1"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, Anything(name, (), {"__init__": lambda self, *args, **kwargs: None}))
        return getattr(self, name)


class EmptyModules:
    """Finds and loads an `Empty` for each module of the packages that are absent."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] in ABSENT:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: Any) -> Empty:
        return Empty(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


@dataclass
class OptimizerConfig:
    """The fields of megatron-core 0.16.1 that verl sets, or that our presets set through verl, with their defaults."""

    optimizer: str = "adam"
    lr: float | None = None
    min_lr: float | None = None
    clip_grad: float = 1.0
    weight_decay: float = 0.01
    use_distributed_optimizer: bool = False
    fp16: bool = False
    bf16: bool = False
    params_dtype: torch.dtype = torch.float32
    initial_loss_scale: float = 2**32
    min_loss_scale: float = 1.0
    loss_scale_window: float = 1000
    hysteresis: int = 2
    use_precision_aware_optimizer: bool = False
    store_param_remainders: bool = True
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_eps: float = 1e-8


class MixedPrecisionOptimizer:
    """Adam on FP32 copies of 16-bit weights, under a dynamic loss scale in FP16."""

    def __init__(self, config: OptimizerConfig, model_chunks: list[torch.nn.Module]) -> None:
        self.config = config
        self.weights = [weight for chunk in model_chunks for weight in chunk.parameters()]
        self.main = [weight.detach().float() for weight in self.weights]
        betas = (config.adam_beta1, config.adam_beta2)
        self.adam = torch.optim.AdamW(self.main, lr=config.lr or 0.0, betas=betas, eps=config.adam_eps)
        self.scale, self.good, self.left = (config.initial_loss_scale if config.fp16 else 1.0), 0, config.hysteresis

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.adam.param_groups

    def get_loss_scale(self) -> torch.Tensor:
        return torch.tensor([float(self.scale)])

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return self.get_loss_scale() * loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights:
            weight.grad = None

    def step(self) -> tuple[bool, float | None, int | None]:
        for main, weight in zip(self.main, self.weights, strict=True):
            main.grad = None if weight.grad is None else weight.grad.float() / self.scale
        gradients = [main.grad for main in self.main if main.grad is not None]
        if self.config.fp16:
            overflow = not all(gradient.isfinite().all() for gradient in gradients)
            self._update_scale(overflow)
            if overflow:
                return False, None, None
        norm = float(torch.nn.utils.clip_grad_norm_(self.main, self.config.clip_grad))
        self.adam.step()
        with torch.no_grad():
            for main, weight in zip(self.main, self.weights, strict=True):
                weight.copy_(main)
        return True, norm, None

    def _update_scale(self, overflow: bool) -> None:
        self.good, self.left = (0, self.left - 1) if overflow else (self.good + 1, self.left)
        if overflow and self.left <= 0:
            self.scale = max(self.scale / 2, self.config.min_loss_scale)
        if self.good == self.config.loss_scale_window:
            self.scale, self.good, self.left = self.scale * 2, 0, self.config.hysteresis


def verls_megatron() -> Any:
    """Import verl's Megatron engine among empty modules of Megatron; return verl's module."""
    sys.meta_path.append(EmptyModules())  # type: ignore[arg-type]
    optimizer: Any = importlib.import_module("megatron.core.optimizer")
    optimizer.OptimizerConfig, optimizer.get_megatron_optimizer = OptimizerConfig, MixedPrecisionOptimizer
    utils: Any = importlib.import_module("megatron.core.utils")
    utils.get_model_config = lambda chunk: chunk.config
    return importlib.import_module("verl.workers.engine.megatron.transformer_impl")


class Chunk(torch.nn.Module):
    """A whole model as one stage of a pipeline."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config, self.ddp_config = SimpleNamespace(no_sync_func=None), SimpleNamespace()

    def zero_grad_buffer(self) -> None:
        """Megatron's own buffer; the optimizer has dropped the gradients here."""


def stand_in(base: type) -> type:
    """Subclass an engine of verl, or of ours, with what a CPU has in the place of Megatron's model and schedule."""

    class StandIn(base):  # type: ignore[misc, valid-type]
        def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
            from verl.utils.torch_dtypes import PrecisionType

            self.model_config, self.engine_config = model_config, engine_config
            self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
            self.param_dtype = PrecisionType.to_dtype(engine_config.dtype)
            self.vanilla_bridge, self.peft_cls, self._qat_enabled, self._hf_export_tasks = False, None, False, None
            self.tf_config, self.mode = None, None
            self._is_offload_param = self._is_offload_optimizer = False

        def initialize(self):
            model = AutoModelForCausalLM.from_pretrained(self.model_config.path, attn_implementation="sdpa")
            self.module = [Chunk(model.to(self.param_dtype))]
            self.optimizer = self._build_optimizer()
            schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer.adam, 1.0, 0.1, total_iters=10)
            self.lr_scheduler = SimpleNamespace(step=lambda increment: schedule.step())
            self.bridge = SimpleNamespace(
                get_conversion_tasks=lambda module: None,
                export_hf_weights=lambda module, conversion_tasks: iter(model.state_dict().items()),
            )

        def forward_backward_batch(self, data, loss_function, forward_only=False):
            from verl.utils import tensordict_utils as tu
            from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

            tokens = int(data["loss_mask"].values().sum())
            tu.assign_non_tensor(data, batch_num_tokens=tokens, dp_size=1, sp_size=1)
            micro_batches, indices = prepare_micro_batches(data=data, dp_group=None, same_micro_num_in_dp=True)
            outputs = []
            for micro_batch in micro_batches:
                tu.assign_non_tensor(micro_batch, num_micro_batch=len(micro_batches))
                loss, output = self.postprocess_micro_batch_func(None, micro_batch, forward_only, loss_function)
                if not forward_only:
                    scaled = self.module[0].config.grad_scale_func(loss / len(micro_batches))
                    scaled.backward()
                outputs.append(output)
            return postprocess_batch_func(output_lst=outputs, indices=indices, data=data)

        def prepare_model_outputs(self, output, data):
            rows = []
            for ids in data["input_ids"].unbind():
                logits = self.module[0].model(ids[None], use_cache=False).logits[0].float()
                rows.append(logits.log_softmax(dim=-1).gather(1, ids.roll(-1)[:, None])[:, 0])
            return {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}

        def get_data_parallel_group(self):
            return None

        def get_data_parallel_size(self):
            return 1

        def is_mp_src_rank_with_outputs(self):
            return True

    return StandIn
