"""The reports of `hydrainfer bench` and `hydrainfer profile`: tables, files, and pages that open without a network.

`bench` shows a `BenchResult`, `plan` a `LayoutPlan`; both draw with `drawing`. Never measures and never judges.
"""
