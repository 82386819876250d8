"""Which layout serves a workload best within its SLOs: cost models, a simulator of the real scheduler, the search.

Called by the command line and the benchmarks. Never touches tensors; measuring a real device is `assemble`'s.
"""
