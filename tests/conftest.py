"""Shared test set-up: Triton's interpreter without a GPU, and the gpu marker."""

from __future__ import annotations

import os
import signal
import threading

# Before torch is imported, here and in the processes that tests start: the models of the tests are
# tiny, and the barriers between threads would take most of their time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

# Run in the background or under nohup, the tests would hand their ignored signals on to the
# programs that they start and stop.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)

HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    # Read by Triton when a kernel is decorated: it must stand before any kernel module is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect (not skip) the tests that need a GPU on machines without one."""
    if HAS_CUDA:
        return
    kept = [item for item in items if item.get_closest_marker("gpu") is None]
    dropped = [item for item in items if item.get_closest_marker("gpu") is not None]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept


@pytest.fixture(scope="session")
def device() -> str:
    """The device of the kernel tests: CUDA where there is one, else the CPU."""
    return "cuda" if HAS_CUDA else "cpu"
