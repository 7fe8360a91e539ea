"""The security review names every right that the code grants, and every right that an operator is asked for."""

from __future__ import annotations

import ast
import json
import re
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
import yaml

from skerry.infra.clouds.aws.secret_and_data_policies import input_policy
from skerry.infra.clouds.google import permissions, replica_rules, secret_bindings
from skerry.infra.spec.env_secrets_and_data import Inputs, Secret

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs/security-review.md"
EXAMPLES: Final = ROOT / "infra/examples"
# The statements of secrets have computed names; `test_secrets_are_in_the_review` has them.
COMPUTED: Final = {("sid", "(action,)")}


def rows() -> list[list[str]]:
    """The cells of every row of a table, with lists in braces written out."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [[expanded(cell) for cell in re.split(r" \| ?", line.strip("| "))] for line in lines]


def expanded(cell: str) -> str:
    def spread(match: re.Match[str]) -> str:
        return ", ".join(f"`{match[1]}{part}`" for part in match[2].split(","))

    return re.sub(r"`([^`{]*)\{([^`}]*)\}`", spread, cell)


def granted() -> Iterator[tuple[str, str, str]]:
    """For each statement in the code: the file, the beginning of its name, and its actions as written."""
    for path in sorted((ROOT / "infra/skerry/infra").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Statement":
                fields = {keyword.arg: keyword.value for keyword in node.keywords}
                name = start_of(fields["sid"]) if "sid" in fields else "trust"
                yield path.name, name, ast.unparse(fields["actions"])


def start_of(node: ast.expr) -> str:
    """The text of a literal, up to its first computed part; the name of a variable."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *_]):
            return text
        case _:
            return ast.unparse(node)


def actions_in(source: str) -> list[str]:
    return re.findall(r"'([a-z0-9]+:[A-Za-z*]+)", source)


def lacking(named: list[list[str]], name: str, actions: Sequence[str]) -> list[str]:
    """The actions that no row of this name has; the name itself if there is no row."""
    actions = [actions] if isinstance(actions, str) else actions
    cells = [row[1] for row in named if re.match(rf"`?{re.escape(name)}\d*`?(,|$)", row[0])]
    return [action for action in actions if not any(f"`{action}" in cell for cell in cells)] if cells else [name]


def gaps(text: str) -> list[str]:
    """The headers of tables without the columns "why" and "a holder could", and the rows in which one is empty."""
    wrong: list[str] = []
    width = 0
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            width = 0
        elif not width:
            width = len(cells)
            wrong += [] if cells[-2:] == ["why", "a holder could"] else [line]
        elif set(line) - set("|- ") and (len(cells) < width or not all(cells)):
            wrong.append(line)
    return wrong


def test_each_row_has_its_reason_and_what_a_holder_could_do() -> None:
    text = PAGE.read_text()
    assert gaps(text) == []
    row = next(line for line in text.splitlines() if line.startswith("| `ReadRun`"))
    name, actions, why, could = row.strip("|").split(" | ")
    for broken in (f"|{name} | {actions} | | {could}|", f"|{name} | {actions} | {why} | |", f"|{name} | {actions}|"):
        assert gaps(text.replace(row, broken)) == [broken]
    header = "| statement | actions | why | a holder could |"
    assert gaps(text.replace(header, "| statement | actions | why | note |", 1)) == [
        "| statement | actions | why | note |"
    ]


def test_each_place_has_a_section() -> None:
    titles = " ".join(line for line in PAGE.read_text().splitlines() if line.startswith("## "))
    for place in ("AWS: a replica", "AWS Batch", "SageMaker", "Google", "Vertex AI", "Kubernetes", "Slurm", "Modal"):
        assert place in titles, place
    assert "Hugging Face Jobs" in titles


def test_statements_in_the_code_are_in_the_review() -> None:
    named = rows()
    missing = {
        f"{file}: {name}: {lack}"
        for file, name, source in granted()
        if (name, source) not in COMPUTED
        for lack in lacking(named, name, actions_in(source))
    }
    assert missing == set()


def test_statements_of_the_code_are_found() -> None:
    assert len(list(granted())) > 25


@pytest.mark.parametrize(
    "secret",
    [
        Secret(aws_secretsmanager="arn:aws:secretsmanager:us-east-1:123456789012:secret:hf-AbCdEf"),
        Secret(aws_ssm="arn:aws:ssm:us-east-1:123456789012:parameter/hf"),
    ],
)
def test_secrets_are_in_the_review(secret: Secret) -> None:
    (statement,) = input_policy(Inputs(secrets={"X": secret}), "aws")
    assert lacking(rows(), statement.sid, statement.actions) == []


@pytest.mark.parametrize("policy", [path.name for path in sorted(EXAMPLES.glob("operator-policy*.json"))])
def test_statements_of_the_operator_are_in_the_review(policy: str) -> None:
    named = rows()
    statements = json.loads((EXAMPLES / policy).read_text())["Statement"]
    assert [lack for item in statements for lack in lacking(named, item["Sid"], item["Action"])] == []


def test_rules_and_permissions_on_google_are_in_the_review() -> None:
    text = "\n".join(chain.from_iterable(rows()))
    rules = [
        *replica_rules.replica_rules(prefix="p", slots=["a-0"], group=None),
        *replica_rules.mirror_rules("p", goes_on=True),
    ]
    needed = (*permissions.HOME, *permissions.ACCOUNTS, *permissions.POOLS, *permissions.REPOSITORIES)
    wanted = {*(rule.title for rule in rules), *(rule.role for rule in rules), *needed, secret_bindings.ACCESSOR}
    assert [name for name in sorted(wanted) if f"`{name}`" not in text] == []


def test_rights_in_kubernetes_are_in_the_review() -> None:
    (role,) = yaml.safe_load_all((EXAMPLES / "kubernetes-operator.yaml").read_text())
    named = rows()
    missing = [
        (resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        if not any(f"`{resource}`" in row[0] and f"`{verb}`" in row[1] for row in named)
    ]
    assert missing == []
