"""Injects damage into all copies that a run has, and counts how often it is detected and another copy is used instead.

    scripts/bench damage [--count 10000] [--seed 0] [--layers memory shm disk checkpoint mirror] [--json]

Flips of single bits, truncations and absences, of tensors in memory, files and objects, at random places. The layers
and the outcomes are explained in tests/kit/damage.py. Exit code 1 if wrong bytes were used, or if nothing was used
although a whole copy was left. Takes two processes, and some minutes for 10,000.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the injection is part of the tests

from tests.kit.damage import LAYERS, inject


def main() -> int:
    """Run the benchmark; the result is its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="damaged copies in all (10000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.getLogger("skerry").addHandler(logging.NullHandler())
    logging.getLogger("skerry").propagate = False
    each, is_sound = -(-options.count // len(options.layers)), True
    layers: dict[str, object] = {}
    for layer in options.layers:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            figures = inject(layer, each, options.seed, Path(folder))
        seconds = time.monotonic() - began
        is_sound &= figures.is_sound
        outcomes = {
            name: getattr(figures, name) for name in ("cases", "served", "refused", "needlessly_refused", "wrong")
        }
        layers[layer] = {"injected": dict(figures.injected), **outcomes, "seconds": round(seconds, 1)}
        kinds = ", ".join(f"{count} {kind}s" for kind, count in sorted(figures.injected.items()))
        print(
            f"{layer:<11}{figures.injected.total():>6} injected ({kinds}): {figures.served} cases served by another "
            f"copy, {figures.refused} refused without one, {figures.needlessly_refused} of them needlessly, "
            f"{figures.wrong} wrong; {seconds:.0f} s",
            flush=True,
        )
    if options.json:
        print(json.dumps({"seed": options.seed, "sound": is_sound, "layers": layers}))
    return 0 if is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
