"""Writes the bill of materials of the image that it runs in, as CycloneDX JSON on stdout. Run by `scripts/image sbom`.

Python packages are listed by cyclonedx-py from /opt/venv, Debian packages by dpkg. Equal images give equal bills.
Argument: the image's reference. The tool is in a mounted folder and not part of the image.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any
from urllib.parse import quote


def main() -> int:
    """Write the bill; return 1, with the reason on stderr, if it violates the specification."""
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--sv", "1.6"]
    # The tool must not list itself, so its folder is only in the path of this process.
    program = (
        "import os, runpy, sys; sys.path.insert(0, os.environ['TOOL']); "
        "runpy.run_module('cyclonedx_py', run_name='__main__')"
    )
    arguments = [sys.executable, "-c", program, *tool[3:], "/opt/venv/bin/python"]
    listed = subprocess.run(arguments, capture_output=True, text=True, check=True)
    bill: dict[str, Any] = json.loads(listed.stdout)
    packages = debian()
    bill["components"] = [*bill.get("components", []), *packages]
    name = sys.argv[1]
    bill["metadata"]["component"] = {"type": "container", "bom-ref": "image", "name": name}
    refs = [component["bom-ref"] for component in bill["components"]]
    known = {entry["ref"] for entry in bill.get("dependencies", [])}
    bill["dependencies"] = [
        {"ref": "image", "dependsOn": sorted(refs)},
        *(entry for entry in bill.get("dependencies", []) if entry["ref"] != "image"),
        *({"ref": ref} for ref in sorted(refs) if ref not in known),
    ]
    text = json.dumps(bill, indent=1, sort_keys=True)
    if (problem := invalid(text)) is not None:
        sys.stderr.write(f"not a valid bill: {problem}\n")
        return 1
    sys.stdout.write(text + "\n")
    return 0


def debian() -> list[dict[str, Any]]:
    """The packages that dpkg lists; none on a base without dpkg."""
    try:
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]
        listed = subprocess.run(query, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return []
    packages = sorted(line.split() for line in listed.stdout.splitlines())
    purls = [f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={arch}" for name, version, arch in packages]
    return [
        {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        for (name, version, _), purl in zip(packages, purls, strict=True)
    ]


def invalid(text: str) -> str | None:
    """The first violation of the specification, by the tool's validator; None if the bill is valid."""
    sys.path.insert(0, os.environ["TOOL"])
    from cyclonedx.schema import SchemaVersion  # noqa: PLC0415  from the mounted folder
    from cyclonedx.validation.json import JsonStrictValidator  # noqa: PLC0415  same

    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if problem is None else str(problem)[:2000]


if __name__ == "__main__":
    sys.exit(main())
