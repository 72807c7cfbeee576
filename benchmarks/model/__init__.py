"""Cost model: the estimate of a training step on a GPU that is not there, from its launches and their SASS.

    python -m benchmarks.model                              every case in every variant, on an H200
    python -m benchmarks.model --gpu a100 --cases mlp       a part of them, on an A100
    python -m benchmarks.model --cases mlp-gelu/d1024 --explain        and each launch: its estimated time, and what bounds it
    python -m benchmarks.model --calibrate DIR/results.csv  rates that fit a run of the benchmark

Forward and backward of a case run on meta tensors as they would on that GPU, and every launch is caught (trace). Of a kernel
with matmuls, the SASS says how many programs share an SM and what its loop and its epilogue
issue (sass). `rates` has what the GPU can do, `estimate` the arithmetic. An estimate is a prediction, not a measurement.
"""
