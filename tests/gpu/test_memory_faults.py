"""Memory of a GPU that really runs out: the allocator is told that the device is smaller.

What a run needs beside weights, caches and rows is measured first, by one row at a time and by all
at once; the limit is then put between the two.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from e2e.harness import make_row, run_all
from models.tiny import make_eagle3, make_target

from specgen.config import EngineConfig
from specgen.pipeline.engine import Engine
from specgen.pipeline.request import PromptRow, RequestOutput

pytestmark = pytest.mark.gpu

MIB = 1 << 20
# Wide where a step is, so that its temporaries are far larger than the model.
SIZES: dict[str, Any] = {
    "vocab_size": 400_000,
    "hidden_size": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}
NUM_ROWS = 64


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    root = tmp_path_factory.mktemp("wide")
    target = make_target(root / "target", **SIZES)
    head = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return {
        None: target,
        "eagle3": make_eagle3(root / "eagle3", target, draft_vocab_size=24_000, **head),
    }


@pytest.fixture(autouse=True)
def whole_device() -> Iterator[None]:
    """Nothing held and nothing limited, before and after."""

    def reset() -> None:
        torch.cuda.set_per_process_memory_fraction(1.0)
        gc.collect()
        torch.cuda.empty_cache()

    reset()
    yield
    reset()


def build(
    models: dict[str | None, Path], draft: str | None, graphs: bool, phase: str = "decode"
) -> Engine:
    return Engine(
        EngineConfig(
            model=str(models[None]),
            draft_model=None if draft is None else str(models[draft]),
            draft_sample="greedy" if draft is None else "gumbel",
            num_speculative_tokens=3,
            device="cuda",
            dtype="float32",
            skip_tokenizer_init=True,
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=8192 if phase == "prefill" else 64,  # decode holds the most rows
            max_model_len=1024,
            num_kv_blocks=64 * 64,
            cuda_graphs=graphs,
        )
    )


def rows_of(phase: str) -> list[PromptRow]:
    """Long prompts and short completions, or the other way round."""
    length, max_tokens, count = (500, 3, 16) if phase == "prefill" else (4, 24, NUM_ROWS)
    generator = torch.Generator().manual_seed(0)
    return [
        make_row(
            i,
            torch.randint(4, 40_000, (length + i % 3,), generator=generator).tolist(),
            max_tokens=max_tokens + i % 5,
            temperature=0.8,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def peak_of(work: Callable[[], Any]) -> tuple[Any, int]:
    """What `work` returns, and how many bytes it reserved beside what was there."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    result = work()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_reserved() - before


