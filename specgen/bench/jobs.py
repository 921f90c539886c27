"""What is measured: rows of fixed lengths, and two whole jobs."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from specgen.pipeline.request import PromptRow
from specgen.sampling_params import SamplingParams

__all__ = ["Job", "fixed_job", "make_rows", "mixed_job", "shared_prefix_job"]

MIXED_PROMPTS = 1000
SHARED_PREFIX_PROMPTS = 2000


@dataclass(frozen=True)
class Job:
    """Rows to run, by their lengths alone.

    Attributes:
        lengths: prompt and output tokens of each row.
        num_shared: tokens that all prompts begin with.
        batch: rows that run at a time; None leaves it to the engine.
    """

    name: str
    lengths: tuple[tuple[int, int], ...]
    num_shared: int = 0
    batch: int | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and output together."""
        return max(prompt + output for prompt, output in self.lengths)

    @property
    def num_output_tokens(self) -> int:
        """Tokens that the whole job generates."""
        return sum(output for _, output in self.lengths)


def fixed_job(batch: int, input_len: int, output_len: int) -> Job:
    """``batch`` rows of the same lengths, all at once."""
    return Job("fixed", ((input_len, output_len),) * batch, batch=batch)


def mixed_job(num_prompts: int = MIXED_PROMPTS) -> Job:
    """Log-normal lengths around 200 tokens in and 300 out, always the same ones."""
    rng = random.Random(0)

    def draw(mean: float, sigma: float, low: int, high: int) -> int:
        value = rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return min(max(int(value), low), high)

    # Prompt, then output, for each row in turn.
    lengths = [(draw(200, 0.8, 16, 2000), draw(300, 0.7, 16, 1500)) for _ in range(num_prompts)]
    return Job("mixed", tuple(lengths))


def shared_prefix_job(num_prompts: int = SHARED_PREFIX_PROMPTS) -> Job:
    """Prompts of 1,500 shared and 50 own tokens, 100 tokens out."""
    return Job("shared-prefix", ((1550, 100),) * num_prompts, num_shared=1500)


def make_rows(job: Job, *, vocab_size: int, temperature: float, seed: int) -> list[PromptRow]:
    """Rows of random token ids; every row runs to its length.

    Another ``seed`` gives other ids and other draws throughout, shared beginnings included.
    """
    rng = random.Random(seed)
    ids = range(vocab_size)
    shared = rng.choices(ids, k=job.num_shared)
    return [
        PromptRow(
            index=index,
            input_hash="0" * 16,
            line=index + 1,
            source=job.name,
            sampling=SamplingParams(
                temperature=temperature,
                max_tokens=output_len,
                ignore_eos=True,
                seed=rng.getrandbits(53),
            ),
            prompt_token_ids=(*shared, *rng.choices(ids, k=prompt_len - job.num_shared)),
        )
        for index, (prompt_len, output_len) in enumerate(job.lengths)
    ]
