"""Memory of batches: those that are held never change, what is freed is used again; and page-locked
where a GPU is to read it.
"""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch
from arrow_files import SCHEMA, batch_rows, write_files

from rayrec.data import ParquetDataset

SCRIPT = """
import random, resource, sys, threading
from rayrec.machine.memory import tune_malloc
assert tune_malloc()
import torch
from benchmarks.data import make
from rayrec.data import to_batch

rng = random.Random(int(sys.argv[1]))
made = [make(rows, 8, seed) for seed, rows in enumerate((4000, 4001, 3900, 4100))]
tensors = lambda b: (b.labels, b.sparse_features.values(), b.sparse_features.lengths())
expected = [[t.clone() for t in tensors(to_batch(*pair))] for pair in made]

def convert():
    held, faults = [], 0
    for step in range(300):
        if step == 100:  # by then the heap has found its size
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        which = rng.randrange(len(made))
        held.append((which, to_batch(*made[which])))
        while len(held) > 5 or (held and rng.random() < 0.3):
            which, batch = held.pop(rng.randrange(len(held)))
            pairs = zip(tensors(batch), expected[which], strict=True)
            assert all(torch.equal(t, e) for t, e in pairs), which
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults)

thread = threading.Thread(target=convert)
thread.start()
thread.join()
"""


def faults(seed):
    """Page faults of a loader's thread, as in a rank, that converts 200 batches of about 1.4 MB,
    350 pages each.

    Up to five are held for random times; a batch that changes meanwhile fails the process.
    """
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seed)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
@pytest.mark.seeds(range(3))
def test_held_batches_never_change(seed):
    faults(seed)


@pytest.mark.slow  # a machine short of memory may take pages away
@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_used_again():
    assert min(faults(seed) for seed in range(3)) < 200 * 35, "a tenth of the pages"


@pytest.mark.gpu
def test_pinned_batches_are_written_in_page_locked_memory_that_is_used_again(tmp_path):
    write_files(tmp_path, random.Random(0), "parquet", (2000,))
    data = ParquetDataset(tmp_path, SCHEMA)
    places = set()
    with data.loader(0, 1, 20, pin_memory=True) as pinned, data.loader(0, 1, 20) as plain:
        for batch, wanted in zip(pinned, plain, strict=True):
            assert all(
                t.is_pinned()
                for t in (batch.dense_features, batch.labels, batch.sparse_features.values())
            )
            assert batch.pin_memory().labels.data_ptr() == batch.labels.data_ptr()  # no copy
            on_device = batch.to("cuda", non_blocking=True)
            places.add(batch.sparse_features.values().data_ptr())
            torch.cuda.synchronize()
            assert batch_rows(on_device.to("cpu")) == batch_rows(wanted)
    assert len(places) < 20  # of 100 batches
