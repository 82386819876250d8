"""Which layout serves a workload best within its SLOs.

`inputs` reads models and workloads as numbers, `costs` says how long batches take and what fits a device, `simulation`
runs the real engines on a virtual clock, `search` asks it about layouts. Called by `profiling`, `assemble` (which
measures devices for it) and the benchmarks, through these four faces. Never touches tensors.
"""
