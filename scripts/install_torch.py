"""Install the CPU build of torch that constraints.txt names: from a local wheel, PyTorch's CPU index, or PyPI, in this order.

Usage: install_torch.py PIP CONSTRAINTS. On Linux PyPI's torch brings several gigabytes of CUDA, so it comes last and only
with ETUDE_TORCH=pypi (for machines with a GPU).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def main() -> int:
    pip, constraints = sys.argv[1:3]
    match = re.search(r"^torch==([\d.]+)", Path(constraints).read_text(), re.MULTILINE)
    if match is None:
        print(f"{constraints}: no line torch==VERSION", file=sys.stderr)
        return 2
    wanted = f"torch=={match.group(1)}"
    base = [pip, "install", "--quiet", "--disable-pip-version-check"]
    if os.environ.get("ETUDE_TORCH") == "pypi":
        return subprocess.call([*base, wanted])
    # a wheel on disk (PIP_FIND_LINKS) needs no index; otherwise the CPU index, which also has torch's dependencies
    attempts = [
        [*base, "--no-index", "--no-deps", f"{wanted}+cpu"],
        [*base, "--index-url", CPU_INDEX, f"{wanted}+cpu"],
    ]
    for command in attempts:
        if subprocess.call(command, stderr=subprocess.DEVNULL) == 0:
            # dependencies that a --no-deps install left out
            return subprocess.call([*base, wanted])
    print(
        f"torch: no CPU wheel of {wanted} found on disk or at {CPU_INDEX}; check the network, or set ETUDE_TORCH=pypi to "
        "take PyPI's build (several gigabytes on Linux)",
        file=sys.stderr,
    )
    return 2


if __name__ == "__main__":
    sys.exit(main())
