"""What the first GPU must show, in one command: `python -m benchmarks.gpu` (docs/gpu.md).

Every part runs in a process of its own, so that one that fails hides no other. Parts that compare
check rayrec against the unsharded model on the CPU; parts that measure report times and judge
nothing. `--device cpu` runs all that needs no GPU.
"""
