"""Inputs that nobody would send on purpose, by the hundred thousand: `make fuzz`; a few of them in every test run.

An input is a function of its target and its number, so that a run can be interrupted, goes on where it was, and any
input can be made again: `python -m benchmarks.b28_fuzz --only http:4711`.
"""
