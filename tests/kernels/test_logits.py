"""Thresholds of top-k and top-p against a sort in float64, for the twin and for Triton."""

from __future__ import annotations

import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specgen.kernels import logits as triton_logits
from specgen.kernels.reference import logits

# In Triton's interpreter numpy warns about values that the kernels mask afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
MODULES = [pytest.param(logits, id="reference"), pytest.param(triton_logits, id="triton")]


def oracle(row: np.ndarray, temperature: float, top_k: int, top_p: float) -> float:
    """Sort one row in float64 and return the lowest logit that stays."""
    if temperature < 1e-5:
        return -np.inf
    row = row[np.isfinite(row)].astype(np.float64)
    threshold = -np.inf
    descending = np.sort(row)[::-1]
    if 0 < top_k <= len(row):
        threshold = descending[top_k - 1]
    if top_p < 1.0:
        kept = descending[descending >= threshold]
        probs = np.exp((kept - kept[0]) / temperature)
        cumulative = np.cumsum(probs / probs.sum())
        threshold = kept[min(int(np.searchsorted(cumulative, top_p)), len(kept) - 1)]
    return float(threshold)


def check_row(result: float, row: np.ndarray, temperature: float, top_k: int, top_p: float) -> None:
    """The kept set must be the oracle's, up to the rounding of the mass at the boundary."""
    smallest = oracle(row, temperature, top_k, top_p * (1 - 2e-6)) if top_p < 1 else None
    largest = oracle(row, temperature, top_k, min(top_p * (1 + 2e-6), 1.0))
    kept = set(np.flatnonzero(row >= result))
    most = set(np.flatnonzero(row >= largest))
    least = most if smallest is None else set(np.flatnonzero(row >= smallest))
    # A threshold below every finite logit keeps what -inf keeps, -inf itself apart.
    finite = set(np.flatnonzero(np.isfinite(row)))
    assert least & finite <= kept & finite <= most & finite


def tensor_arguments(
    temperature: list[float], top_k: list[int], top_p: list[float], device: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.tensor(temperature, device=device),
        torch.tensor(top_k, dtype=torch.int32, device=device),
        torch.tensor(top_p, device=device),
    )


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [3, 1027])
def test_thresholds_equal_a_sort(
    module: ModuleType, dtype: torch.dtype, vocab_size: int, device: str
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    values = (3 * torch.randn(6, 2, vocab_size, generator=generator)).to(dtype)
    values[:, 1, ::3] = float("-inf")
    temperature = [1.0, 0.5, 2.0, 0.0, 1.0, 1.0]
    top_k = [0, 2, 50, 3, 0, 100_000]
    top_p = [0.9, 1.0, 0.7, 0.5, 1.0, 0.3]
    arguments = tensor_arguments(temperature, top_k, top_p, device)
    result = module.filter_thresholds(values.to(device), *arguments).cpu()
    assert result.shape == (6, 2)
    assert result.dtype == torch.float32
    for b in range(6):
        for q in range(2):
            row = values[b, q].float().numpy()
            check_row(float(result[b, q]), row, temperature[b], top_k[b], top_p[b])
    off = [3, 4]
    assert bool((result[off] == float("-inf")).all())


logit_rows = st.lists(
    st.one_of(st.integers(-6, 6).map(lambda n: n / 2), st.just(float("-inf"))),
    min_size=2,
    max_size=12,
).filter(lambda row: max(row) > float("-inf"))
temperatures = st.sampled_from([0.0, 0.25, 1.0, 3.0])
top_ks = st.integers(0, 14)
top_ps = st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.77, 0.999, 1.0])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(row=logit_rows, temperature=temperatures, top_k=top_ks, top_p=top_ps)
def test_twin_keeps_ties_and_skips_minus_inf(
    row: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    arguments = tensor_arguments([temperature], [top_k], [top_p], "cpu")
    result = logits.filter_thresholds(torch.tensor([[row]]), *arguments)
    check_row(float(result), np.array(row, dtype=np.float32), temperature, top_k, top_p)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(row=logit_rows, temperature=temperatures, top_k=top_ks, top_p=top_ps)
def test_triton_keeps_ties_and_skips_minus_inf(
    row: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    arguments = tensor_arguments([temperature], [top_k], [top_p], device)
    values = torch.tensor([[row]], device=device)
    result = triton_logits.filter_thresholds(values, *arguments)
    check_row(float(result), np.array(row, dtype=np.float32), temperature, top_k, top_p)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize(
    ("row", "top_k", "top_p", "kept"),
    [
        ([1.0, 3.0, 3.0, 2.0, 0.0], 1, 1.0, [1, 2]),  # ties of the boundary value all stay
        ([1.0, 3.0, 2.0, 2.0, 0.0], 2, 1.0, [1, 2, 3]),
        ([0.0, 0.0, 0.0, 0.0, -9.0], 0, 0.26, [0, 1, 2, 3]),
        ([5.0, 0.0, 0.0, 0.0, 0.0], 0, 0.0, [0]),  # never fewer than one token
        ([0.0, -0.0, -1.0, -2.0, -3.0], 1, 1.0, [0, 1]),  # -0 and +0 are equal
        ([1.0, 0.0, -0.0, -5.0, -6.0], 2, 0.6, [0, 1, 2]),  # so both count in top-p's mass
        ([-1.0, -2.0, -3.0, -4.0, -5.0], 3, 1.0, [0, 1, 2]),  # order of negative numbers
        # Mass is renormalised over what top-k left: .5 of the first two, not of all.
        ([0.0, -0.1, -0.2, -0.3, -0.4], 2, 0.5, [0]),
    ],
)
def test_known_sets(
    module: ModuleType, row: list[float], top_k: int, top_p: float, kept: list[int], device: str
) -> None:
    values = torch.tensor([[row]], device=device)
    threshold = module.filter_thresholds(values, *tensor_arguments([1.0], [top_k], [top_p], device))
    assert torch.nonzero(values[0, 0] >= threshold[0, 0])[:, 0].tolist() == kept


@pytest.mark.parametrize("module", MODULES)
def test_bad_rows_end(module: ModuleType, device: str) -> None:
    values = torch.zeros(3, 1, 70, device=device)
    values[0, 0, 5] = float("nan")
    values[1] = float("-inf")
    values[2, 0, 5] = float("inf")
    arguments = tensor_arguments([1.0] * 3, [4] * 3, [0.5] * 3, device)
    assert module.filter_thresholds(values, *arguments).shape == (3, 1)


def test_strided_logits_give_the_same(device: str) -> None:
    wide = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0)).to(device)
    view = wide[:, 1:, ::2]
    arguments = tensor_arguments([1.0, 1.0], [5, 0], [1.0, 0.6], device)
    result = triton_logits.filter_thresholds(view, *arguments)
    assert torch.equal(result, logits.filter_thresholds(view.contiguous(), *arguments))


def test_signatures_equal() -> None:
    ours, twin = triton_logits.filter_thresholds, logits.filter_thresholds
    assert inspect.signature(ours) == inspect.signature(twin)
