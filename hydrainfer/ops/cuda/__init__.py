"""Operators on CUDA: our kernels, and FlashInfer's attention with the modules that it compiles.

Called by `select`, which makes variants of them.
"""
