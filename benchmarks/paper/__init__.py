"""The HydraInfer paper's figures, simulated on a described H800: `python -m benchmarks.paper`.

Each module is a figure: `simulate` makes plain results, `draw` a picture of them, `compare` the rows "paper says / we
get", and `TEXT` what to think of the differences. `lab` runs what they ask for, once.
"""
