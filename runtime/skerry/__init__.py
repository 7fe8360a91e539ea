"""DiLoCo training through a bucket. `skerry.load(uri)` returns the trained model of a run.

`runtime`, `infra`, `serverless` and `testing` are in two source folders, which this package joins. It imports none of
them: `load` needs torch, so it is imported when it is first used.
"""

from __future__ import annotations

from pkgutil import extend_path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.runtime.export import load as load

__path__ = extend_path(__path__, __name__)
if __spec__ is not None:
    # Tools that draw import graphs look for packages of several folders by this, as for a namespace.
    __spec__.has_location = False


def __getattr__(name: str) -> object:
    if name == "load":
        from skerry.runtime import load  # noqa: PLC0415  needs torch and safetensors

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
