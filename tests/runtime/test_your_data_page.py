"""docs/your-data.md: its spec is valid, its stream reads a bucket in shares, and its tables name what the code does."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import pytest
from tests.support.s3server import S3Server

from skerry.infra import targets
from skerry.infra.spec import model
from skerry.infra.spec_and_store_errors import SpecInvalid
from skerry.runtime.contract import read_data
from skerry.runtime.replica import Replica
from skerry.runtime.store import open_store

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PAGE: Final = (Path(__file__).parents[2] / "docs/your-data.md").read_text()
RANKS: Final = 3


def block(language: str, number: int = 0) -> str:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)[number]


def corpus_of(place: str, rank: int) -> Any:
    """The class of the page, with the share of one of the ranks."""
    names: dict[str, Any] = {}
    exec(block("python"), names)  # noqa: S102  the page's own example
    numbers: Any = SimpleNamespace(shard_index=rank, shard_count=RANKS)
    shard: Callable[[Sequence[str]], list[str]] = lambda items: Replica.shard(numbers, items)  # noqa: E731
    return names["Corpus"](place, shard)


def read_all(place: str) -> list[bytes]:
    """Two lines of each object of each rank: each rank has one object."""
    return [line for rank in range(RANKS) for line in itertools.islice(corpus_of(place, rank), 2)]


def test_stream_of_the_page_reads_a_bucket_in_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as server:
        for name, text in {
            "AWS_ENDPOINT_URL": server.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, text)
        store = open_store("s3://acme-data/corpus")
        for number in range(RANKS):
            store.create(f"{number}.txt", f"{number} a\n{number} b\n".encode())
        open_store("s3://acme-data/other").create("x.txt", b"not yours\n")
        assert sorted(read_all("s3://acme-data/corpus")) == [
            f"{number} {letter}".encode() for number in range(RANKS) for letter in "ab"
        ]


def test_stream_of_the_page_continues_at_its_position(tmp_path: Path) -> None:
    for number in range(2 * RANKS):
        (tmp_path / f"{number}.txt").write_text(f"{number} a\n{number} b\n")
    first = corpus_of(str(tmp_path), 1)
    assert list(itertools.islice(first, 3)) == [b"1 a", b"1 b", b"4 a"]
    second = corpus_of(str(tmp_path), 1)
    second.load_state_dict(first.state_dict())
    assert list(itertools.islice(second, 3)) == [b"4 b", b"1 a", b"1 b"]


def test_spec_of_the_page_is_valid(tmp_path: Path) -> None:
    (tmp_path / "skerry.yaml").write_text(block("yaml"))
    spec = model.load(tmp_path / "skerry.yaml", targets.kinds()).spec
    assert {secret.cloud for secret in spec.replicas[1].secrets.values()} == {"google"}


@pytest.mark.parametrize("row", re.findall(r"(?m)^\| (`.*?`) \| (?:the contract|they|the cl|torchrun|the int)", PAGE))
def test_names_in_the_table_are_refused(tmp_path: Path, row: str) -> None:
    names = [name.rstrip("*") + ("X" if name.endswith("*") else "") for name in re.findall(r"`([A-Z_*]+[A-Z*])`", row)]
    assert names
    for name in names:
        (tmp_path / "skerry.yaml").write_text(block("yaml").replace("HF_HOME:", f"{name}:"))
        with pytest.raises(SpecInvalid, match=f"{name} cannot be set here"):
            model.load(tmp_path / "skerry.yaml", targets.kinds())


def test_data_is_named_as_in_the_spec() -> None:
    assert read_data({"SKERRY_DATA_CORPUS": "s3://a/b", "SKERRY_RUN": "x"}) == {"corpus": "s3://a/b"}
