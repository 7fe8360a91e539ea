"""The spec that `skerry init` writes: complete, valid, and commented for someone who reads it first."""

from __future__ import annotations

from typing import Final

SAMPLE: Final = """\
# A DiLoCo run. `skerry validate` checks this file, `skerry up` runs it, `skerry schema` prints every field.

run: my-run                         # its prefix in the store, and its folder under .skerry/
store: file://.skerry/store         # the bucket: s3://, gs://, az:// or file://; a relative path starts here

code:
  path: ./train                     # packed and uploaded; list what to leave out in ./train/.skerryignore
  command: [python, train.py]       # run inside it, once per replica

outer:
  rounds: 200                       # outer steps; null trains until it is stopped
  sync_every: 100                   # inner steps between two exchanges: more means less traffic
  fragments: 1                      # parts of the model exchanged in turn
  codec: none                       # or bf16: half the bytes
  lr: 0.7                           # the outer optimizer (Nesterov SGD)
  momentum: 0.9
  weighting: uniform                # or tokens: a contribution counts by what is behind it

faults:
  min_replicas: 2                   # a round needs so many contributions
  grace: 60s                        # and then waits so long for the others
  start_window: 10m                 # how long the first round waits for all of them
  checkpoint_every: 1               # rounds
  restarts: {max: 5, window: 1h}    # of one replica; then it is given up

replicas:                           # slots: local-0, local-1, ...
  - name: local
    count: 4
    target: {kind: local}           # processes on this machine; {kind: local, threads: 2} fixes their CPU threads
"""
