"""The draft of speculative decoding: do its weights change, and how many of its tokens does the policy accept?

verl 0.9.1 loads each weight stream into an MTP draft too, and into no other draft. A model of transformers, which FSDP
trains, has no MTP layers, so their weights stay as vLLM made them. Sampling is still from the policy; a draft that does
not follow it costs speed only (vllm#48296). A draft of vLLM's second model runner is not found, and not reported.
"""

from typing import Any

import torch
from torch import Tensor, nn

from verl_precision.weight_sync.manifest import StreamDigest, TensorDigest
from verl_precision.weight_sync.report import SyncReport

_REJECTED = -1  # in place of a token, in vLLM's sampled tokens


class Draft:
    """The draft of one rollout worker, watched from the first weight sync on."""

    def __init__(self, runner: Any, model: nn.Module) -> None:
        self._model, self._shared = model, {id(parameter) for parameter in runner.model.parameters()}
        self._held = self._digests()
        self._drafted, self._accepted = 0, torch.zeros((), dtype=torch.int64, device=runner.device)
        runner.rejection_sampler.register_forward_hook(self._count)

    def add_to(self, report: SyncReport) -> None:
        """Add the draft's layers, those with the weights of the last sync, and what was accepted since then."""
        before, self._held = self._held, self._digests()
        changed = {name.rpartition(".")[0] for name, digest in self._held.items() if before.get(name) != digest}
        layers = {name.rpartition(".")[0] for name in self._held}
        report.draft_layers, report.draft_layers_unchanged = len(layers), len(layers - changed)
        report.drafted_tokens, report.accepted_tokens = self._drafted, int(self._accepted)
        self._drafted = 0
        self._accepted.zero_()

    def _digests(self) -> dict[str, TensorDigest]:
        """Return the digests of its own parameters; a kernel of a CPU leaves empty those that it packs."""
        stream = StreamDigest()
        own = [(name, each) for name, each in self._model.named_parameters() if id(each) not in self._shared]
        for name, parameter in own:
            if parameter.numel():
                stream.add(name, parameter.detach())
        return stream.fetch() if own else {}

    def _count(self, sampler: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """Count tokens, without waiting for the device. Each response also gets one token that is not the draft's."""
        tokens: Tensor = output.sampled_token_ids
        self._drafted += sum(arguments[0].num_draft_tokens)
        self._accepted += (tokens != _REJECTED).sum() - tokens.shape[0]


def draft_of(runner: Any) -> Draft | None:
    """Return the draft of a model runner, or None: it drafts with no model, or with none that is found."""
    model = getattr(getattr(runner, "drafter", None), "model", None)
    return Draft(runner, model) if isinstance(model, nn.Module) and hasattr(runner, "rejection_sampler") else None
