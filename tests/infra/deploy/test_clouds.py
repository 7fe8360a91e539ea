"""A run in several clouds, one of them a fake named paper: deploy/ works without knowing a cloud's name."""

from __future__ import annotations

import ast
import dataclasses
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

import pytest
from tests.infra.deploy.account import write_spec
from tests.support.clocks import FakeClock

import skerry.infra
from skerry.infra import clouds, targets
from skerry.infra.cli.estimate_command import estimate_of
from skerry.infra.clouds.open_cloud_sessions import OperatorAccess
from skerry.infra.deploy import removal as removing
from skerry.infra.deploy.plan_and_apply import apply_plan, make_plan
from skerry.infra.deploy.prepared_deployment import Deployment, prepare
from skerry.infra.deploy.read_clouds import read_rates, read_state
from skerry.infra.deploy.tagged_resources import list_tagged
from skerry.infra.local.options import LocalTarget
from skerry.infra.provision.graph import Life, Resource, Text
from skerry.infra.provision.handler import Condition, Desired, Observed, StateRecord
from skerry.infra.provision.target_and_store_interfaces import JobView, Rate
from skerry.infra.run import check_machine_and_store
from skerry.runtime.contract import MAX_HOURS
from skerry.runtime.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from skerry.infra.provision.target_and_store_interfaces import RunContext
    from skerry.infra.spec.model import Replicas
    from skerry.testing.sandbox import Sandbox

# Pydantic warns when it serialises a target that the spec does not know.
pytestmark = pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")

CORE: Final = Path(skerry.infra.__file__).parent
AT_HOME: Final = {"aws": {"us-east-1"}}


class PaperTarget(LocalTarget):
    """Options of the fake targets."""

    CLOUD: ClassVar[str | None] = "paper"
    kind: Literal["paper", "pulp"]  # type: ignore[assignment]
    region: str


@dataclass(frozen=True, kw_only=True)
class Sheet(Resource):
    """A resource that both fake targets share."""

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
class PaperCloud:
    """The resources of the fake cloud, and the regions that were searched for owned ones."""

    items: dict[tuple[str, str], StateRecord] = field(default_factory=dict)
    owners: dict[tuple[str, str], str] = field(default_factory=dict)
    requests: list[tuple[str, frozenset[str]]] = field(default_factory=list)


class PaperHandler:
    """See Handler."""

    def __init__(self, cloud: PaperCloud, kind: type[Resource]) -> None:
        self.cloud, self.kind = cloud, kind.KIND

    def read(self, all_desired: Sequence[Desired]) -> Sequence[Observed | None]:
        return [self._seen(desired) for desired in all_desired]

    def create(self, desired: Desired) -> Mapping[str, str]:
        outputs = {"id": desired.name}
        self.cloud.owners[self.kind, desired.name] = desired.run
        self.cloud.items[self.kind, desired.name] = desired.to_record(outputs)
        return outputs

    def update(self, desired: Desired, changed: Collection[str]) -> Mapping[str, str]:
        raise AssertionError((desired, changed))

    def delete(self, state_record: StateRecord) -> None:
        self.cloud.items.pop((state_record.kind, state_record.name), None)

    def list_owned(self, run: str, regions: Collection[str]) -> list[StateRecord]:
        self.cloud.requests.append((self.kind, frozenset(regions)))
        return [
            record for key, record in self.cloud.items.items() if key[0] == self.kind and self.cloud.owners[key] == run
        ]

    def _seen(self, desired: Desired) -> Observed | None:
        existing = self.cloud.items.get((self.kind, desired.name))
        owner = self.cloud.owners.get((self.kind, desired.name))
        return None if existing is None else Observed(outputs=existing.outputs, settings=existing.settings, owner=owner)


class FakeTarget:
    """See Target."""

    def __init__(self, cloud: PaperCloud, kind: str) -> None:
        self.cloud, self.job = cloud, {"paper": PaperJob, "pulp": PulpJob}[kind]
        self.job_kind = self.job.KIND

    def identity(self) -> Mapping[str, str]:
        return {"paper": f"cloud of {self.job.KIND}"}

    def resources(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Resource]:
        sheet = Sheet(key="shared", name=f"{context.stem}-sheet", region="attic")
        jobs = [
            self.job(
                key=replica.slot,
                name=f"{context.stem}-{replica.slot}",
                region=context.regions("paper")[0],
                sheet=sheet.ref("id"),
                bucket="${aws_bucket.store.arn}",
                variables=context.variables(group),
            )
            for group in groups
            for replica in context.slots_of(group)
        ]
        return (sheet, *jobs)

    def handlers(self) -> Mapping[str, PaperHandler]:
        """One of them is of a third cloud, in which this run has no store."""
        return {kind.KIND: PaperHandler(self.cloud, kind) for kind in (Sheet, self.job, Trust)}

    def claim(self, desired: Desired, observed: Observed) -> None:
        raise AssertionError((desired, observed))

    def rates(self, context: RunContext, groups: Sequence[Replicas]) -> Sequence[Rate]:
        assert context.firm_prices == (context.spec.limits.max_cost_usd is not None)
        return [
            Rate(group=group.name, what="paper", count=group.count, per_hour=1.0, source="s", cap_hours=3)
            for group in groups
        ]

    def checks(self, _context: RunContext, _groups: Sequence[Replicas]) -> Iterator[Any]:
        return iter(())

    def jobs(self, state_records: Sequence[StateRecord]) -> Sequence[JobView]:
        assert state_records
        return [
            JobView(
                slot=state_record.address.partition(".")[2],
                job=state_record.name,
                state="waits",
                condition=Condition.READY,
            )
            for state_record in state_records
        ]

    def logs(self, _made: StateRecord, _cursor: str | None) -> Iterator[Any]:
        return iter(())


