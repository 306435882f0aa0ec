"""How fast and how frugal this package is, measured beside other code for the same task.

    python -m benchmarks                    # every row
    python -m benchmarks steps queue-loss   # these rows
    python -m benchmarks --quick            # small sizes, to see that everything runs; no verdicts
    python -m benchmarks --write            # also into results/speed, and into the page of the docs

A row measures one thing beside its peers. It is a file in `rows`, or an entry in one, and returns
findings: a number, its peer, its target and the verdict. Most rows are cases (`operation.py`):
variants of an operation take turns in one process, on one thread; nine rounds count, after three to
warm up. A ratio is the peer's time over ours in the same round, and its median over the rounds
counts. A/A is ours a second time over ours: what equal variants differ by.

- Time is processor time on a CPU, and on a GPU time between events under autocast to bfloat16.
- Memory is the largest sum of live allocations of a call beyond its inputs.
- Launches are the operations that a GPU would have to start. They are counted on tensors without
  data, where the forms for a GPU are chosen, so no GPU is needed.

Targets are ratios, of which 85 % are the gate that a change must not fall below. Every row has one
line in the record, `results/speed/cpu.jsonl` or `cuda.jsonl`, with the environment it was measured
in. Peers that are not installed are named, and not measured.
"""
