"""Operators on a CPU: our compiled kernels, the ways to multiply, and which of them is the fastest here, as measured.

Called by `select`, which makes variants of them. `native.Kernels` is the compiled module; `measured` and `int8` choose
by the number of rows; `remembered` keeps what was measured for later starts.
"""
