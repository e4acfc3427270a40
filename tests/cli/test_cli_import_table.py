"""The import contracts are a table of rooms: complete, and saying in their names what their lists hold."""

from __future__ import annotations

from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def contracts() -> ConfigParser:
    parser = ConfigParser()
    assert parser.read(ROOT / ".importlinter")
    return parser


def rooms() -> list[str]:
    prefix = "importlinter:contract:room-"
    return [name.removeprefix(prefix) for name in contracts().sections() if name.startswith(prefix)]


def test_every_room_of_the_package_has_a_contract() -> None:
    found = {path.parent.name for path in (ROOT / "src" / "etude").glob("*/__init__.py")}
    assert found <= set(rooms())


@pytest.mark.parametrize("room", rooms())
def test_a_room_is_forbidden_whatever_its_contract_does_not_name(room: str) -> None:
    contract = contracts()[f"importlinter:contract:room-{room}"]
    named = contract["name"].removeprefix(f"{room} may import ")
    allowed = set() if named == "no other room" else set(named.split(", "))
    forbidden = {line.removeprefix("etude.") for line in contract["forbidden_modules"].split()}
    assert allowed | forbidden | {room} == set(rooms())
    assert not allowed & forbidden


def test_allowed_imports_point_downwards_in_the_layers() -> None:
    order = contracts()["importlinter:contract:layers"]["layers"].split()
    assert sorted(order) == sorted(rooms())
    for room in rooms():
        forbidden = contracts()[f"importlinter:contract:room-{room}"]["forbidden_modules"].split()
        for other in rooms():
            if other != room and f"etude.{other}" not in forbidden:
                assert order.index(other) > order.index(room)
