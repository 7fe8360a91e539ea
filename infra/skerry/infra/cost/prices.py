"""What clouds charge: a table that is shipped, and a file of the user's own that is laid over it.

Every price is in US dollars and says where it was seen, and when. What is in neither place is None: unknown, never 0.
Reads files, asks nobody. Spot prices move: the table has none, a user's file may.
"""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pydantic_core import ErrorDetails

VARIABLE: Final = "SKERRY_PRICES"
"""The environment variable that names the user's own file."""

TABLES: Final = "price_tables"
"""The folder of this package with one table for each cloud."""

_TITLES: Final = {"aws": "AWS", "google": "Google Cloud"}

HOURS_A_MONTH: Final = 730.0
"""As clouds count a month of storage."""

# What the parser calls the two ways to write a price; no place in a file.
_ALTERNATIVES: Final = frozenset({"constrained-float", "tuple[constrained-float,str]"})
_FILE: Final = '{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"machines": {"g6e.xlarge": 1.861}}}}'


def _as_date(text: str) -> str:
    dt.date.fromisoformat(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Price:
    """US dollars for one unit of what was asked for. source: whose word it is. date: when it was seen, if known.

    own: it is the user's.
    """

    usd: float
    source: str
    date: str | None
    own: bool = False

    def __str__(self) -> str:
        """Whose word it is, for people."""
        if self.own:
            return f"price in {self.source}"
        when = "undated list price" if self.date is None else f"list price of {self.date}"
        return f"{when} by {self.source}"


# A number, or a number and the name of its source.
_Usd = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Date = Annotated[str, AfterValidator(_as_date)]
_Entry = _Usd | tuple[_Usd, str]


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class _Source(_Section):
    what: str
    date: _Date | None


class _Region(_Section):
    """Prices of one region.

    machines: an hour on demand; spot: an hour of spare ones; both by type. disk_gb_month: of a machine's disk.
    storage_gb_month: of the bucket. write_per_1000: requests that write or list; read_per_1000: that read. internet_gb,
    to_region_gb: what leaves the region, for the internet or for that other region.
    """

    machines: Mapping[str, _Entry] = {}
    spot: Mapping[str, _Entry] = {}
    disk_gb_month: _Entry | None = None
    storage_gb_month: _Entry | None = None
    write_per_1000: _Entry | None = None
    read_per_1000: _Entry | None = None
    internet_gb: _Entry | None = None
    to_region_gb: Mapping[str, _Entry] = {}

    def entries(self) -> Iterator[tuple[str, _Entry]]:
        """What is known, by its place in the section."""
        groups = (("machines", self.machines), ("spot", self.spot), ("to_region_gb", self.to_region_gb))
        for field, group in groups:
            yield from ((f"{field}.{key}", entry) for key, entry in group.items())
        single = (
            ("disk_gb_month", self.disk_gb_month),
            ("storage_gb_month", self.storage_gb_month),
            ("write_per_1000", self.write_per_1000),
            ("read_per_1000", self.read_per_1000),
            ("internet_gb", self.internet_gb),
        )
        yield from ((field, entry) for field, entry in single if entry is not None)


class _Table(_Section):
    format: Literal[1]
    cloud: str
    compiled: _Date | None = None
    sources: Mapping[str, _Source] = {}
    regions: Mapping[str, _Region]


class Prices:
    """One cloud's prices. Each question has an answer or None; entries of the user's own file come first."""

    def __init__(self, cloud: str, layers: Sequence[tuple[str, _Table]] = ()) -> None:
        """layers: name and table, the one that counts most first; `load` makes them."""
        self.cloud = cloud
        self._layers = tuple(layers)

    def machine(self, region: str, kind: str) -> Price | None:
        """An hour of a machine of this type, on demand."""
        return self._find(region, f"machines.{kind}")

    def spot(self, region: str, kind: str) -> Price | None:
        """An hour of a spare machine of this type."""
        return self._find(region, f"spot.{kind}")

    def disk(self, region: str) -> Price | None:
        """A GB of a machine's disk, for a month."""
        return self._find(region, "disk_gb_month")

    def storage(self, region: str) -> Price | None:
        """A GB in a bucket, for a month."""
        return self._find(region, "storage_gb_month")

    def write(self, region: str) -> Price | None:
        """A thousand requests that write or list."""
        return self._find(region, "write_per_1000")

    def read(self, region: str) -> Price | None:
        """A thousand requests that read."""
        return self._find(region, "read_per_1000")

    def transfer(self, source: str, destination: str | None) -> Price | None:
        """A GB from region to region; within one it is free. destination: None is the internet."""
        if source == destination:
            return Price(usd=0.0, source="free within a region", date=None)
        if destination is None:
            return self._find(source, "internet_gb")
        return self._find(source, f"to_region_gb.{destination}")

    def _find(self, region: str, place: str) -> Price | None:
        for name, table in self._layers:
            section = table.regions.get(region)
            entry = None if section is None else dict(section.entries()).get(place)
            if entry is not None:
                return _price(name, table, entry)
        return None


def load(cloud: str, override: Path | None = None) -> Prices:
    """The prices of a cloud; of one without a table, only what `override` says.

    override: the user's own file, of the same shape as the table, or a list of such, one for each cloud; what is for
    another cloud says nothing of this one.
    Raises Invalid, naming file and place, if it cannot be read or is not of that shape.
    """
    layers: list[tuple[str, _Table]] = []
    if override is not None:
        try:
            text = override.read_bytes()
        except OSError as error:
            raise Invalid(f"cannot read the prices in {override}: {error.strerror}") from error
        layers += [(override.name, own) for own in _own(text, str(override)) if own.cloud == cloud]
    table = resources.files("skerry.infra").joinpath(TABLES, f"{cloud}.json")
    if table.is_file():
        layers.append((f"{cloud}.json", _parse(table.read_bytes(), f"{TABLES}/{cloud}.json")))
    return Prices(cloud, layers)


def _price(name: str, table: _Table, entry: _Entry) -> Price:
    if isinstance(entry, tuple):
        usd, source = entry
        return Price(usd=usd, source=source, date=table.sources[source].date)
    return Price(usd=entry, source=name, date=table.compiled, own=True)


def _own(text: bytes, name: str) -> list[_Table]:
    """The tables in a user's file."""
    try:
        parts: object = json.loads(text)
    except ValueError:
        parts = None
    if not isinstance(parts, list) or not parts:
        return [_parse(text, name)]
    listed = cast("list[object]", parts)
    return [_parse(json.dumps(part).encode(), f"{name}: {number}") for number, part in enumerate(listed, start=1)]


def _parse(text: bytes, name: str) -> _Table:
    try:
        table = _Table.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise Invalid(f"{name}: {_complaint(first)}; write it like {_FILE}") from error
    for region, section in table.regions.items():
        for place, entry in section.entries():
            if isinstance(entry, tuple) and entry[1] not in table.sources:
                raise Invalid(f"{name}: regions.{region}.{place}: `sources` does not tell what {entry[1]!r} is")
    return table


def _complaint(error: ErrorDetails) -> str:
    """Where it is wrong, and what should be there."""
    place = ".".join(str(part) for part in error["loc"] if part not in _ALTERNATIVES) or "the file"
    in_region = place.startswith("regions.")
    match error["type"]:
        case "json_invalid":
            return f"is no JSON: {error['msg'].removeprefix('Invalid JSON: ')}"
        case "extra_forbidden" if in_region:
            return f"{place}: there is no such price; there are {', '.join(_Region.model_fields)}"
        case "missing":
            return f"{place}: is missing"
        case "model_type" | "mapping_type" | "dict_type":
            return f"{place}: must be a mapping"
        case _ if in_region:
            return f"{place}: must be US dollars, a number of 0 or more"
        case _:
            return f"{place}: {error['msg'].lower()}"


def rounded(usd: float) -> str:
    """Dollars for people: cents, or two digits where cents would say nothing."""
    if usd == 0 or usd >= 0.1:
        return f"${usd:,.2f}"
    digits = 1 - math.floor(math.log10(usd))
    return f"${usd:.{digits}f}"


def title(cloud: str) -> str:
    """A cloud as people call it."""
    return _TITLES.get(cloud, cloud)


def own_file(environment: Mapping[str, str]) -> Path | None:
    """The user's own prices, if the environment names a file of them."""
    named = environment.get(VARIABLE)
    return Path(named) if named else None
