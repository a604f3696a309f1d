"""A weight socket of its own for each run: two runs on one host must not load each other's weights.

verl's trainer sends the weights to vLLM through a UNIX socket in /tmp, named after the Ray job. The first job of every
Ray cluster has the same name, 01000000. So two runs on one host, each with a Ray of its own, share one path, and a
rollout may connect to the other run's trainer. Here both ends add the port of their cluster's control service, which no
other cluster of this host has.
"""

import os
from types import ModuleType
from typing import Any

from verl_precision.integration.ledger import wrap_once


def name_at_the_sender(module: ModuleType) -> None:
    """Wrap the trainer's end, once.

    Args:
        module: `verl.workers.rollout.vllm_rollout.vllm_rollout`.
    """
    wrap_once(module.__name__, "ServerAdapter.__init__", _rename_socket)


def name_at_the_receiver(module: ModuleType) -> None:
    """Wrap the end of vLLM's server, whose workers inherit its environment, once.

    Args:
        module: `verl.workers.rollout.vllm_rollout.vllm_async_server`.
    """
    wrap_once(module.__name__, "vLLMHttpServer.__init__", _rename_job)


def _rename_socket(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if _has_our_extension(instance.config):
        job, unique = _job_names()
        instance.zmq_handle = instance.zmq_handle.replace(f"-zmq-{job}-", f"-zmq-{unique}-")


def _rename_job(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> None:
    wrapped(*args, **kwargs)
    if _has_our_extension(instance.config):
        os.environ["VERL_RAY_JOB_ID"] = _job_names()[1]


def _has_our_extension(config: Any) -> bool:
    """Tell whether a run has a preset of ours; with disaggregated prefill verl passes the job's name on by itself."""
    if getattr(getattr(config, "disaggregation", None), "enabled", False):
        return False
    extension = (config.engine_kwargs.get("vllm") or {}).get("worker_extension_cls")
    return str(extension).startswith("verl_precision.")


def _job_names() -> tuple[str, str]:
    """Return Ray's name of the job, and one that no other cluster of this host has."""
    import ray

    context = ray.get_runtime_context()
    return context.get_job_id(), f"{context.get_job_id()}-{context.gcs_address.rpartition(':')[2]}"
