"""The choice of the layout that serves a workload best within its SLOs.

`inputs` reads models and workloads as numbers, `costs` says how long batches take and what fits a device, `simulation`
runs the real engines on a virtual clock, `search` simulates layouts and ranks them. Called by `profiling`, `costing`
(which measures devices for it) and the benchmarks, through these packages. Never touches tensors.
"""
