"""Promises: whatever the object store does, the engine goes on serving the version it has, says which, and can be repaired."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inference_fakes import params, tiny

from etude.base.errors import DeadlineExceeded, WeightSyncError
from etude.data.tokenizer import save_tokenizer, train_tokenizer
from etude.inference.engine import EngineConfig
from etude.inference.service import InferenceService, ServerConfig
from etude.models.checkpoint import export_state, save_checkpoint
from etude.weights.content import content_hash
from etude.weights.publisher import WeightPublisher
from etude.weights.store import Store
from etude.weights.subscriber import WeightSubscriber

VOCAB = 300


class Faulty(Store):
    """A folder whose reads of deltas go through ``fault``."""

    fault: Callable[[bytes], bytes] = staticmethod(lambda data: data)

    def get(self, key: str) -> bytes:
        data = super().get(key)
        return self.fault(data) if key.startswith("deltas/") else data


def missing(data: bytes) -> bytes:
    raise WeightSyncError("object store: cannot read deltas/00000001: 503")


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "corrupt": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
    "truncated": lambda data: data[: len(data) // 2],
    "missing": missing,
}


@pytest.fixture
def service(tmp_path: Path) -> Iterator[InferenceService]:
    """Serves version 0; version 1 is published as a delta on it."""
    save_checkpoint(tiny(3, vocab_size=VOCAB), tmp_path / "served", eos_token_id=1, pad_token_id=0)
    save_tokenizer(train_tokenizer(["def f(x):\n    return x + 1\n"] * 20, VOCAB), tmp_path / "served")
    store = Faulty(str(tmp_path / "store"))
    publisher = WeightPublisher(store)
    for version, seed in enumerate((3, 4)):
        publisher.publish(version, export_state(tiny(seed, vocab_size=VOCAB)))
    made = InferenceService(
        ServerConfig(
            checkpoint=str(tmp_path / "served"), store=store.location, engine=EngineConfig(slots=4, max_length=128),
            update_seconds=2.0,
        )
    )  # fmt: skip
    made.subscriber = WeightSubscriber(store)
    made.loop.start()
    yield made
    made.loop.stop()


def store_of(service: InferenceService) -> Faulty:
    assert service.subscriber is not None
    store = service.subscriber.store
    assert isinstance(store, Faulty)
    return store


async def served_version(service: InferenceService) -> set[int]:
    result = await service.loop.generate([5, 6, 7], params(4), session="s", experts_start=0, deadline=10.0)
    return set(result.completion().versions)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_update_is_named_and_the_old_version_goes_on_until_it_is_repaired(
    service: InferenceService, damage: str
) -> None:
    async def scenario() -> None:
        before = service.content_hash
        store_of(service).fault = DAMAGE[damage]
        with pytest.raises(WeightSyncError, match=r"version 1 cannot be rebuilt: .*deltas/00000001"):
            await service.update(1)
        assert await served_version(service) == {0}
        assert service.health()["version"] == 0
        assert service.health()["content_hash"] == before == content_hash(export_state(tiny(3, vocab_size=VOCAB)))
        store_of(service).fault = lambda data: data
        assert (await service.update(1))["content_hash"] == content_hash(export_state(tiny(4, vocab_size=VOCAB)))
        assert await served_version(service) == {1}

    asyncio.run(scenario())


def test_a_store_that_hangs_ends_the_update_at_its_deadline_while_tokens_flow(service: InferenceService) -> None:
    release = threading.Event()

    def hang(data: bytes) -> bytes:
        release.wait(20)
        return data

    async def scenario() -> None:
        store_of(service).fault = hang
        update = asyncio.create_task(service.update(1))
        await asyncio.sleep(0.1)
        assert await served_version(service) == {0}, "served while the update hangs"
        with pytest.raises(
            DeadlineExceeded, match=r"inference waited 2s for weights of version 1 \(policy version 0\)"
        ):
            await update
        assert await served_version(service) == {0}
        release.set()
        await service.update(1)
        assert await served_version(service) == {1}

    asyncio.run(scenario())


def test_a_server_with_a_name_registers_what_it_serves(service: InferenceService) -> None:
    """So that the writer's garbage collection keeps it."""

    async def scenario() -> None:
        store = store_of(service)
        service.subscriber = WeightSubscriber(store, "engine-0")
        await service.update(1)
        assert b'"version":1' in store.get("subscribers/engine-0")

    asyncio.run(scenario())
