"""A run in several clouds at once, one of them of paper: what deploys it knows no cloud by name."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import pytest
from tests.infra.deploy.account import write_spec
from tests.support.clocks import FakeClock

import skerry.infra
from skerry.infra import clouds, preflight, spec, targets
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.deployment import Deployment
from skerry.infra.deploy.estimating import estimate_of
from skerry.infra.deploy.planning import carry_out, make_plan
from skerry.infra.deploy.strays import owned
from skerry.infra.graph import Life, Resource, Text, as_json
from skerry.infra.handler import Condition, Made, Seen, Wanted
from skerry.infra.placement import LocalTarget
from skerry.infra.target import JobView, Rate
from skerry.runtime.contract import MAX_HOURS
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from skerry.infra.spec import Replicas
    from skerry.infra.target import Ground
    from skerry.infra.testing.sandbox import Sandbox
    from skerry.runtime.clock import Clock

# A spec knows no targets of paper, and says so when it is digested.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

CORE: Final = Path(skerry.infra.__file__).parent
AT_HOME: Final = {"aws": {"us-east-1"}}


class PaperTarget(LocalTarget):
    """Sheets in a drawer."""

    CLOUD: ClassVar[str | None] = "paper"
    kind: Literal["paper", "pulp"]  # type: ignore[assignment]
    region: str


@dataclass(frozen=True, kw_only=True)
class Sheet(Resource):
    """What both kinds of target there share."""

    KIND: ClassVar[str] = "paper_sheet"


@dataclass(frozen=True, kw_only=True)
class PaperJob(Resource):
    KIND: ClassVar[str] = "paper_job"
    LIFE: ClassVar[Life] = Life.JOB
    ALONE: ClassVar[bool] = True
    FIXED: ClassVar[frozenset[str]] = frozenset({"sheet", "bucket", "variables"})

    sheet: Text
    bucket: Text
    variables: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class PulpJob(PaperJob):
    KIND: ClassVar[str] = "pulp_job"


@dataclass(frozen=True, kw_only=True)
class Trust(Resource):
    KIND: ClassVar[str] = "google_trust"


@dataclass
class Drawer:
    """What is there; and which regions were asked for what is owned."""

    items: dict[tuple[str, str], Made] = field(default_factory=dict)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    asked: list[tuple[str, frozenset[str]]] = field(default_factory=list)


class Keeper:
    """See Handler."""

    def __init__(self, drawer: Drawer, kind: type[Resource]) -> None:
        self.drawer, self.kind = drawer, kind.KIND

    def read(self, wanted: Sequence[Wanted]) -> Sequence[Seen | None]:
        return [self._seen(one) for one in wanted]

    def create(self, wanted: Wanted) -> Mapping[str, str]:
        outputs = {"id": wanted.name}
        self.drawer.owners[self.kind, wanted.name] = wanted.run
        self.drawer.items[self.kind, wanted.name] = Made(
            address=wanted.resource.address,
            kind=self.kind,
            name=wanted.name,
            generation=wanted.generation,
            region=wanted.resource.region,
            life=wanted.resource.LIFE,
            brought=False,
            settings={name: as_json(value) for name, value in wanted.settings.items()},
            outputs=outputs,
            needs=(),
        )
        return outputs

    def update(self, wanted: Wanted, changed: Collection[str]) -> Mapping[str, str]:
        raise AssertionError((wanted, changed))

    def delete(self, made: Made) -> None:
        self.drawer.items.pop((made.kind, made.name), None)

    def owned(self, run: str, regions: Collection[str]) -> list[Made]:
        self.drawer.asked.append((self.kind, frozenset(regions)))
        return [one for key, one in self.drawer.items.items() if key[0] == self.kind and self.drawer.owners[key] == run]

    def _seen(self, wanted: Wanted) -> Seen | None:
        made = self.drawer.items.get((self.kind, wanted.name))
        owner = self.drawer.owners.get((self.kind, wanted.name))
        return None if made is None else Seen(outputs=made.outputs, settings=made.settings, owner=owner)


class Paper:
    """See Target."""

    def __init__(self, drawer: Drawer, kind: str) -> None:
        self.drawer, self.job = drawer, {"paper": PaperJob, "pulp": PulpJob}[kind]

    def identity(self) -> Mapping[str, str]:
        return {"paper": f"drawer of {self.job.KIND}"}

    def resources(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Resource]:
        sheet = Sheet(key="shared", name=f"{ground.stem}-sheet", region="attic")
        jobs = [
            self.job(
                key=seat.slot,
                name=f"{ground.stem}-{seat.slot}",
                region=ground.regions("paper")[0],
                sheet=sheet.ref("id"),
                bucket="${aws_bucket.store.arn}",
                variables=ground.variables(group),
            )
            for group in groups
            for seat in ground.seats_of(group)
        ]
        return (sheet, *jobs)

    def handlers(self) -> Mapping[str, Keeper]:
        """One of them of a third cloud, where a run may lie, and this one does not."""
        return {one.KIND: Keeper(self.drawer, one) for one in (Sheet, self.job, Trust)}

    def claim(self, wanted: Wanted, seen: Seen) -> None:
        raise AssertionError((wanted, seen))

    def rates(self, ground: Ground, groups: Sequence[Replicas]) -> Sequence[Rate]:
        assert ground.firm_prices == (ground.spec.limits.max_cost_usd is not None)
        return [
            Rate(group=one.name, what="paper", count=one.count, per_hour=1.0, source="s", cap_hours=3) for one in groups
        ]

    def checks(self, _ground: Ground, _groups: Sequence[Replicas]) -> Iterator[Any]:
        return iter(())

    def jobs(self, made: Sequence[Made]) -> Sequence[JobView]:
        assert made
        return [
            JobView(slot=one.address.partition(".")[2], job=one.name, state="lies there", condition=Condition.READY)
            for one in made
        ]

    def logs(self, _made: Made, _cursor: str | None) -> Iterator[Any]:
        return iter(())


DRAWER: Final = Drawer()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "_STARTS", {**targets._STARTS, "paper": "paper", "pulp": "paper"})
    known = targets.open_target

    def opened(kind: str, clock: Clock, environment: Mapping[str, str], groups: Sequence[Replicas] = ()) -> Any:
        if kind in ("paper", "pulp"):
            return Paper(DRAWER, kind)
        return known(kind, clock, environment, groups)

    monkeypatch.setattr(targets, "open_target", opened)
    for part in (DRAWER.items, DRAWER.owners, DRAWER.asked):
        part.clear()


def deployment(folder: Path, sandbox: Sandbox, *, limits: str = "max_hours: 24", paper: bool = True) -> Deployment:
    path = write_spec(folder, count=1)
    path.write_text(path.read_text().replace("max_hours: 24", limits))
    found = preflight.load_deployed(path, ())
    (batch,) = found.spec.replicas
    groups = [
        batch.model_copy(
            update={"name": kind, "target": PaperTarget.model_validate({"kind": kind, "region": f"{kind}-1"})}
        )
        for kind in ("paper", "pulp")
    ]
    # The bucket must not be made where the first group is.
    replicas = (*groups, batch) if paper else (batch,)
    mixed = dataclasses.replace(found, spec=found.spec.model_copy(update={"replicas": replicas}))
    return Deployment(mixed, FakeClock(), sandbox.environment)


def regions_asked(one: Deployment, entries: Any = ()) -> dict[str, set[str]]:
    """Which regions each cloud is asked for what is the run's."""
    asked: dict[str, set[str]] = {}

    class Asked:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def owned(self, _run: str, regions: Collection[str]) -> list[Made]:
            asked.setdefault(targets.cloud_of(self.kind), set()).update(regions)
            return []

    one.handlers = {kind: Asked(kind) for kind in one.handlers}  # type: ignore[misc, assignment]
    assert owned(one, entries) == []
    return asked


