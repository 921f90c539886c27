"""The names of the random streams, shared by the Triton kernels and their torch twins.

A draw is addressed by four 32-bit counter words (see :mod:`specgen.kernels.reference.rng`); the
third one holds the stream in its low byte and ``j``, the index of a draft inside its block, above.
Streams keep draws of different purpose at one position independent: a recovered token drawn from
the noise that already chose the rejected draft would bias the output.
"""

from __future__ import annotations

DRAFT = 0
"""Gumbel noise that chooses draft tokens."""

ACCEPT = 1
"""Uniforms of the acceptance tests."""

TARGET = 2
"""Gumbel noise of the tokens that the target itself emits: first, recovered and bonus tokens."""

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this one mean argmax."""