PAPER: Final = PaperCloud()


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    known, known_cloud = targets.open_target, targets.cloud_of

    def cloud_of(kind: str) -> str:
        return "paper" if kind.startswith(("paper_", "pulp_")) else known_cloud(kind)

    def opened(kind: str, access: OperatorAccess) -> Any:
        if kind in ("paper", "pulp"):
            return FakeTarget(PAPER, kind)
        return known(kind, access)

    monkeypatch.setattr(targets, "open_target", opened)
    monkeypatch.setattr(targets, "cloud_of", cloud_of)
    for part in (PAPER.items, PAPER.owners, PAPER.requests):
        part.clear()


def deployment(folder: Path, sandbox: Sandbox, *, limits: str = "max_hours: 24", paper: bool = True) -> Deployment:
    path = write_spec(folder, count=1)
    path.write_text(path.read_text().replace("max_hours: 24", limits))
    loaded = check_machine_and_store.load_deployed(path, targets.kinds(), ())
    (batch,) = loaded.spec.replicas
    groups = [
        batch.model_copy(
            update={"name": kind, "target": PaperTarget.model_validate({"kind": kind, "region": f"{kind}-1"})}
        )
        for kind in ("paper", "pulp")
    ]
    # The bucket is created in the region of the first group of AWS, not of the first group.
    replicas = (*groups, batch) if paper else (batch,)
    mixed = dataclasses.replace(loaded, spec=loaded.spec.model_copy(update={"replicas": replicas}))
    return prepare(mixed, FakeClock(), sandbox.environment)


def regions_asked(deployed: Deployment, entries: Any = ()) -> dict[str, set[str]]:
    """The regions in which each cloud is searched for the run's resources."""
    names_by_cloud: dict[str, set[str]] = {}

    class RecordingHandler:
        def __init__(self, kind: str) -> None:
            self.kind = kind

        def list_owned(self, _run: str, regions: Collection[str]) -> list[StateRecord]:
            names_by_cloud.setdefault(targets.cloud_of(self.kind), set()).update(regions)
            return []

    asking = dataclasses.replace(deployed, handlers={kind: RecordingHandler(kind) for kind in deployed.handlers})
    assert list_tagged(asking, entries) == []
    return names_by_cloud


