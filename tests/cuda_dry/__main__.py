"""Run the tests of this tier: `python -m tests.cuda_dry [arguments of pytest]`, or another program:
`... --exec python ...`.

Compiles the stand-ins into a folder beside this interpreter's packages, preloads the one of the
CUDA runtime, and becomes pytest. Needs a C compiler and the CUDA builds of torch and FBGEMM, whose
wheels bring CUDA's headers.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
LIBRARIES = {  # name -> sources
    "libcudart_standin.so": ("device.c", "memory.c", "streams.c"),
    "libcuda.so.1": ("driver.c",),
    "libnvidia-ml.so.1": ("driver.c",),
}


def headers() -> Path:
    """The folder of cuda_runtime_api.h, in the wheel that torch's CUDA build depends on.

    Raises:
        SystemExit: this interpreter has no such wheel.
    """
    found = importlib.util.find_spec("nvidia")
    for root in found.submodule_search_locations or [] if found is not None else []:
        for header in sorted(Path(root).glob("*/include/cuda_runtime_api.h")):
            return header.parent
    raise SystemExit(
        f"{sys.executable} has no CUDA headers: dry runs need the CUDA builds of torch and "
        "fbgemm-gpu. Run `make test-cuda-dry`, which makes an environment of their own."
    )


def build(folder: Path) -> None:
    """Compile what is missing or older than its source."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CC", "cc")
    include = [f"-I{NATIVE}", f"-I{headers()}"]
    newest = max(source.stat().st_mtime for source in NATIVE.rglob("*.[ch]"))
    for name, sources in LIBRARIES.items():
        made = folder / name
        if made.exists() and made.stat().st_mtime > newest:
            continue
        command = [compiler, "-O1", "-shared", "-fPIC", f"-Wl,-soname,{name}", *include]
        files = [NATIVE / source for source in sources]
        subprocess.run([*command, "-o", made, *files, "-lpthread", "-ldl"], check=True)


def environment(folder: Path) -> dict[str, str]:
    """That of a process which finds the stand-ins."""
    return os.environ | {
        "LD_PRELOAD": str(folder / "libcudart_standin.so"),
        "LD_LIBRARY_PATH": str(folder),
        "RAYREC_CUDA_DRY": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_LAUNCH_BLOCKING": "0",
    }


def main() -> None:
    """Build, and become pytest or the given program."""
    folder = Path(sysconfig.get_paths()["purelib"]) / "rayrec_cuda_standins"
    build(folder)
    arguments = sys.argv[1:]
    if arguments[:1] == ["--exec"]:
        program = arguments[1:]
    else:
        program = [sys.executable, "-m", "pytest", "-p", "tests.cuda_dry.plugin"]
        program += ["-m", "gpu and not slow", *(arguments or ["-q"])]
    os.execvpe(program[0], program, environment(folder))


if __name__ == "__main__":
    main()
