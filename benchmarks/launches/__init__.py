"""What our operations and steps launch on a GPU, counted without one.

    python -m benchmarks.launches                  # the table
    python -m benchmarks.launches --write          # and the one that a test compares with

Every operation runs on tensors without data on a CUDA device that is not there. What it would
launch, the bytes that it would read and write, the FLOPs of its products, copies between host and
device and what the host would wait for are counted; beside them those of the plain form. Nothing
here says how long that takes.
"""
