"""Creates a training job with SageMaker's SDK, which is imported at the first creation.

The SDK builds the request; the call uses our own client, with its endpoint, credentials and retries. Other actions of
the SDK (sagemaker-core 2.27) are left out: it completes a request from configuration files of the user or of a bucket,
so that the request would not be known beforehand; it creates four clients; and it describes the created job.
TrainingJob.create sends no telemetry.
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
# Mappings whose keys are the user's and are not converted.
_BY_NAME: Final = ("Environment", "HyperParameters")
# Jobs are created in several threads, and the import must run in only one of them.
_IMPORTING: Final = threading.Lock()


def create(aws: Aws, region: str, request: Mapping[str, object]) -> str:
    """Create the job with one call and return its ARN. Raises as `Aws.call_once`, and Invalid without the SDK."""
    with _IMPORTING:
        try:
            from sagemaker.core import resources  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]
        except ImportError as error:
            raise Invalid(_NEEDED) from error
    sdk: Any = resources
    client = _Client(aws, region)
    _plain(sdk.TrainingJob)(
        sdk.TrainingJob,
        session=_session(sdk.Session, client),
        region=region,
        **{_snake(name): value if name in _BY_NAME else _snaked(value) for name, value in request.items()},
    )
    return client.arn


class _Client:
    """The methods of a SageMaker client that the SDK calls."""

    def __init__(self, aws: Aws, region: str) -> None:
        self._aws = aws
        self._region = region
        self.arn = ""

    def create_training_job(self, **request: object) -> dict[str, Any]:
        """Make the only call."""
        answer = self._aws.call_once("sagemaker", self._region, "create_training_job", **request)
        self.arn = str(answer["TrainingJobArn"])
        return answer

    def describe_training_job(self, *, TrainingJobName: str) -> dict[str, Any]:  # noqa: N803  the SDK's word
        """Answer the SDK's next call without a request."""
        return {"TrainingJobName": TrainingJobName, "TrainingJobArn": self.arn}


def _session(kind: type[Any], client: _Client) -> Any:
    """Return a session with our own client; the SDK checks its type."""

    class Session(kind):
        def __init__(self) -> None:
            """Skip the search for credentials."""

        def client(self, *_: object, **__: object) -> _Client:
            return client

    return Session()


def _plain(training_job: Any) -> Callable[..., object]:
    """Return `create` without its decorator, which reads configuration files."""
    create_: Any = training_job.create
    plain: Callable[..., object] | None = getattr(create_, "__wrapped__", None)
    if plain is None:
        raise Invalid("this version of sagemaker-core may change requests; install 2.27")
    return plain


def _snaked(value: object) -> object:
    """Return a tree with the SDK's spelling of names."""
    if isinstance(value, Mapping):
        return {_snake(str(name)): _snaked(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(value, list):
        return [_snaked(inner) for inner in cast("list[object]", value)]
    return value


def _snake(name: str) -> str:
    return _WORD.sub("_", name).lower()
