"""The seam between the spec and its targets: the base of their options, and the set of kinds that a spec may name.

The spec imports no target. Callers pass a `TargetKinds`, which `skerry.infra.targets` builds (decision 0012). Does no
I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, cast, get_args

from pydantic import Field

from skerry.infra.spec.section import Section
from skerry.runtime.log.records import Place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Self

    from skerry.infra.spec.model import Replicas
    from skerry.infra.spec.yaml_document import Document
    from skerry.infra.spec_and_store_errors import Problem


class TargetOptions(Section):
    """The options of one kind of target. A subclass narrows `kind` to a Literal and adds its own fields."""

    CLOUD: ClassVar[str | None] = None
    """The cloud that its replicas run in as jobs; None means this machine."""
    SEES_FOLDERS: ClassVar[bool] = True
    """Its replicas may have the folders of the operator's machine; False where no job can."""
    EXAMPLE_IMAGE: ClassVar[str | None] = None
    """An image that its replicas could run, for error messages; None means that it runs no image."""
    SAMPLE: ClassVar[str | None] = None
    """The file with its sample spec, in the folder of its options; None if `skerry init` has no sample of it."""

    RESERVED: ClassVar[tuple[str, ...]] = ()
    """Names of variables that its cloud sets for its jobs, so that a spec must not; * is any end."""

    kind: str

    @classmethod
    def name(cls) -> str:
        """The value of `kind` that selects it."""
        return str(get_args(cls.model_fields["kind"].annotation)[0])

    @classmethod
    def of(cls, group: Replicas) -> Self:
        """The options of a group. The core gives a target only groups of its kind."""
        if not isinstance(group.target, cls):
            raise TypeError(f"not a group of {cls.name()}: {group.name}")
        return group.target

    @property
    def place(self) -> Place:
        """The machines of a group with these options, as far as the spec decides them."""
        return Place(cloud=self.CLOUD or "local")

    @property
    def warning(self) -> str | None:
        """A text about a risk of these options, for readers of a plan; None for none."""
        return None

    @classmethod
    def written_ranks(cls, document: Document, index: int) -> int | None:
        """The ranks of a replica of this group, as far as the document decides them. index: of the group."""
        if cls.CLOUD is None:
            return 1
        field = cls.model_fields.get("gpus")
        gpus = document.integer(("replicas", index, "target", "gpus"))
        gpus = gpus if gpus is not None or field is None else cast("int | None", field.default)
        return None if gpus is None else max(1, gpus)

    @classmethod
    def mirror_schemes(cls, document: Document, index: int) -> tuple[str, ...]:
        """The schemes of the stores in which a job of this group can keep a mirror. index: of the group."""
        del document, index
        return ("gs", "s3")

    @classmethod
    def problems(cls, document: Document, groups: Sequence[int]) -> Iterator[Problem]:
        """Everything in the document that groups of this kind cannot run with.

        groups: the indices in `replicas` of those groups, at least one. Reads the text only, so that a document with
        other problems is still checked.
        """
        del document, groups
        return iter(())


class ThisMachineOptions(TargetOptions):
    """The options that targets on this machine have in common."""

    threads: Annotated[int, Field(ge=1, le=1024, examples=[2])] | None = None
    """CPU threads per replica; by default the cores are shared out evenly."""


@dataclass(frozen=True)
class TargetKinds:
    """The kinds of targets that a spec may name, in the order of the JSON Schema."""

    options: tuple[type[TargetOptions], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The values that `kind` may have."""
        return tuple(options.name() for options in self.options)

    @property
    def deployed(self) -> frozenset[str]:
        """The kinds whose replicas are jobs in a cloud: `plan` and `apply` create what they need."""
        return frozenset(options.name() for options in self.options if options.CLOUD is not None)


def kinds_of_groups(document: Document) -> list[object]:
    """The `kind` of each group's target as written; None where it is missing."""
    count = len(document.entries(("replicas",)))
    return [document.value(("replicas", index, "target", "kind")) for index in range(count)]
