"""The speed table: every operation beside its peers, with target, measured ratio and verdict.

    python -m benchmarks.speed                  # all rows, from nothing
    python -m benchmarks.speed --rows steps     # these alone; the record keeps its others
    python -m benchmarks.speed --quick          # small sizes, whether everything runs; no verdicts

Variants of an operation take turns in one process, on one thread, nine rounds after ten to warm
up; a ratio is the peer's time over ours of the same round, its median over the rounds. A/A is ours
a second time over ours: what equals differ by. Memory is the largest sum of live allocations of a
call beyond its inputs. Targets are ratios, of which 85 % are the gate: what a change must not fall
below. Peers that are not installed, and targets of a GPU where there is none, are named and not
measured. On a GPU calls are timed between CUDA events, under autocast to bfloat16, as in training
there.
"""
