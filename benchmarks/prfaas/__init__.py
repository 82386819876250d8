"""The tables and figures of Prefill-as-a-Service that follow from its throughput model and from models' shapes, and
those of MiMo-V2.5 and HydraInfer beside it: `python -m benchmarks.prfaas`.

Each module is a table or a figure: `compute` makes plain results, among them `rows` that stand beside the paper's,
`TEXT` says what to think of the differences, and some `draw` a picture. `setting` has the paper's numbers, which
`tables` writes as files that `hydrainfer profile --clusters` plans with, `models` the layers of published models, and
`served` what the simulated parts share.
"""
