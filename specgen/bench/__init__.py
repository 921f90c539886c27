"""Throughput of the engine that `specgen run` drives, on real weights or on shapes alone."""
