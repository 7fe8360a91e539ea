"""Ids of every kind are removed from a text, also inside ARNs, URLs and JSON; the rest of it stays."""

from __future__ import annotations

import json
import re
from urllib.parse import quote

import pytest
from tests.cloud.remove_ids import Id, ids_left, ids_of_environment, remove_ids

from skerry.runtime.errors import Invalid

ACCOUNT = "210987654321"
DIGEST = f"sha256:{'0123456789ab' * 5}cdef"
KNOWN = [
    Id("aws-account", ACCOUNT),
    Id("google-project", "acme-diloco-7"),
    Id("google-number", "4151040412"),
    Id("user", "ada"),
    Id("host", "Adas-Laptop"),
    Id("bucket", "acme"),
    Id("secret", f"x{ACCOUNT}/y+z"),
    Id("namespace", 'team "a"'),
]
# By kind: a text, and the part of it that may not be left.
IDS = {
    "account at the end of a line": (f"account {ACCOUNT}\n", ACCOUNT),
    "unknown account": ("in 345678901234.", "345678901234"),
    "account with dashes": ("2109-8765-4321", "8765"),
    "unknown account with dashes": ("account 3456-7890-1234", "7890"),
    "account in a registry": (f"{ACCOUNT}.dkr.ecr.us-east-1.amazonaws.com/skerry@{DIGEST}", ACCOUNT),
    "account in an ARN": (f"arn:aws:iam::{ACCOUNT}:role/x", ACCOUNT),
    "account in an ARN of another partition": (f"arn:aws-us-gov:batch:us-gov-west-1:{ACCOUNT}:job/1", ACCOUNT),
    "account in a quoted ARN": (quote(f"arn:aws:iam::{ACCOUNT}:role/x", safe=""), ACCOUNT),
    "account in JSON": (json.dumps({"Account": ACCOUNT, "n": [1, 2]}), ACCOUNT),
    "account glued to letters": (f"x{ACCOUNT}y", ACCOUNT),
    "user in an ARN": (f"arn:aws:iam::{ACCOUNT}:user/team/grace.hopper", "hopper"),
    "session in an ARN": (f"arn:aws:sts::{ACCOUNT}:assumed-role/Power/grace@mainframe", "grace"),
    "company's role": (f"arn:aws:iam::{ACCOUNT}:role/AcmeBoundary", "Boundary"),
    "access key": ("AWS_ACCESS_KEY_ID=AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    "temporary access key": ('"AccessKeyId": "ASIAIOSFODNN7EXAMPLE"', "IOSFODNN7"),
    "secret key": ("wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKE1", "K7MDENG"),
    "session token": ("FwoGZXIvYXdzE" * 8, "FwoGZXIvYXdzE"),
    "known secret with an account in it": (f"key x{ACCOUNT}/y+z", "y+z"),
    "token of Google": ("ya29.a0AfH6SMBx-1_2", "a0AfH6"),
    "token of Hugging Face": ("hf_abcdefghijklmnopqrst", "klmnop"),
    "web token": ("eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJodHRwcyJ9.c2ln", "eyJpc3"),
    "bearer": ("Authorization: Bearer abcdef0123456789abcdef", "0123456789"),
    "private key": ("-----BEGIN PRIVATE KEY-----\nMIIE\n-----END PRIVATE KEY-----", "MIIE"),
    "signed URL": ("https://x/y?X-Amz-Signature=00ff00ff&z=1", "00ff00ff"),
    "email": ("grace.hopper+x@navy.example.com", "hopper"),
    "quoted email": ("grace%40navy.example.com", "grace"),
    "service account": ("skerry-x@other-project-1.iam.gserviceaccount.com", "other-project"),
    "project": ("project acme-diloco-7 (4151040412)", "diloco"),
    "project's number": ("project acme-diloco-7 (4151040412)", "4151040412"),
    "known project in capitals": ("ACME-DILOCO-7", "DILOCO"),
    "unknown project in a path": ("projects/other-project-1/locations/us-central1", "other-project"),
    "unknown project in JSON": ('{"project_id": "other-project-1"}', "other-project"),
    "unknown project in a registry": (f"us-central1-docker.pkg.dev/other-project-1/r/i@{DIGEST}", "other-project"),
    "unknown number": ("projects/41510404/customJobs/1", "41510404"),
    "bucket by URI": ("s3://acme-runs/runs/tiny", "acme-runs"),
    "bucket with dots and underscores": ("gs://b.c_d-e/x", "c_d"),
    "bucket as a host": ("https://runs-of-acme.s3.us-east-1.amazonaws.com/k", "runs-of"),
    "bucket in a path": ("https://s3.us-east-1.amazonaws.com/theirs-too/k", "theirs"),
    "bucket in Google's API": ("https://storage.googleapis.com/storage/v1/b/theirs-too/o", "theirs"),
    "bucket in an ARN": ("arn:aws-cn:s3:::theirs-too/*", "theirs"),
    "user": ("by ada, in /home/grace/x", "grace"),
    "short user": ("by ada.", "ada"),
    "host": ("on adas-laptop", "laptop"),
    "host of a machine": ("ip-10-0-1-2.ec2.internal", "10-0-1-2"),
    "host of EC2": ("https://ec2-10-0-1-2.compute-1.amazonaws.com", "10-0-1-2"),
    "internal host": ("db1.eng.corp", "db1"),
    "owner of a token": ("Hugging Face: the token is of grace-h", "grace"),
    "workspace of a token": ("Modal: the token is of the workspace navy-lab", "navy"),
    "organizations of a user": ("write namespace: grace-h or navy-lab, or use", "navy"),
    "cluster": ("Kubernetes: https://k8s.prod.navy.example:6443, version v1.33", "navy"),
    "cluster of EKS": ("https://0123456789ABCDEF0123456789ABCDEF.gr7.us-east-1.eks.amazonaws.com", "6789ABCDEF"),
    "cluster of AKS": ("host='navy-dns-1a2b.hcp.westeurope.azmk8s.io', port=443", "navy"),
    "IPv4": ("from 10.20.30.40:443", "10.20.30.40"),
    "IPv6": ("from 2001:db8::8a2e:370:7334", "8a2e"),
    "instance": ("i-0abcdef1234567890 in vpc-0309bde3ff1ccc147", "0abcdef"),
    "network": ("i-0abcdef1234567890 in vpc-0309bde3ff1ccc147", "0309bde"),
    "job": ("3f2504e0-4f89-11d3-9a0c-0305e82c3301", "9a0c"),
    "job of Vertex AI": ("customJobs/1234567890123456789", "12345678901"),
    "run": ("skerry-skerry-cloud-test-6b-722429-s-0", "722429"),
    "value that JSON escapes": (json.dumps({"n": 'team "a"'}), "team"),
}


@pytest.mark.parametrize("name", IDS)
def test_id_of_each_kind_is_replaced(name: str) -> None:
    text, private = IDS[name]
    assert private in text
    result = remove_ids(f"before {text} after", KNOWN)
    assert private not in result
    assert re.search(r"<[a-z-]+-1>", result)
    assert list(ids_left(f"before {text} after", KNOWN))
    assert list(ids_left(result, KNOWN)) == []


def test_all_ids_in_a_text_are_replaced_together() -> None:
    text = "\n".join(text for text, _ in IDS.values())
    result = remove_ids(text, KNOWN)
    for _, private in IDS.values():
        assert not re.search(rf"(?<![a-z]){re.escape(private)}(?![a-z])", result), private


def test_same_id_has_the_same_placeholder() -> None:
    text = f"{ACCOUNT} arn:aws:sqs:x:{ACCOUNT}:q 2109-8765-4321 345678901234 s3://b-b/x gs://b-b/y"
    expected = "<aws-account-1> arn:aws:sqs:x:<aws-account-1>:q <aws-account-1> <aws-account-2> s3://<bucket-1>/x"
    assert remove_ids(text, KNOWN) == f"{expected} gs://<bucket-1>/y"


def test_rest_of_a_text_is_kept() -> None:
    text = (
        f"skerry 0.1.dev704 on 2026-11-28T14:37:24+00:00, image {DIGEST}, commit 40dc6f6d2ea7\n"
        "| stores-aws | passed | 21 passed, 1 skipped | 12 s | $0.10 | loss 5.773379147052765, 0.123456789012\n"
        "tests/cloud/test_stores.py::TestS3::test_race[8] http://127.0.0.1:8080/x us-east-1 c7i.large\n"
        "iam:PassRole, s3:DeleteBucket, storage.googleapis.com, 6,144 tokens, adamant, root\n"
        "https://sts.amazonaws.com https://docs.aws.amazon.com/x http://cloud.google.com:80 https://huggingface.co"
    )
    assert remove_ids(text, [*KNOWN, Id("user", "root"), Id("project", "skerry")]) == text


def test_environment_has_its_ids_by_the_names_of_variables() -> None:
    ids = ids_of_environment(
        {
            "AWS_SECRET_ACCESS_KEY": "s",
            "SKERRY_CLOUD_GOOGLE_PROJECT": "p-1",
            "SKERRY_CLOUD_IMAGE": f"ghcr.io/acme/skerry@{DIGEST}",
            "TOKENIZERS_PARALLELISM": "true",
            "AWS_REGION": "us-east-1",
        }
    )
    assert ids[2:] == [Id("secret", "s"), Id("google-project", "p-1"), Id("image", "ghcr.io/acme/skerry")]


def test_text_with_an_id_left_is_refused_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cloud.remove_ids.merged", lambda _: [])
    with pytest.raises(Invalid, match=r"ids are left in it: aws-account in line 2; user in line 3$"):
        remove_ids(f"first\n{ACCOUNT}\nada", KNOWN)
