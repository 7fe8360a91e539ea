"""The bill of materials of the image that this runs in, as CycloneDX JSON on stdout. Run by `scripts/image sbom`.

Python packages as cyclonedx-py finds them in /opt/venv, Debian's as dpkg lists them. Equal images give equal bills.
Argument: the image's reference. The tool lies in a folder that is mounted, and is not part of the image.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any
from urllib.parse import quote


def main() -> int:
    """Write the bill; 1, with the reason, if it does not follow the specification."""
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible", "--sv", "1.6"]
    # The tool must not list itself: its folder is taken out of the path that the environment under test sees.
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
    refs = [one["bom-ref"] for one in bill["components"]]
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
    """What dpkg has installed; nothing on a base without dpkg."""
    try:
        query = ["dpkg-query", "-W", "-f", "${Package} ${Version} ${Architecture}\n"]
        listed = subprocess.run(query, capture_output=True, text=True, check=True)
    except FileNotFoundError:
        return []
    found = sorted(line.split() for line in listed.stdout.splitlines())
    purls = [f"pkg:deb/debian/{name}@{quote(version, safe='')}?arch={arch}" for name, version, arch in found]
    return [
        {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
        for (name, version, _), purl in zip(found, purls, strict=True)
    ]


def invalid(text: str) -> str | None:
    """Why the bill breaks the specification, by the tool's own validator; None if it does not."""
    sys.path.insert(0, os.environ["TOOL"])
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    return None if problem is None else str(problem)[:2000]


if __name__ == "__main__":
    sys.exit(main())
