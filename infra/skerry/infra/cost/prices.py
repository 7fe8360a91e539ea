"""Reads prices of clouds: a table in this package, overridden by the user's own file.

Every price is in US dollars, with its source and date. A price in neither place is None, which means unknown, never 0.
Makes no calls. Spot prices change: the table has none, a user's file may have them.
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
"""The environment variable with the path of the user's own file."""

ADVICE: Final = f"write unknown prices in a file: --prices FILE or {VARIABLE}"
"""The next step for an unknown price."""

TABLES: Final = "price_tables"
"""The folder of this package with one table for each cloud."""

_TITLES: Final = {"aws": "AWS", "google": "Google Cloud"}
CLOUDS: Final = tuple(_TITLES)
"""The clouds with a table of prices."""

# Machines of Google without accelerators of their own.
_ATTACHABLE: Final = "n1-"

HOURS_A_MONTH: Final = 730.0
"""The length of a month in prices of storage."""

# The parser's names for the two forms of a price; not part of a place in a file.
_ALTERNATIVES: Final = frozenset({"constrained-float", "tuple[constrained-float,str]"})
_FILE: Final = '{"format": 1, "cloud": "aws", "regions": {"us-east-1": {"machines": {"g6e.xlarge": 1.861}}}}'


def _as_date(text: str) -> str:
    dt.date.fromisoformat(text)
    return text


@dataclass(frozen=True, kw_only=True)
class Price:
    """US dollars for one unit. source: its origin. date: of the source, if known. own: from the user's file."""

    usd: float
    source: str
    date: str | None
    own: bool = False

    def __str__(self) -> str:
        """The source, for people."""
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
    to_region_gb: traffic from the region to the internet or to that other region.
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
        """The known prices, by their place in the section."""
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
    """One cloud's prices, None if unknown; entries of the user's own file override the table."""

    def __init__(self, cloud: str, layers: Sequence[tuple[str, _Table]] = ()) -> None:
        """layers: name and table, in order of precedence; see `load`."""
        self.cloud = cloud
        self._layers = tuple(layers)

    def machine(self, region: str, kind: str) -> Price | None:
        """The price of a machine of this type for an hour, on demand."""
        return self._find(region, f"machines.{kind}")

    def spot(self, region: str, kind: str) -> Price | None:
        """The price of a spot machine of this type for an hour."""
        return self._find(region, f"spot.{kind}")

    @staticmethod
    def parts_of(kind: str, accelerator: str | None, accelerators: int) -> tuple[tuple[str, int], ...]:
        """The types that a machine is counted as, and how many of each: itself, and accelerators attached to it.

        Built-in accelerators are in the price of the machine.
        """
        if accelerator is None or not kind.startswith(_ATTACHABLE):
            return ((kind, 1),)
        return (kind, 1), (accelerator, accelerators)

    def disk(self, region: str) -> Price | None:
        """The price of a GB of a machine's disk for a month."""
        return self._find(region, "disk_gb_month")

    def storage(self, region: str) -> Price | None:
        """The price of a GB in a bucket for a month."""
        return self._find(region, "storage_gb_month")

    def write(self, region: str) -> Price | None:
        """The price of a thousand requests that write or list."""
        return self._find(region, "write_per_1000")

    def read(self, region: str) -> Price | None:
        """The price of a thousand requests that read."""
        return self._find(region, "read_per_1000")

    def transfer(self, source: str, destination: str | None) -> Price | None:
        """The price of a GB between regions; free within one. destination: None is the internet."""
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
    """The prices of a cloud; without a table, only those of `override`.

    override: the user's own file, in the format of the table, or a list of such tables; those of other clouds are
    ignored. Raises Invalid, with file and place, if it cannot be read or parsed.
    """
    layers: list[tuple[str, _Table]] = []
    if override is not None:
        try:
            text = override.read_bytes()
        except OSError as error:
            raise Invalid(f"cannot read the prices in {override}: {error.strerror}") from error
        layers += [(override.name, own) for own in _own(text, str(override)) if own.cloud == cloud]
    table = resources.files("skerry.infra.cost").joinpath(TABLES, f"{cloud}.json")
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
                raise Invalid(f"{name}: regions.{region}.{place}: {entry[1]!r} is missing in `sources`")
    return table


def _complaint(error: ErrorDetails) -> str:
    """The place of the error, and the expected value."""
    place = ".".join(str(part) for part in error["loc"] if part not in _ALTERNATIVES) or "the file"
    in_region = place.startswith("regions.")
    match error["type"]:
        case "json_invalid":
            return f"is not JSON: {error['msg'].removeprefix('Invalid JSON: ')}"
        case "extra_forbidden" if in_region:
            return f"{place}: unknown price; known are {', '.join(_Region.model_fields)}"
        case "missing":
            return f"{place}: is missing"
        case "model_type" | "mapping_type" | "dict_type":
            return f"{place}: must be a mapping"
        case _ if in_region:
            return f"{place}: must be US dollars, a number of 0 or more"
        case _:
            return f"{place}: {error['msg'].lower()}"


def rounded(usd: float) -> str:
    """Dollars for people: with cents, or with two significant digits below ten cents."""
    if usd == 0 or usd >= 0.1:
        return f"${usd:,.2f}"
    digits = 1 - math.floor(math.log10(usd))
    return f"${usd:.{digits}f}"


def title(cloud: str) -> str:
    """The name of a cloud for people."""
    return _TITLES.get(cloud, cloud)


def own_file(environment: Mapping[str, str]) -> Path | None:
    """The path of the user's own prices in the environment; None without one."""
    path = environment.get(VARIABLE)
    return Path(path) if path else None
