"""The tables and figures of Prefill-as-a-Service that follow from its throughput model: `python -m benchmarks.prfaas`.

Each module is a table or a figure: `compute` makes plain results, among them `rows` that stand beside the paper's,
`TEXT` says what to think of the differences, and some `draw` a picture. `setting` has the paper's numbers,
`tables` writes them as files that `hydrainfer profile --clusters` plans with.
"""
