"""What a GPU would take for our operations, estimated without one.

    python -m benchmarks.gpu_model                  # the table, and its record
    python -m benchmarks.gpu_model --gpu a100       # of another GPU
    python -m benchmarks.gpu_model --check          # fails where a bound is missed

Every operation runs on tensors without data on a CUDA device that is not there; what it would
launch, the bytes that it would read and write and the FLOPs of its products are counted. An
estimate: a kernel takes the longer of its bytes over the memory's bandwidth and its FLOPs over the
peak; it starts when the host has issued it and the one before is done. Caches are left out.
"""
