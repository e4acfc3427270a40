"""One S3 server for all tests of the room; each test takes a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3_server import Gateway, gateway, moto


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    with moto() as port:
        yield port


@pytest.fixture
def s3_gateway(s3_port: int) -> Iterator[Gateway]:
    with gateway(s3_port) as made:
        yield made
