"""A session on a lent GPU: five steps of at most eight minutes each, and a dry run of them on a CPU.

    make gpu-session STEP=1                          (JSON and summary.txt in $OUT, default benchmarks/results/gpu)
    make gpu-session STEP=1 ARGS="--device cpu"      the same parts with tiny shapes: does every one of them start?

1 truth: rates, attention at new shapes, the GPU's tests. 2 micro: decode, prefill, encode, side by side, against their
floors. 3 moves: transports, a killed exporter, NCCL. 4 whole: 7B shapes through server and instances, the planner's
cost file. 5 again: the row of step 2 that is furthest from its floor, with what it spends its time on.
"""
