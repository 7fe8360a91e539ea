"""Makes a training job through SageMaker's own SDK, which is imported when the first one is made.

The SDK brings the shapes and the request; the call goes out over our own client, with its endpoint, its credentials and
its way of repeating. What else the SDK would do is left out (sagemaker-core 2.27): it looks for configuration files, of
the user's or in a bucket, to fill in gaps of a request, so that nobody could say beforehand what is sent; it makes four
clients; and it describes the job that it has made. TrainingJob.create sends no telemetry.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, cast

from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.infra.clouds.aws.session import Aws

_NEEDED: Final = "SageMaker needs its SDK: pip install 'skerry[sagemaker]'"
_WORD: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# Whose names are the user's, and stay as they are.
_BY_NAME: Final = ("Environment", "HyperParameters")
# Many jobs are made side by side; an import that begins in two threads is a trap.
_IMPORTING: Final = threading.Lock()


def create(aws: Aws, region: str, request: Mapping[str, object]) -> str:
    """Make it, once; its ARN. Raises as `Aws.call_once`, and Invalid if the SDK is not there."""
    with _IMPORTING:
        try:
            from sagemaker.core import resources  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise Invalid(_NEEDED) from error
    sdk: Any = resources
    made = _Line(aws, region)
    _plain(sdk.TrainingJob)(
        sdk.TrainingJob,
        session=_session(sdk.Session, made),
        region=region,
        **{_snake(name): value if name in _BY_NAME else _snaked(value) for name, value in request.items()},
    )
    return made.arn


class _Line:
    """As much of a client of SageMaker as making a job needs."""

    def __init__(self, aws: Aws, region: str) -> None:
        self._aws = aws
        self._region = region
        self.arn = ""

    def create_training_job(self, **request: object) -> dict[str, Any]:
        """The one call that is made."""
        told = self._aws.call_once("sagemaker", self._region, "create_training_job", **request)
        self.arn = str(told["TrainingJobArn"])
        return told

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803  the SDK's word
        """What the SDK asks next, told without asking."""
        return {"TrainingJobName": TrainingJobName, "TrainingJobArn": self.arn}


def _session(kind: type[Any], line: _Line) -> Any:
    """A session, for the SDK checks that it is one; its clients are our own."""

    class Session(kind):
        def __init__(self) -> None:
            """Look for no credentials."""

        def client(self, *_: object, **__: object) -> _Line:
            return line

    return Session()


def _plain(training_job: Any) -> Callable[..., object]:
    """`create` without what reads configuration files."""
    create_: Any = training_job.create
    plain: Callable[..., object] | None = getattr(create_, "__wrapped__", None)
    if plain is None:
        raise Invalid("this version of sagemaker-core is not known to leave a request as it is; take 2.27")
    return plain


def _snaked(value: object) -> object:
    """A tree with the SDK's own spelling of names."""
    if isinstance(value, Mapping):
        return {_snake(str(name)): _snaked(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_snaked(inner) for inner in cast("list[object]", value)]
    return value


def _snake(name: str) -> str:
    return _WORD.sub("_", name).lower()
