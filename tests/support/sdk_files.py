"""Shares the SDK's data files between the sessions of a process: every command of a test opens a session of its own."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportIncompatibleMethodOverride=false
# botocore has no types.

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import pytest
from botocore import loaders, session

if TYPE_CHECKING:
    from collections.abc import Iterator


class SharedFiles(loaders.JSONFileLoader):
    """Parses each file once. Clients of one session share what was parsed in the same way."""

    @functools.cache  # noqa: B019  one instance, for as long as the tests run
    def load_file(self, file_path: str) -> object:
        return super().load_file(file_path)


@pytest.fixture(scope="session", autouse=True)
def _share_data_files() -> Iterator[None]:
    """Only for sessions of botocore: moto has a loader of its own, because clients change the model of S3."""
    shared, real = SharedFiles(), loaders.create_loader

    def create_loader(search_path_string: str | None = None) -> loaders.Loader:
        loader = real(search_path_string)
        loader.file_loader = shared
        return loader

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "create_loader", create_loader)  # which it imported by name
        yield
