"""Numbered experiments: a question, the script that answers it, the JSON it writes and a figure of it.

Run as `python -m benchmarks.bNN_name`. Not part of the package: nothing in `hydrainfer` imports it.
"""

from hydrainfer.machine import let_threads_spin, limit_compiled_products

let_threads_spin()  # as `hydrainfer` does
limit_compiled_products()
