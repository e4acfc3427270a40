"""Promises: shards read and write as one; what is missing or damaged is named; memory is one tensor's; a round trip is exact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from etude.base.errors import CheckpointError, DiskFullError
from etude.models import stored
from etude.models.stored import INDEX, SINGLE, StoredTensors, store_tensors


def tensors(count: int = 7) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(10, i + 1, generator=generator) for i in range(count)}


def same(a: StoredTensors, b: dict[str, Tensor]) -> bool:
    return sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("max_bytes", [1, 300, 500, 10_000])
def test_what_is_stored_in_shards_of_any_size_is_read_back(tmp_path: Path, max_bytes: int) -> None:
    made = tensors()
    store_tensors(tmp_path, made.items(), torch.float32, max_bytes=max_bytes)
    read = StoredTensors(tmp_path)
    assert same(read, made)
    files = sorted(path.name for path in tmp_path.iterdir())
    if max_bytes == 10_000:
        assert files == [SINGLE]
        return
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in made.values())
    assert files == sorted({INDEX, *index["weight_map"].values()})
    for file in set(index["weight_map"].values()):
        held = load_file(str(tmp_path / file))
        assert len(held) == 1 or sum(tensor.nbytes for tensor in held.values()) <= max_bytes


def test_a_new_save_leaves_nothing_of_the_old_one_to_be_read(tmp_path: Path) -> None:
    store_tensors(tmp_path, tensors(7).items(), torch.float32, max_bytes=300)
    store_tensors(tmp_path, tensors(3).items(), torch.float32)
    assert same(StoredTensors(tmp_path), tensors(3))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
    store_tensors(tmp_path, tensors(7).items(), torch.float32, max_bytes=300)
    assert same(StoredTensors(tmp_path), tensors(7))


def test_transformers_reads_the_shards(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    model = LlamaForCausalLM(shape)
    model.save_pretrained(tmp_path)
    (tmp_path / SINGLE).unlink()
    store_tensors(tmp_path, model.state_dict().items(), torch.float32, max_bytes=4000)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    tokens = torch.arange(9)[None]
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(tokens).logits, model(tokens).logits)


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model\.safetensors there"):
        StoredTensors(tmp_path)
    store_tensors(tmp_path, tensors().items(), torch.float32, max_bytes=300)
    second = sorted(tmp_path.glob("model-00002*"))[0]
    whole = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=f"shard {second.name} is missing"):
        StoredTensors(tmp_path)
    second.write_bytes(whole[:-5])
    with pytest.raises(CheckpointError, match=f"{second.name}: cannot be read"):
        dict(StoredTensors(tmp_path))
    save_file({"another": torch.zeros(2)}, str(second))
    with pytest.raises(CheckpointError, match=f"{second.name}: no tensor layer"):
        dict(StoredTensors(tmp_path))
    (tmp_path / INDEX).write_text('{"weight_map": {"a": "../../etc/passwd"}}')
    with pytest.raises(CheckpointError, match="is not a file beside it"):
        StoredTensors(tmp_path)
    (tmp_path / INDEX).write_text("[]")
    with pytest.raises(CheckpointError, match="no readable weight_map"):
        StoredTensors(tmp_path)


def test_a_full_disk_is_named_and_the_old_checkpoint_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_tensors(tmp_path, tensors(3).items(), torch.float32)

    def full(*_: object, **__: object) -> None:
        raise stored.SafetensorError(
            'Error while serializing: I/O error: Os { code: 28, kind: StorageFull, message: "" }'
        )

    monkeypatch.setattr(stored, "save_file", full)
    with pytest.raises(DiskFullError, match=str(tmp_path)):
        store_tensors(tmp_path, tensors(7).items(), torch.float32)
    assert same(StoredTensors(tmp_path), tensors(3))
    assert [path.name for path in tmp_path.iterdir()] == [SINGLE]
