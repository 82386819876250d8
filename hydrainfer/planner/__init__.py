"""The choice of the layout that serves a workload best within its SLOs.

`inputs` reads models and workloads as numbers, `costs` says how long batches take, `simulation` runs the real engines
on a virtual clock, `search` simulates layouts and ranks them, `clusters` is arithmetic about a far cluster. Called by
`profiling`, `costing` and the benchmarks, through these packages. Never touches tensors.
"""
