"""On a CPU a reader of vLLM's message queue sleeps between two messages, and misses none."""

import threading
import time

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.utils.network_utils import get_open_zmq_ipc_path

from verl_precision.integration.cpu.vllm_on_cpu import BUSY_SECONDS, wait_asleep


@pytest.fixture
def condition():
    """Make conditions of one queue; close their sockets in the end."""
    context, address = zmq.Context(), get_open_zmq_ipc_path()
    yield lambda is_reader: shm_broadcast.SpinCondition(is_reader, context, address)
    context.destroy(linger=0)


@pytest.mark.parametrize(("device", "busy_seconds"), [("cpu", BUSY_SECONDS), ("cuda", 1)])
def test_only_the_reader_of_a_cpu_sleeps(condition, monkeypatch, device, busy_seconds):
    monkeypatch.setattr("verl.utils.device.get_device_name", lambda: device)
    wait_asleep(shm_broadcast)
    assert (condition(False).busy_loop_s, condition(True).busy_loop_s) == (0, busy_seconds)


def test_a_sleeping_reader_is_woken_and_used_no_cpu(condition):
    wait_asleep(shm_broadcast)
    writer, reader = condition(False), condition(True)
    reader.last_read = -1.0  # long ago
    # What is published before a subscriber is known is lost: again until one arrives.
    arrived = threading.Event()

    def notify():
        while not arrived.wait(0.3):
            writer.notify()

    sender = threading.Thread(target=notify)
    sender.start()
    before = time.thread_time()
    reader.wait(timeout_ms=60_000)
    used = time.thread_time() - before
    arrived.set()
    sender.join()
    assert used < 0.1
