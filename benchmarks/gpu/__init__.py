"""A session on a lent GPU: six steps, and a dry run of them on a CPU.

    make gpu-session STEP="look truth"                 (one archive and summary.txt in $OUT)
    make gpu-session STEP=look ARGS="--device cpu"     the same parts with tiny shapes: does every one of them start?

look: what is there, and does each thing work at all? truth: the GPU's tests, kernels under compute-sanitizer. micro:
decode, prefill, encode, side by side, against their floors. moves: rates, transports, a killed exporter, NCCL. whole:
7B shapes through instances, the planner's cost file. again: the row of micro that is furthest from its floor, with what
it spends its time on.
"""