def test_two_clouds_share_one_graph_bucket_and_time_limit(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    mixed = deployment(tmp_path, skerry_sandbox, limits="max_cost_usd: 20")
    planned = make_plan(mixed)
    assert planned.plan.problems == ()
    assert planned.binding.accounts == {
        "aws": "123456789012",
        "paper": "cloud of paper_job, cloud of pulp_job",
    }
    assert mixed.bucket().region == "us-east-1"
    apply_plan(mixed, planned, lambda _: None, lambda _: None)
    # The machines of all clouds share the cost limit.
    hours = 20 / sum(rate.per_hour or 0 for rate in planned.resolved.rates)
    assert {rate.group: rate.cap_hours for rate in planned.resolved.rates} == dict.fromkeys(
        ("paper", "pulp", "b"), hours
    )
    settings_of_jobs = [
        change.settings for change in planned.plan.changes if change.kind.endswith(("_job", "_definition"))
    ]
    variables = [
        settings.get("variables", settings.get("environment")) for settings in settings_of_jobs if len(settings) > 3
    ]
    in_jobs = {variable[MAX_HOURS] for variable in variables if isinstance(variable, dict) and MAX_HOURS in variable}
    assert in_jobs == {f"{hours:.6g}"}
    assert {kind for kind, _ in PAPER.items} == {"paper_sheet", "paper_job", "pulp_job"}
    assert [key for key in PAPER.items if key[0] == "paper_sheet"] == [("paper_sheet", f"{mixed.context.stem}-sheet")]
    assert make_plan(deployment(tmp_path, skerry_sandbox, limits="max_cost_usd: 20")).plan.empty


def test_each_cloud_is_searched_in_its_own_regions_only(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    mixed = deployment(tmp_path, skerry_sandbox)
    assert regions_asked(mixed) == {**AT_HOME, "paper": {"paper-1", "pulp-1"}}
    assert regions_asked(deployment(tmp_path, skerry_sandbox, paper=False)) == AT_HOME
    planned = make_plan(deployment(tmp_path, skerry_sandbox))
    apply_plan(deployment(tmp_path, skerry_sandbox), planned, lambda _: None, lambda _: None)
    mixed = deployment(tmp_path, skerry_sandbox)
    state = read_state(mixed)
    assert state is not None
    assert regions_asked(mixed, state.entries) == {**AT_HOME, "paper": {"paper-1", "pulp-1", "attic"}}


def test_traffic_to_another_cloud_has_no_region(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    mixed = deployment(tmp_path, skerry_sandbox)
    estimated = estimate_of(mixed, read_rates(mixed), {})
    assert estimated.upkeep is not None
    assert {crew.name: crew.region for crew in estimated.upkeep.volume.groups} == {
        "b": "us-east-1",
        "paper": None,
        "pulp": None,
    }


def test_destroy_leaves_nothing_in_any_cloud(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    mixed = deployment(tmp_path, skerry_sandbox)
    apply_plan(mixed, make_plan(mixed), lambda _: None, lambda _: None)
    mixed = deployment(tmp_path, skerry_sandbox)
    removal = removing.plan_removal(mixed)
    assert removing.destroy(mixed, removal, data=True, on_step=lambda _: None, on_begin=lambda _: None).ok
    assert not PAPER.items
    assert skerry_sandbox.inventory() == {}


def test_every_kind_of_resource_belongs_to_a_known_cloud() -> None:
    known = {*clouds.NAMES, *(options.CLOUD for options in targets.kinds().options)}
    for kind in targets.kinds().deployed:
        target = targets.open_target(kind, OperatorAccess(FakeClock(), {}))
        assert {targets.cloud_of(handler) for handler in target.handlers()} <= known
    for name in clouds.NAMES:
        assert targets.cloud_of(f"{name}_bucket") == name
    with pytest.raises(LookupError):
        targets.cloud_of("bucket")


def test_every_kind_has_one_handler_class() -> None:
    makers = [targets.open_target(kind, OperatorAccess(FakeClock(), {})) for kind in targets.kinds().deployed]
    homes = [clouds.open_home(f"{scheme}://bucket/run", OperatorAccess(FakeClock(), {})) for scheme in ("s3", "gs")]
    given: dict[str, set[type[Any]]] = {}
    for maker in (*makers, *homes):
        for kind, handler in maker.handlers().items():
            given.setdefault(kind, set()).add(type(handler))
    assert {kind: owners for kind, owners in given.items() if len(owners) > 1} == {}
    assert len(given) > 15


def test_store_out_of_reach_of_jobs_is_refused() -> None:
    with pytest.raises(Invalid, match=r"jobs in a cloud cannot reach az://x/y; use a store in s3://, gs://, file://"):
        clouds.home_of("az://x/y")
    assert [clouds.home_of(f"{scheme}://x/run") for scheme in ("s3", "gs", "file")] == ["aws", "google", "disk"]


ROOMS: Final = ("cli", "cost", "deploy", "observe", "provision", "report", "run", "spec")
NAMING_CLOUDS: Final = {
    # The fields of a spec that name a cloud, and the checks of them: decision 0012.
    *("spec/company_rules.py", "spec/consistency.py", "spec/env_secrets_and_data.py", "spec/model.py"),
    *("spec/replication_section.py", "spec/store_uri.py"),
    "cost/prices.py",  # the titles of its tables
    "provision/state_store.py",  # the command by which a user removes an object
    "run/code_archive.py",  # the folders of credentials, which are never packed
    *("cli/sandbox_command.py", "cli/fast_help_entry_point.py"),  # plays the clouds
    "cli/plan_apply_import_commands.py",  # an address in a help text
}


def test_the_core_names_no_target_and_imports_no_cloud() -> None:
    files = [path for room in ROOMS for path in sorted((CORE / room).rglob("*.py"))]
    assert len(files) > 100
    named = re.compile(r"\baws_batch|sagemaker|vertex|boto|(clouds|targets)\.(aws|google)", re.IGNORECASE)
    mentions = [f"{path.name}: {match[0]}" for path in files for match in named.finditer(path.read_text())]
    assert mentions == []
    cloud = re.compile(r"(?<![a-z])(aws|amazon|azure|gcloud|gcp|google)", re.IGNORECASE)
    naming = {path for path in files if any(map(cloud.search, words_in_code(path.read_text())))}
    assert {path.relative_to(CORE).as_posix() for path in naming} == NAMING_CLOUDS


def words_in_code(source: str) -> Iterator[str]:
    """Its names and texts, without docstrings, where a cloud is an example."""
    tree = ast.parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node not in docstrings:
            yield str(node.value)
        yield from (name for field in ("id", "attr", "arg", "name", "module") if (name := getattr(node, field, None)))
