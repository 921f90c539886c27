"""How many threads a model on a CPU is worth."""

from __future__ import annotations

import os

import torch

_WEIGHTS_PER_THREAD = 8_000_000
# Each of these, where set, is the user's own choice.
_USER_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_NUM_THREADS")


def fit_cpu_threads(num_weights: int) -> int:
    """Lower torch's thread count (process-wide) to what a model of this size can use; return it.

    The matrix products of a small model take less time than the barrier behind them as soon as
    another process keeps one of the cores busy: the built-in pair on two threads of a loaded
    two-core machine ran 20 times slower than on one thread. A count that the environment sets is
    left alone.
    """
    current = torch.get_num_threads()
    if any(os.environ.get(name) for name in _USER_SETTINGS):
        return current
    wanted = max(1, min(current, num_weights // _WEIGHTS_PER_THREAD))
    if wanted != current:
        torch.set_num_threads(wanted)
    return wanted
