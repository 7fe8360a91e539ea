"""A plan for a reviewer: its order, its rights as a diff, saved plans without a cloud, and the commands beside it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.infra.deploy.account import queue_of, skerry, write_spec

from skerry.infra.cli import plan_text
from skerry.infra.provision.planned_changes import Action, Change, Difference, RightsChange

if TYPE_CHECKING:
    from skerry.testing.sandbox import Sandbox

ROLE = "aws_role.b-0"


def change_of(**values: object) -> Change:
    fields = {"action": Action.UPDATE, "address": ROLE, "generation": 0, "kind": "aws_role", "name": "r", "region": ""}
    return Change(**{**fields, **values})  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_plan_has_the_table_first_and_the_cap_last(spec: str) -> None:
    lines = skerry("plan", spec).output.splitlines()
    assert lines[1].split() == ["group", "where", "machines", "purchase", "$/h", "cap", "image"]
    assert re.match(r"  b +aws us-east-1 +c7i.large x 1 +on demand +\$0.10 +\$2.41 in 24 h +1234567890", lines[2])
    changes = [number for number, line in enumerate(lines) if re.match(r"  \+   \w", line)]
    rights = lines.index("rights that change:")
    assert changes[0] == 3
    assert changes == list(range(3, 3 + len(changes)))
    assert changes[-1] < rights < len(lines) - 2
    assert lines[-2].startswith("plan: ")
    assert lines[-1].startswith("together $0.10/h; at most $2.41")


def test_rights_of_a_new_role_are_its_whole_policy(spec: str) -> None:
    output = skerry("plan", spec).output
    assert "${" not in output
    assert re.search(r"\+\+\+ role skerry-tiny-\w+-b-0: policy run", output)
    assert '(arn of aws_bucket.store)/runs/tiny/contributions/????????-????/b-0.json"' in output
    assert '"s3:if-none-match"' in output
    assert "${" not in skerry("plan", spec, "-v").output


def test_json_of_a_plan_has_unknown_values_in_words(spec: str, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    documents = [skerry("plan", spec, "--json").stdout, skerry("plan", spec, "--out", str(saved), "--json").stdout]
    documents.append(skerry("show", str(saved), "--json").stdout)
    assert "${aws_" in saved.read_text()
    for document in documents:
        assert "${" not in document
        changes = {change["address"]: change for change in json.loads(document)["changes"]}
        (policy,) = (r for r in changes["aws_role.b-0"]["rights"] if r["document"].endswith(": policy run"))
        (listing, *_) = policy["after"]["Statement"]
        assert listing["Resource"] == [{"unknown_until_apply": "(arn of aws_bucket.store)"}]


def test_changed_rights_are_a_diff(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    iam = skerry_sandbox.client("iam")
    (role,) = (name for name in skerry_sandbox.inventory()["role"] if name.endswith("-b-0"))
    more = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_role_policy(RoleName=role, PolicyName="more", PolicyDocument=json.dumps(more))
    lines = skerry("plan", spec).output.splitlines()
    start = lines.index(f"  --- role {role}: policy more")
    assert lines[start + 1] == "  +++ nothing"
    assert '  -      "Action": ["s3:*"],' in lines[start:]
    # Destroying it takes the rights away.
    assert f"  --- role {role}: policy run" in skerry("plan", spec, "--destroy").output


def rights_of(number: int, **after: object) -> Change:
    """The new rights of replica b-NUMBER; `{b}` in a text is its slot."""
    slot, name = f"b-{number}", f"run-b-{number}-g1"
    texts = {key: str(value).replace("{b}", slot) for key, value in after.items()}
    rights = RightsChange(document=f"role {name}: policy", before=None, after=texts)
    return change_of(address=f"aws_role.{slot}", name=name, rights=(rights,))


def shown_rights(*changes: Change) -> list[str]:
    return [line.plain for line in plan_text.rights_lines(changes)]


def statement(sid: str, *actions: str, resource: str = "arn:aws:s3:::acme/*") -> dict[str, object]:
    condition = {"StringEquals": {"aws:SourceAccount": ["123456789012"], "aws:PrincipalTag/team": ["a", "b", "c"]}}
    return {"Sid": sid, "Effect": "Allow", "Action": list(actions), "Resource": [resource], "Condition": condition}


def test_changed_line_is_shown_with_its_whole_statement_and_no_other() -> None:
    many = [f"s3:Get{number}" for number in range(12)]
    before = {"Version": "1", "Statement": [statement("Same", "s3:*"), statement("Reads", *many), statement("Last")]}
    after = {
        **before,
        "Statement": [*before["Statement"][:1], statement("Reads", *many[:11], "s3:Put"), statement("Last")],
    }
    document = RightsChange(document="role r: policy run", before=before, after=after)  # type: ignore[arg-type]
    lines = shown_rights(change_of(rights=(document,)))
    assert [line for line in lines if line.startswith(("  +", "  -"))][2:] == [
        '  -        "s3:Get11"',
        '  +        "s3:Put"',
    ]
    for whole in ('"Sid": "Reads"', '"Effect": "Allow"', '"s3:Get0"', '["arn:aws:s3:::acme/*"]', '"aws:SourceAccount"'):
        assert sum(whole in line for line in lines) == 1, whole
    assert not [line for line in lines if '"Same"' in line or '"Last"' in line]


def test_changed_condition_of_google_is_shown_with_its_role() -> None:
    bindings = [
        {
            "role": f"roles/r{n}",
            "members": [f"serviceAccount:{n}"] * 4,
            "condition": {"title": str(n), "expression": "x"},
        }
        for n in range(3)
    ]
    changed = {**bindings[1], "condition": {"title": "1", "expression": "true"}}
    rights = RightsChange(document="bucket b", before=bindings, after=[bindings[0], changed, bindings[2]])
    lines = shown_rights(change_of(rights=(rights,)))
    assert [line.strip() for line in lines if "roles/" in line] == ['"role": "roles/r1",']


def test_rights_that_differ_only_in_own_names_are_shown_once() -> None:
    shown = shown_rights(*(rights_of(number, on="runs/{b}/*", role="run-{b}-g1") for number in (0, 1, 2)))
    title = "role run-b-0-g1: policy (aws_role.b-{0..2}, each with its own name)"
    assert shown[:3] == ["rights that change:", "  --- nothing", f"  +++ {title}"]
    assert '  +  "on": "runs/b-0/*",' in shown
    assert not [line for line in shown if "b-1" in line]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("s3://data-2024/", "s3://data-9999/"),
        ("arn:aws:iam::111111111111:root", "arn:aws:iam::666666666666:root"),
        ("runs/b-01/*", "runs/b-11/*"),
    ],
)
def test_rights_that_differ_in_digits_are_all_shown(first: str, second: str) -> None:
    shown = shown_rights(rights_of(0, on=first), rights_of(1, on=second))
    assert f'  +  "on": "{first}"' in shown
    assert f'  +  "on": "{second}"' in shown


def test_rights_on_the_name_of_another_replica_are_shown() -> None:
    shown = shown_rights(rights_of(0, on="runs/b-0/*"), rights_of(1, on="runs/b-0/*"))
    assert shown.count('  +  "on": "runs/b-0/*"') == 2


def test_rights_of_two_groups_are_never_shown_as_equal() -> None:
    groups = [
        change_of(address=f"aws_role.w{n}", name=f"w{n}", rights=(RightsChange(document="x", before=None, after=n),))
        for n in (1, 2)
    ]
    assert sum(line.startswith("  +++") for line in shown_rights(*groups)) == 2


def test_changes_with_other_values_have_their_own_lines() -> None:
    def changed(number: int, **values: object) -> Change:
        fields = {"setting": "trust", "before": "111", "after": f"b-{number}", **values}
        difference = Difference(**fields)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        return change_of(address=f"aws_role.b-{number}", differences=(difference,), settings={"env": number})

    alike = [changed(0), changed(1)]
    assert len(list(plan_text.change_lines(alike))) == 2
    assert len(list(plan_text.change_lines(alike, verbose=True))) == 4
    for other in (changed(1, before="666"), changed(1, drift=True), changed(1, by="console"), changed(1, after="b-0")):
        assert len(list(plan_text.change_lines([changed(0), other]))) == 4


def test_plan_shows_every_account_that_others_gave_a_role_to(tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    path = str(write_spec(tmp_path, count=2))
    skerry("apply", path, "--auto-approve")
    iam = skerry_sandbox.client("iam")
    for number, account in enumerate(("111111111111", "666666666666")):
        (role,) = (name for name in skerry_sandbox.inventory()["role"] if name.endswith(f"-b-{number}"))
        trusted = {"Effect": "Allow", "Principal": {"AWS": f"arn:aws:iam::{account}:root"}, "Action": "sts:AssumeRole"}
        document = {"Version": "2012-10-17", "Statement": [trusted]}
        iam.update_assume_role_policy(RoleName=role, PolicyDocument=json.dumps(document))
    output = skerry("plan", path).output
    assert "arn:aws:iam::111111111111:root" in output[output.index("rights that change:") :]
    assert "arn:aws:iam::666666666666:root" in output[output.index("rights that change:") :]


def test_replaced_role_shows_all_rights_that_it_gets_and_loses(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    path = Path(spec)
    path.write_text(path.read_text() + "aws: {role_path: /teams/x/}\n")
    lines = skerry("plan", spec).output.splitlines()
    (granted,) = [number for number, line in enumerate(lines) if re.match(r"  \+\+\+ role .*-b-0-g1: policy run", line)]
    assert lines[granted - 1] == "  --- nothing"
    assert '  +      "Sid": "CollectGarbage",' in lines[granted:]
    assert [line for line in lines if re.match(r"  --- role .*-b-0: policy run", line)]


def test_changes_are_wrapped_to_the_terminal_and_never_cut() -> None:
    why = "what this is for, " * 8
    change = change_of(action=Action.CREATE, why=why, settings={"home": "${HOME}", "arn": "${aws_role.x.arn}/y"})
    lines = [line.plain for line in plan_text.change_lines([change], verbose=True, width=60)]
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()).startswith(f"+ {ROLE} r {why.strip()}")
    # A variable of the user's own keeps its text.
    assert lines[-2:] == ["        home: ${HOME}", "        arn: (arn of aws_role.x)/y"]


def test_saved_plan_is_shown_without_a_cloud(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    saved = tmp_path / "plan.json"
    printed = skerry("plan", spec, "--out", str(saved)).output
    Path(spec).unlink()
    skerry_sandbox.calls.clear()
    assert skerry("show", str(saved)).output == printed
    assert json.loads(skerry("show", str(saved), "--json").stdout)["review"]["total"] in printed
    assert list(skerry_sandbox.calls) == []
    assert "is not a plan" in skerry("show", str(tmp_path / "train" / "train.py"), code=2).stderr


def test_saved_removal_is_applied_or_refused(spec: str, tmp_path: Path, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    saved = tmp_path / "destroy.json"
    assert "-   aws_batch_queue.b" in skerry("plan", spec, "--destroy", "--out", str(saved)).output
    skerry("apply", spec, "--auto-approve", "--replace", "aws_batch_job.b-0")
    assert "stale plan: serial" in skerry("apply", str(saved), code=1).stderr
    assert skerry_sandbox.inventory()["job queue"]
    skerry("plan", spec, "--destroy", "--out", str(saved))
    # The bucket with the run in it is left, as after `skerry destroy` without --data.
    skerry("apply", str(saved), code=1)
    assert set(skerry_sandbox.inventory()) == {"bucket"}
    assert "leave out --target" in skerry("plan", spec, "--destroy", "--target", ROLE, code=2).stderr


def test_replace_creates_the_next_generation(spec: str, skerry_sandbox: Sandbox) -> None:
    skerry("apply", spec, "--auto-approve")
    (job,) = skerry_sandbox.inventory()["job"]
    assert "because: named by --replace" in skerry("plan", spec, "--replace", "aws_batch_job.b-0").output
    skerry("apply", spec, "--auto-approve", "--replace", "aws_batch_job.b-0", "--parallelism", "1")
    assert skerry_sandbox.inventory()["job"] == (f"{job}-g1",)
    assert "is never replaced" in skerry("plan", spec, "--replace", "aws_bucket.store", code=2).stderr
    assert "no resource aws_x.y" in skerry("plan", spec, "--replace", "aws_x.y", code=2).stderr
    outside = skerry("plan", spec, "--target", "aws_bucket.store", "--replace", ROLE, code=2).stderr
    assert f"--replace {ROLE} is outside of the targets; add --target {ROLE}" in outside


def test_state_output_and_graph_show_the_resources(spec: str, skerry_sandbox: Sandbox) -> None:
    assert "no state at" in skerry("state", "list", spec, code=2).stderr
    planned = skerry("graph", spec).stdout
    skerry("apply", spec, "--auto-approve")
    queue = queue_of(skerry_sandbox)
    assert re.search(rf"^aws_batch_queue.b +{queue}$", skerry("state", "list", spec).stdout, re.MULTILINE)
    shown = json.loads(skerry("state", "show", "aws_batch_queue.b", spec).stdout)
    assert (shown["name"], shown["settings"]["priority"]) == (queue, 1)
    assert "no resource aws_x.y" in skerry("state", "show", "aws_x.y", spec, code=2).stderr
    arn = skerry("output", spec, "--name", "aws_bucket.store.arn").stdout.strip()
    assert arn == "arn:aws:s3:::acme-skerry"
    assert f"aws_bucket.store.arn = {arn}" in skerry("output", spec).stdout
    assert json.loads(skerry("output", spec, "--json").stdout)["outputs"]["aws_bucket.store.name"] == "acme-skerry"
    dot = skerry("graph", spec).stdout
    assert dot.startswith('digraph "s3://acme-skerry/runs/tiny" {')
    assert '  "aws_batch_queue.b" -> "aws_batch_environment.b";' in dot.splitlines()
    assert planned == dot == skerry("graph", spec, "--planned").stdout


def rename_group(spec: str, first: str = "b") -> None:
    path = Path(spec)
    path.write_text(path.read_text().replace("- name: b", "- name: trainers") + f"moved: {{trainers: {first}}}\n")


def test_renamed_group_keeps_its_resources(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    text = Path(spec).read_text()
    Path(spec).write_text(text.replace("- name: b", "- name: trainers"))
    assert "-   aws_batch_queue.b" in skerry("plan", spec).output
    Path(spec).write_text(text)
    rename_group(spec)
    output = skerry("plan", spec, "--detailed-exitcode").output
    assert "14 unchanged" in output
    assert output.splitlines()[2].split()[:2] == ["trainers", "(b-*)"]
    assert "  trainers: 1 x c7i.large" in output
    assert "  trainers: 1 x c7i.large" in skerry("estimate", spec).output


def test_commands_take_the_new_name_of_a_renamed_group(spec: str) -> None:
    skerry("apply", spec, "--auto-approve")
    rename_group(spec)
    assert "the slots b-* are those of trainers" in skerry("status", spec).output
    assert "stopped: skerry-tiny-" in skerry("cancel", spec, "--replica", "trainers-0", "--auto-approve").output
    assert "no job of x-0" in skerry("cancel", spec, "--replica", "x-0", "--auto-approve", code=2).stderr


def test_first_name_that_the_run_does_not_know_is_refused(spec: str, skerry_sandbox: Sandbox) -> None:
    rename_group(spec, "nosuch")
    skerry("plan", spec)  # of a new run, any first name may be
    Path(spec).write_text(Path(spec).read_text().replace("nosuch", "b"))
    skerry("apply", spec, "--auto-approve")
    Path(spec).write_text(Path(spec).read_text().replace("trainers: b", "trainers: nosuch"))
    skerry_sandbox.calls.clear()
    refused = skerry("apply", spec, "--auto-approve", code=2)
    assert "moved: the run has no group 'nosuch'" in refused.stderr
    assert "its groups: b; write the first name of 'trainers', or remove the line" in refused.stderr
    assert skerry_sandbox.calls.writes == []
