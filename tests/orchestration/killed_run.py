"""One life of a run in a process of its own, to be killed: ``python killed_run.py FOLDER SEED``. Says ``done`` at the end."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

from sample_fakes import Checkpoints, Run, reconciler


def main(folder: Path, seed: int) -> None:
    disk = Checkpoints.load(folder / "checkpoint.json")
    made = reconciler(folder, version=disk.version)
    made.resume(disk.last, disk.version)
    run = Run(
        made, disk, random.Random(seed), fault_rate=0.1, save_every=1 + seed % 2, save_first=seed % 3 > 0, say=True
    )
    asyncio.run(run.live())
    disk.save(made.version, run.weights, [])
    made.checkpointed(made.version)
    print("done", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
