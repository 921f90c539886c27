"""specgen: offline batch generation with EAGLE drafts and exact rejection sampling.

The public names load on first use, so that ``import specgen`` (and ``specgen --help``) stays free
of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specgen.config import EngineConfig
    from specgen.pipeline.engine import Engine
    from specgen.pipeline.request import RequestOutput
    from specgen.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["Engine", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]

_HOMES = {
    "Engine": "specgen.pipeline.engine",
    "EngineConfig": "specgen.config",
    "RequestOutput": "specgen.pipeline.request",
    "SamplingParams": "specgen.sampling_params",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'specgen' has no attribute {name!r}")
    return getattr(import_module(home), name)
