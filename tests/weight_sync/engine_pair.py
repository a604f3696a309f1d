"""A trainer and vLLM engines in one process: transformers' model, verl's real sender, vLLM's real engine and worker.

What a verl run does between two updates, without Ray: send the weights, score the canary on both sides.
"""

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import pytest
import torch
import verl  # noqa: F401 - loads the plugin
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import AutoModelForCausalLM
from verl.utils.fsdp_utils import normalize_peft_param_name
from verl.workers.engine.fsdp.transformer_impl import unfuse_moe_params
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightSender
from verl.workers.rollout.vllm_rollout.utils import VLLM_LORA_INT_ID, VLLM_LORA_NAME, VLLM_LORA_PATH
from vllm import LLM, SamplingParams
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader import get_model

from verl_precision.base.versions import installed_vllm, loads_adapters
from verl_precision.integration.rollout.weight_sync_worker import VerifiedWeightSyncExtension
from verl_precision.tools.tiny_model import cached_tiny_model
from verl_precision.weight_sync.canary import CanaryJudge, CanaryVerdict, canary_tokens
from verl_precision.weight_sync.manifest import send_with_manifest
from verl_precision.weight_sync.report import ReportBox, SyncReport

VLLM = installed_vllm()
CANNOT = f"verl 0.9.1 cannot load a LoRA adapter into vLLM {VLLM} (adapter-not-loadable in docs/failure_modes.md)"
needs_adapters = pytest.mark.skipif(VLLM is not None and not loads_adapters(VLLM), reason=CANNOT)
EXTENSION = "verl_precision.integration.rollout.weight_sync_worker.VerifiedWeightSyncExtension"


