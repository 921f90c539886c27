"""How a row's vocabulary is cut into lanes, by the statistics of logits and by those of noise.

A block of the vocabulary has ``NUM_LANES`` lanes of as many ids: lane i has the groups of ids i,
i + NUM_LANES, ... A thread that reads a block by wide loads, next to the other threads, holds one
lane.
"""

from __future__ import annotations

VOCAB_BLOCK = 4096
NUM_LANES = 64
LANE_GROUP = 8
"""Ids that follow each other: one wide load."""

LANE_IDS = VOCAB_BLOCK // NUM_LANES
"""Ids of a lane, whose places count from 0 in ascending order."""

NUM_LOUDEST = 2
"""Noises that are known of a lane, the largest first."""

NOISE_STEP = 24 / (1 << 10)
NOISE_SLACK = 1e-3
"""Noises are kept in ten bits, rounded up by the slack, which is far above what rounding does to
noise and scores, and to the next step. (Noise is below 23.)"""