def allow(num_bytes: int) -> None:
    """Let the process reserve so much more than it holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + num_bytes) / total)


def watch(engine: Engine) -> Counter[str]:
    """Count the real allocation failures by phase."""
    faults: Counter[str] = Counter()

    def watched(phase: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            try:
                return real(*args)
            except torch.OutOfMemoryError:
                faults[phase] += 1
                raise

        return call

    runner: Any = engine._runner
    for phase in ("prefill", "decode"):
        setattr(runner, phase, watched(phase, getattr(runner, phase)))
    return faults


def check_rows(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    """All rows are back, at worst one as an error row, the others with their tokens."""
    assert [output.row.index for output in found] == [output.row.index for output in expected]
    failed = [output for output in found if output.error is not None]
    assert len(failed) <= 1
    assert {output.error.code for output in failed if output.error} <= {"out_of_memory"}
    differing = [
        output.row.index
        for output, whole in zip(found, expected, strict=True)
        if output.error is None
        and [c.token_ids for c in output.choices] != [c.token_ids for c in whole.choices]
    ]
    # Products of other shapes round otherwise, which may move a token among the thousand.
    assert len(differing) <= 1, differing


def measure(
    models: dict[str | None, Path], draft: str | None, graphs: bool, phase: str
) -> tuple[list[RequestOutput], int, int]:
    """The rows without pressure, and what single rows and all together reserve."""
    rows = rows_of(phase)
    engine = build(models, draft, graphs, phase)
    run_all(engine, rows[:1])  # compiles kernels, and fills the workspaces of libraries
    engine._pipeline.forget_graphs()
    _, alone = peak_of(lambda: [run_all(engine, [row]) for row in rows[:4]])
    engine._pipeline.forget_graphs()
    expected, together = peak_of(lambda: run_all(engine, rows))
    return expected, alone, together


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    ("phase", "draft"), [("prefill", None), ("decode", None), ("decode", "eagle3")]
)
def test_the_batch_shrinks_and_all_rows_come_back(
    models: dict[str | None, Path], phase: str, draft: str | None, graphs: bool
) -> None:
    rows = rows_of(phase)
    expected, alone, together = measure(models, draft, graphs, phase)
    assert together > alone + 64 * MIB, "the pressure would be none"
    for share in (0.6, 0.4, 0.25, 0.1):
        gc.collect()
        engine = build(models, draft, graphs, phase)
        faults = watch(engine)
        allow(alone + int(share * (together - alone)))
        found = run_all(engine, rows)
        torch.cuda.set_per_process_memory_fraction(1.0)
        check_rows(found, expected)
        assert engine.num_memory_faults >= faults.total()
        if faults[phase]:
            break
        del engine
    assert faults[phase] > 0, f"never in {phase}: {faults}, {alone >> 20} and {together >> 20} MiB"


def test_all_graphs_can_be_forgotten_and_made_again(models: dict[str | None, Path]) -> None:
    rows = rows_of("decode")
    engine = build(models, "eagle3", True)
    expected = run_all(engine, rows)
    for _ in range(2):
        engine._pipeline.release_memory()
        check_rows(run_all(engine, rows), expected)


def test_captures_leave_no_memory_behind(models: dict[str | None, Path]) -> None:
    """Each stream that a product ran in keeps a workspace: captures share one."""
    rows = rows_of("decode")
    engine = build(models, None, True)
    run_all(engine, rows)
    held = []
    for _ in range(6):
        engine._pipeline.release_memory()
        held.append(torch.cuda.memory_reserved())
        run_all(engine, rows[:8])
    assert max(held[1:]) <= held[1] + 2 * MIB, held


class TightCapture(torch.cuda.graph):
    """A capture for which no memory can be had, as long as `left` is above zero."""

    left = 0

    def __enter__(self) -> None:
        super().__enter__()
        self._tight = TightCapture.left > 0
        if self._tight:
            TightCapture.left -= 1
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)

    def __exit__(self, *error: Any) -> None:
        if self._tight:
            torch.cuda.set_per_process_memory_fraction(1.0)
        super().__exit__(*error)


@pytest.mark.parametrize("num_failures", [1, 2])
def test_memory_that_runs_out_in_a_capture_lowers_the_largest_batch_and_says_so(
    models: dict[str | None, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    num_failures: int,
) -> None:
    rows = rows_of("decode")
    expected = run_all(build(models, "eagle3", False), rows)
    gc.collect()
    monkeypatch.setattr(torch.cuda, "graph", TightCapture)
    monkeypatch.setattr(TightCapture, "left", num_failures)
    engine = build(models, "eagle3", True)
    engine._runner._prefill_graphs = None  # the first capture is a decode step's
    with caplog.at_level(logging.WARNING, logger="specgen"):
        found = run_all(engine, rows)
    assert TightCapture.left == 0, "nothing was captured"
    check_rows(found, expected)
    assert engine.num_memory_faults >= num_failures
    assert engine._pipeline.max_num_rows < NUM_ROWS
    said = [record.getMessage() for record in caplog.records]
    assert any("memory ran out as the step of 64 rows was captured" in message for message in said)
    # The smaller batch goes on through graphs.
    assert engine._pipeline.graphs is not None
    assert engine._pipeline.graphs._graphs


def test_memory_that_runs_out_in_the_capture_of_a_prompt_pass_costs_no_row(
    models: dict[str | None, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = rows_of("decode")
    expected = run_all(build(models, "eagle3", False), rows)
    gc.collect()
    monkeypatch.setattr(torch.cuda, "graph", TightCapture)
    monkeypatch.setattr(TightCapture, "left", 1)
    engine = build(models, "eagle3", True)
    with caplog.at_level(logging.WARNING, logger="specgen"):
        found = run_all(engine, rows)
    assert TightCapture.left == 0, "nothing was captured"
    check_rows(found, expected)
    assert engine.num_memory_faults == 0
    (said,) = [record.getMessage() for record in caplog.records]
    assert "prompt tokens was captured: so many are launched kernel by kernel" in said
    # Decode steps, and passes over fewer tokens, still go through graphs.
    assert engine._pipeline.max_num_rows == NUM_ROWS
    check_rows(run_all(engine, rows[:4]), expected[:4])
    assert engine._pipeline.prefill_graphs is not None
    assert engine._pipeline.prefill_graphs._graphs
