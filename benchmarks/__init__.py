"""Measurements of specgen; their records stand in ``results/``."""