def full_weights(model) -> list[tuple[str, Tensor]]:
    """Return what verl's engine sends: one tensor an expert, and a tied head once."""
    tied = model.config.tie_word_embeddings
    stream = ((n, t) for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight"))
    return list(unfuse_moe_params(stream, model.config.model_type))


def move(model, size: float = 0.02) -> None:
    """Change the trainer's weights, as an optimizer step does."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * size)


def without(part: str) -> Callable[[Iterable[tuple[str, Tensor]]], Iterable[tuple[str, Tensor]]]:
    """Return the damage to a stream that takes out the tensors with a part in their names."""
    return lambda stream: ((name, tensor) for name, tensor in stream if part not in name)


def send(stream: Iterable[tuple[str, Tensor]], handle: str, receive: Callable[[], object]) -> None:
    """Send with verl's sender from a thread, receive in this one. Buckets of 1 MB: several of them."""
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    thread = threading.Thread(target=lambda: asyncio.run(sender.async_send_weights(iter(stream))), daemon=True)
    thread.start()
    try:
        receive()
    finally:
        thread.join(timeout=30)
        assert not thread.is_alive(), "the sender was left waiting"


class EnginePair:
    """One trainer and one or more rollout replicas of a tiny model."""

    def __init__(self, architecture: str, dtype: str, replicas: int = 1, lora: bool = False, **arguments) -> None:
        self.dtype = getattr(torch, dtype)
        path = str(cached_tiny_model(architecture))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            settings = {"model": path, "dtype": dtype, "enable_lora": lora, "max_lora_rank": 8 if lora else 16}
            settings |= {"load_format": "dummy", "enforce_eager": True, "distributed_executor_backend": "uni"}
            # A cache of 64 blocks: megabytes instead of the 1 GB.
            settings |= {"max_model_len": 128, "gpu_memory_utilization": 0.1, "num_gpu_blocks_override": 64}
            settings |= {"mamba_ssm_cache_dtype": "float32"}  # of gated delta nets, which a CPU has with such a state
            settings |= {"worker_extension_cls": EXTENSION, "logprobs_mode": "processed_logprobs"} | arguments
            self.engines = [LLM(**settings, seed=rank) for rank in range(replicas)]  # another dummy model a replica
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.tokens = canary_tokens(self.model.config.vocab_size, (0, 1, 2), sequences=2, tokens=32)
        self.judge = CanaryJudge(self.dtype, self.dtype)
        self.lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"]) if lora else None
        self._job, self._base_sent = uuid.uuid4().hex, set()
        if self.lora:
            self.model = get_peft_model(self.model, self.lora)

    def sync(self, only: Iterable[int] | None = None, damage=lambda stream: stream) -> list[SyncReport]:
        """Send the weights to the replicas; return what each could verify."""
        reports = []
        for rank in range(len(self.engines)) if only is None else only:
            box = ReportBox()
            for weights, settings in self._streams(rank):
                self._send(rank, damage(send_with_manifest(weights, box.new_address())), settings)
            reports.append(box.take())
        assert None not in reports, "a receiver did not answer"
        return reports

    def canary(self) -> CanaryVerdict:
        """Score the canary on both sides, and judge."""
        answers = {rank: self._ask(engine) for rank, engine in enumerate(self.engines)}
        trainer = {rank: self.score(tokens)[:, -log_probs.shape[1] :] for rank, (tokens, log_probs) in answers.items()}
        return self.judge.judge(trainer, {rank: log_probs for rank, (_, log_probs) in answers.items()})

    def _streams(self, rank: int) -> Iterable[tuple[Iterable[tuple[str, Tensor]], dict]]:
        """Yield verl's weight streams of one sync; with LoRA the base weights at the first one, then the adapter."""
        if not self.lora:
            yield full_weights(self.model), {}
            return
        settings = {"peft_config": {**self.lora.to_dict(), "task_type": "CAUSAL_LM", "peft_type": "LORA"}}
        if rank not in self._base_sent:
            base = {name: tensor for name, tensor in self.model.state_dict().items() if "lora_" not in name}
            yield normalize_peft_param_name(base).items(), {**settings, "base_sync_done": False}
            self._base_sent.add(rank)
        yield get_peft_model_state_dict(self.model).items(), {**settings, "base_sync_done": True}

    def _send(self, rank: int, stream, settings: dict) -> None:
        engine, arguments = self.engines[rank], {"use_shm": True, **settings}
        handle = f"ipc:///tmp/rl-colocate-zmq-{self._job}-replica-{rank}-rank-0.sock"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VERL_RAY_JOB_ID", self._job)
            patch.setenv("VERL_REPLICA_RANK", str(rank))
            send(stream, handle, lambda: engine.collective_rpc("update_weights_from_ipc", kwargs=arguments))
        engine.reset_prefix_cache()

    def score(self, tokens: Tensor) -> Tensor:
        """Score as verl's FSDP engine does: FP32 weights, autocast, FP32 log-probs."""
        with torch.no_grad(), torch.autocast("cpu", self.dtype, enabled=self.dtype != torch.float32):
            logits = self.model(input_ids=tokens).logits
        log_probs = logits.float().log_softmax(-1)[:, :-1]
        return log_probs.gather(-1, tokens[:, 1:, None]).squeeze(-1)

    def _ask(self, engine) -> tuple[Tensor, Tensor]:
        """Ask as `TrainerCanary` asks verl's server: prompt log-probs, or with an adapter a greedy continuation."""
        ask, given, adapter = SamplingParams(prompt_logprobs=0, max_tokens=1), self.tokens, None
        if self.lora:
            ask = SamplingParams(logprobs=0, max_tokens=16, temperature=0.0, ignore_eos=True)
            given = self.tokens[:, :16]
            if VLLM_LORA_INT_ID in engine.llm_engine.list_loras():  # verl's server asks likewise
                adapter = LoRARequest(VLLM_LORA_NAME, VLLM_LORA_INT_ID, VLLM_LORA_PATH)
        prompts = [{"prompt_token_ids": row} for row in given.tolist()]
        outputs = engine.generate(prompts, ask, use_tqdm=False, lora_request=adapter)
        if not self.lora:
            entries = [output.prompt_logprobs[1:] for output in outputs]
            return given, torch.tensor([[next(iter(e.values())).logprob for e in row] for row in entries])
        completions = [output.outputs[0] for output in outputs]
        tokens = torch.cat([given, torch.tensor([list(c.token_ids) for c in completions])], dim=1)
        rows = [[e[t].logprob for e, t in zip(c.logprobs, c.token_ids, strict=True)] for c in completions]
        return tokens, torch.tensor(rows)


class WorkerPair:
    """A trainer's model, and our extension over a vLLM model that was loaded as verl loads it (random weights)."""

    def __init__(self, architecture: str = "qwen3", dtype: str = "float32", **arguments) -> None:
        path = str(cached_tiny_model(architecture))
        settings = {"model": path, "dtype": dtype, "load_format": "dummy", "enforce_eager": True}
        self.config = EngineArgs(**settings, **arguments).create_engine_config()
        self.context = lambda: set_current_vllm_config(self.config)  # in which vLLM builds and runs a model
        with self.context():
            self.model = get_model(vllm_config=self.config)
        handle = f"ipc:///tmp/vp-test-{uuid.uuid4().hex}.sock"
        runner = SimpleNamespace(model=self.model, vllm_config=self.config)
        self.worker = object.__new__(VerifiedWeightSyncExtension)
        self.worker.__dict__.update(device=torch.device("cpu"), local_rank=0, model_runner=runner)
        self.worker.__dict__.update(_is_qat_model=False, _is_modelopt_qat=False, _get_zmq_handle=lambda: handle)
        self.trainer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)

    def sync(self, damage=lambda stream: stream, before=lambda stream: stream, manifest=True) -> SyncReport | None:
        """Send the trainer's weights, changed `before` the manifest or damaged on the way; return the report."""
        box, stream, worker = ReportBox(), before(full_weights(self.trainer)), self.worker
        if manifest:
            stream = send_with_manifest(stream, box.new_address())
        with self.context():
            send(damage(stream), worker._get_zmq_handle(), lambda: worker.update_weights_from_ipc(use_shm=True))
        return box.take()

    @torch.no_grad()
    def head_gap(self) -> float:
        """Largest difference of the output head's result on one hidden state, relative to its size."""
        head, hidden = self.model.lm_head, torch.randn(3, self.trainer.config.hidden_size)
        ours = head.quant_method.apply(head, hidden.to(head.params_dtype), bias=None).float()
        theirs = self.trainer.lm_head(hidden)
        return float((ours[:, : theirs.shape[1]] - theirs).abs().max() / theirs.abs().max())

    @torch.no_grad()
    def experts_gap(self) -> float:
        """Likewise of one expert block's result; 0 without experts."""
        if not hasattr(self.trainer.model.layers[0].mlp, "experts"):
            return 0.0
        hidden = torch.randn(6, self.trainer.config.hidden_size, generator=torch.Generator().manual_seed(2))
        with self.context(), set_forward_context(None, self.config):
            ours = self.model.model.layers[0].mlp(hidden.to(self.config.model_config.dtype)).float()
        theirs = self.trainer.model.layers[0].mlp(hidden[None])
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        return float((ours - theirs.reshape(ours.shape)).abs().max() / theirs.abs().max())
