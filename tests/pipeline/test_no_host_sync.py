"""A step never waits for the device: no value of a tensor is read on the host while it runs.

Neither do the host's edits of device rows before it, which upload from memory of their own kind.

On a CPU nothing would wait, so the test looks for the operations that do on a GPU: reads of
scalars, shapes that depend on data, copies to the host, and uploads of fresh host data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.engines import FEW, EngineShop, make_checkpoints
from e2e.harness import make_row, run_all, tokens_of
from models.tiny import make_eagle1, make_target
from torch.utils._python_dispatch import TorchDispatchMode

from specgen.pipeline import request_state, uploads
from specgen.pipeline.drafter import Drafter
from specgen.pipeline.engine import Engine
from specgen.pipeline.rejection_sampler import RejectionSampler

WAITING_OPS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "nonzero_numpy",
    "argwhere",
    "masked_select",
    "masked_scatter",
    "unique_dim",
    "_unique2",
    "equal",
    "allclose",
    "repeat_interleave",
    "bincount",
    "lift_fresh",  # torch.tensor: an upload
}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_"}
HOST_METHODS = ("tolist", "numpy", "cpu", "item", "__bool__", "__int__", "__float__", "__index__")


class HostSyncError(AssertionError):
    """A step read a device value, or uploaded something."""


class Guard(TorchDispatchMode):
    """Raises on everything that would make the host wait, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.is_on = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self.is_on:
            self._check(func, args, kwargs)
            with self:  # look into composite operations
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)

    @staticmethod
    def _check(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func.overloadpacket.__name__
        if name in WAITING_OPS:
            raise HostSyncError(name)
        if name in INDEXING:
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise HostSyncError(f"{name} with a mask")
        if name == "_to_copy" and kwargs.get("device") is not None:
            raise HostSyncError("a copy between devices")


@contextmanager
def guarded(engine: Engine) -> Iterator[dict[str, int]]:
    """Guard every prefill and decode step of the engine and the edits before it; count them."""
    guard = Guard()
    guarded_methods: dict[str, Any] = {
        **dict.fromkeys(("prefill", "decode_step"), engine._runner),
        **dict.fromkeys(("admit", "write_block_tables", "deactivate"), engine._state),
    }
    calls = dict.fromkeys(guarded_methods, 0)

    def wrap(name: str) -> Callable[..., Any]:
        original = getattr(guarded_methods[name], name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            with guard:
                guard.is_on = True
                try:
                    return original(*args, **kwargs)
                finally:
                    guard.is_on = False

        return call

    def refuse(method: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            if guard.is_on:
                raise HostSyncError(method)
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for method in HOST_METHODS:
            patch.setattr(torch.Tensor, method, refuse(method))
        _let_the_interpreter_read(patch, guard)
        for module in (uploads, request_state):
            patch.setattr(module, "pinned", unguarded(uploads.pinned, guard))
        for name in calls:
            patch.setattr(guarded_methods[name], name, wrap(name))
        yield calls


def unguarded(function: Callable[..., Any], guard: Guard) -> Callable[..., Any]:
    """The one function that may hand fresh host data on."""

    def call(*args: Any) -> Any:
        was_on, guard.is_on = guard.is_on, False
        try:
            return function(*args)
        finally:
            guard.is_on = was_on

    return call


def _let_the_interpreter_read(patch: pytest.MonkeyPatch, guard: Guard) -> None:
    """Triton's interpreter runs kernels on the host: what happens inside a launch is no matter."""
    from triton.runtime import interpreter

    launch = interpreter.GridExecutor.__call__

    def call(*args: Any, **kwargs: Any) -> Any:
        was_on, guard.is_on = guard.is_on, False
        try:
            return launch(*args, **kwargs)
        finally:
            guard.is_on = was_on

    patch.setattr(interpreter.GridExecutor, "__call__", call)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> EngineShop:
    checkpoints: dict[str, Path] = make_checkpoints(tmp_path_factory.mktemp("checkpoints"))
    return EngineShop(checkpoints, device="cpu", dtype="float32")


def mixed_rows(num_rows: int, max_tokens: int) -> list[Any]:
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 3},
        {"top_p": 0.9, "num_speculative_tokens": 0},
        {"stop_token_ids": [2, 3]},
    ]
    return [
        make_row(i, (4, 3, 2, 4)[: 1 + i % 4], max_tokens=max_tokens, **settings[i % 4])
        for i in range(num_rows)
    ]


@pytest.mark.parametrize(
    ("draft", "sample"),
    [
        ("eagle1", "greedy"),
        ("eagle1", "gumbel"),
        ("eagle3", "greedy"),
        ("eagle3", "gumbel"),
        (None, "greedy"),
    ],
)
def test_steps_of_the_torch_twins(shop: EngineShop, draft: str | None, sample: str) -> None:
    engine = shop(
        "few",
        draft,
        draft_sample=sample,
        kernel_backend="reference",
        max_num_seqs=4,
        max_num_batched_tokens=6,
    )
    expected = tokens_of(run_all(engine, mixed_rows(12, 10)))
    with guarded(engine) as calls:
        assert tokens_of(run_all(engine, mixed_rows(12, 10), preempt_seed=0)) == expected
    assert min(calls.values()) > 3


@pytest.mark.parametrize("family", ["qwen3_moe", "mistral"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_steps_of_experts_and_windows(tmp_path: Path, family: str, backend: str) -> None:
    if backend == "triton" and torch.cuda.is_available():
        pytest.skip("Triton's interpreter runs without a GPU")
    options = {"sliding_window": 5} if family == "mistral" else {}
    target = make_target(tmp_path / "t", family, with_tokenizer=True, **FEW, **options)
    paths = {"t": target, "t-eagle1": make_eagle1(tmp_path / "e", target)}
    engine = EngineShop(paths, device="cpu", dtype="float32")(
        "t",
        "eagle1",
        kernel_backend=backend,
        num_speculative_tokens=2,
        max_num_seqs=2,
        max_model_len=24,
        max_num_batched_tokens=6,
    )
    rows = [
        make_row(i, (4, 3, 4)[: 1 + i], temperature=0.0, max_tokens=9, ignore_eos=True)
        for i in range(3)
    ]
    with guarded(engine) as calls:
        assert min(map(len, tokens_of(run_all(engine, rows)))) == 9
    assert min(calls["prefill"], calls["decode_step"]) > 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter runs without a GPU")
@pytest.mark.parametrize(("draft", "sample"), [("eagle1", "greedy"), ("eagle3", "gumbel")])
def test_steps_of_the_triton_kernels(shop: EngineShop, draft: str, sample: str) -> None:
    engine = shop(
        "few",
        draft,
        draft_sample=sample,
        kernel_backend="triton",
        num_speculative_tokens=2,
        max_num_seqs=2,
        max_model_len=16,
    )
    with guarded(engine) as calls:
        run_all(engine, mixed_rows(3, 4))
    assert min(calls.values()) > 0


SYNCS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "bool": lambda t: bool((t > 0).any()),
    "int": lambda t: int(t[0]),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu": lambda t: t.cpu(),
    "nonzero": lambda t: t.nonzero(),
    "masked_select": lambda t: t.masked_select(t > 0),
    "mask": lambda t: t[t > 0],
    "mask_put": lambda t: t.clone().index_put_((t > 0,), t[:1]),
    "unique": lambda t: t.unique(),
    "equal": lambda t: torch.equal(t, t),
    "upload": lambda t: torch.tensor([1, 2]),
    "where": lambda t: torch.where(t > 0),
}


@pytest.mark.parametrize("where", [(Drafter, "_propose"), (RejectionSampler, "verify")])
@pytest.mark.parametrize("sync", SYNCS)
def test_a_planted_wait_is_noticed(
    shop: EngineShop, monkeypatch: pytest.MonkeyPatch, sync: str, where: tuple[type, str]
) -> None:
    owner, method = where
    original = getattr(owner, method)

    def planted(self: Any, first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        SYNCS[sync](first)
        return original(self, first, *args, **kwargs)

    monkeypatch.setattr(owner, method, planted)
    engine = shop.build("few", "eagle1", kernel_backend="reference", max_num_seqs=2)
    with guarded(engine), pytest.raises(HostSyncError):
        run_all(engine, mixed_rows(2, 6))


@pytest.mark.parametrize("method", ["admit", "write_block_tables", "deactivate"])
def test_a_planted_upload_in_an_edit_is_noticed(
    shop: EngineShop, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    engine = shop.build("few", "eagle1", kernel_backend="reference", max_num_seqs=2)
    original = getattr(engine._state, method)

    def planted(rows: Any) -> Any:
        torch.tensor([0, 1])
        return original(rows)

    monkeypatch.setattr(engine._state, method, planted)
    with guarded(engine), pytest.raises(HostSyncError):
        run_all(engine, mixed_rows(2, 6))
