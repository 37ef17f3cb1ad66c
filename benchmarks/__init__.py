"""Our engine against its peers, in turn on one machine: ``python -m benchmarks``."""