def test_replicas_in_two_clouds_are_one_graph_with_one_bucket_and_one_time(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    one = deployment(tmp_path, skerry_sandbox, limits="max_cost_usd: 20")
    planned = make_plan(one)
    assert planned.plan.problems == ()
    assert planned.binding.accounts == {
        "aws": "123456789012",
        "paper": "drawer of paper_job, drawer of pulp_job",
    }
    assert one.bucket.region == "us-east-1"
    carry_out(one, planned, lambda _: None, lambda _: None)
    # All machines together use up what may be spent, wherever they are.
    hours = 20 / sum(rate.per_hour or 0 for rate in planned.rates)
    assert {rate.group: rate.cap_hours for rate in planned.rates} == dict.fromkeys(("paper", "pulp", "b"), hours)
    told = [change.settings for change in planned.plan.changes if change.kind.endswith(("_job", "_definition"))]
    variables = [settings.get("variables", settings.get("environment")) for settings in told if len(settings) > 3]
    found = {one[MAX_HOURS] for one in variables if isinstance(one, dict) and MAX_HOURS in one}
    assert found == {f"{hours:.6g}"}
    assert {kind for kind, _ in DRAWER.items} == {"paper_sheet", "paper_job", "pulp_job"}
    assert [key for key in DRAWER.items if key[0] == "paper_sheet"] == [("paper_sheet", f"{one.ground.stem}-sheet")]
    assert make_plan(deployment(tmp_path, skerry_sandbox, limits="max_cost_usd: 20")).plan.empty


def test_each_cloud_is_asked_for_its_own_regions_and_one_without_replicas_not_at_all(
    tmp_path: Path, skerry_sandbox: Sandbox
) -> None:
    mixed = deployment(tmp_path, skerry_sandbox)
    assert regions_asked(mixed) == {**AT_HOME, "paper": {"paper-1", "pulp-1"}}
    assert regions_asked(deployment(tmp_path, skerry_sandbox, paper=False)) == AT_HOME
    planned = make_plan(deployment(tmp_path, skerry_sandbox))
    carry_out(deployment(tmp_path, skerry_sandbox), planned, lambda _: None, lambda _: None)
    mixed = deployment(tmp_path, skerry_sandbox)
    state = mixed.state()
    assert state is not None
    assert regions_asked(mixed, state.entries) == {**AT_HOME, "paper": {"paper-1", "pulp-1", "attic"}}


def test_traffic_to_another_cloud_leaves_by_the_internet(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = deployment(tmp_path, skerry_sandbox)
    told = estimate_of(one, one.rates, {})
    assert told.upkeep is not None
    assert {crew.name: crew.region for crew in told.upkeep.volume.crews} == {
        "b": "us-east-1",
        "paper": None,
        "pulp": None,
    }


def test_destroy_leaves_nothing_in_any_cloud(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    one = deployment(tmp_path, skerry_sandbox)
    carry_out(one, make_plan(one), lambda _: None, lambda _: None)
    one = deployment(tmp_path, skerry_sandbox)
    removal = removing.survey(one)
    assert removing.destroy(one, removal, data=True, on_step=lambda _: None, applying=lambda _: None).ok
    assert not DRAWER.items
    assert skerry_sandbox.inventory() == {}


def test_of_every_kind_of_resource_it_is_known_where_it_lies() -> None:
    for kind in spec.DEPLOYED:
        target = targets.open_target(kind, FakeClock(), {})
        assert {targets.cloud_of(made) for made in target.handlers()} <= set(clouds.NAMES)
    for name in clouds.NAMES:
        assert targets.cloud_of(f"{name}_bucket") == name
    with pytest.raises(LookupError):
        targets.cloud_of("bucket")


def test_of_every_kind_one_handler_is_its_cloud_s_whoever_gives_it() -> None:
    """What several give, the last one counts for: one that does less would hide what the others find."""
    makers = [targets.open_target(kind, FakeClock(), {}) for kind in spec.DEPLOYED]
    homes = [clouds.open_home(f"{scheme}://bucket/run", FakeClock(), {}) for scheme in ("s3", "gs")]
    given: dict[str, set[type[Any]]] = {}
    for maker in (*makers, *homes):
        for kind, handler in maker.handlers().items():
            given.setdefault(kind, set()).add(type(handler))
    assert {kind: found for kind, found in given.items() if len(found) > 1} == {}
    assert len(given) > 15


def test_a_store_that_jobs_cannot_reach_is_refused() -> None:
    with pytest.raises(Invalid, match=r"jobs in a cloud cannot reach file:///x; write a store in s3://, gs://"):
        clouds.home_of("file:///x")
    assert [clouds.home_of(f"{scheme}://bucket/run") for scheme in ("s3", "gs")] == ["aws", "google"]


def test_what_deploys_names_no_target_and_takes_nothing_from_a_cloud() -> None:
    core = ("cli", "plan", "apply", "state", "statefile", "graph", "render", "handler", "target", "estimate")
    files = [CORE / f"{name}.py" for name in core] + sorted((CORE / "deploy").glob("*.py"))
    assert len(files) > 20
    named = re.compile(r"aws_batch|sagemaker|vertex|boto|(clouds|targets)\.(aws|google)", re.IGNORECASE)
    found = [f"{path.name}: {match[0]}" for path in files for match in named.finditer(path.read_text())]
    assert found == []
