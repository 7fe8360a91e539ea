"""What `skerry init` writes: a spec and a training script, complete, valid, and commented for a first reader."""

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
  rounds: 20                        # outer steps; null trains until it is stopped
  sync_every: 20                    # inner steps between two exchanges: more means less traffic
  fragments: 1                      # parts of the model exchanged in turn
  codec: none                       # or bf16: half the bytes
  lr: 0.7                           # the outer optimizer (Nesterov SGD)
  momentum: 0.9
  weighting: uniform                # or tokens: a contribution counts by what is behind it

faults:
  min_replicas: 1                   # a round needs so many contributions
  grace: 10s                        # and then waits so long for the others
  start_window: 2m                  # how long the first round waits for all of them
  checkpoint_every: 5               # rounds
  restarts: {max: 5, window: 1h}    # of one replica; then it is given up

replicas:                           # slots: local-0, local-1, ...
  - name: local
    count: 2
    target: {kind: local}           # processes on this machine; {kind: local, threads: 2} fixes their CPU threads
"""

_BATCH: Final = """\
# A DiLoCo run on AWS Batch. `skerry validate` checks this file, `skerry plan` shows what would be made, `skerry apply`
# makes it and starts the replicas, `skerry destroy` takes it all away; `skerry schema` prints every field.

run: my-run                         # its prefix in the store, and a part of the names of all that is made
store: s3://my-bucket/runs          # made if it is not there; the bucket's name must be free in all of AWS
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu     # what `scripts/image push` prints

code:
  path: ./train                     # packed and uploaded; list what to leave out in ./train/.skerryignore
  command: [python, train.py]       # run inside it, once per replica

outer:
  rounds: 20                        # outer steps; null trains until it is stopped
  sync_every: 100                   # inner steps between two exchanges: more means less traffic
  codec: bf16                       # half the bytes of none
  lr: 0.7                           # the outer optimizer (Nesterov SGD)
  momentum: 0.9

faults:
  min_replicas: 2                   # a round needs so many contributions
  grace: 2m                         # and then waits so long for the others
  start_window: 30m                 # how long the first round waits for all of them: machines have to be found
  checkpoint_every: 1               # rounds

limits:
  max_hours: 24                     # of the whole run, from its first apply; then every replica stops
  max_cost_usd: 500                 # of all replicas together: sooner, if at their prices this is used up

tags: {team: research}              # on everything that is made; take it out, or write your own

replicas:                           # slots: batch-0, batch-1, ...; several groups may be in several regions
  - name: batch
    count: 4
    target:
      kind: aws_batch
      region: us-east-1
      instance_types: [g6e.xlarge, g6.xlarge, g5.xlarge]    # whatever of these is there; more of them come sooner
      gpus: 1                       # of one replica; 0 for none
      spot: true                    # cheaper; a machine that is taken back costs a replica one attempt
      attempts: 3                   # starts of one replica in all
      disk: 100GiB
      # shared_memory: 4GiB         # where data loaders pass batches; by default 2GiB, or half the memory
      # vcpus: 4                    # by default a replica has its GPUs' share of the machine
      # memory: 14GiB
      # role: group                 # one role for all replicas instead of one each; needed above 200
      # byo: {queue: my-queue}      # what your platform team has made already; see `skerry schema`
"""

_SAGEMAKER: Final = """\
# A DiLoCo run on SageMaker. `skerry validate` checks this file, `skerry plan` shows what would be made, `skerry apply`
# makes it and starts the replicas, `skerry destroy` takes it all away; `skerry schema` prints every field.

run: my-run                         # its prefix in the store, and a part of the names of all that is made
store: s3://my-bucket/runs          # made if it is not there; the bucket's name must be free in all of AWS
image: 123456789012.dkr.ecr.us-east-1.amazonaws.com/skerry:gpu     # what `scripts/image push` prints; in ECR

code:
  path: ./train                     # packed and uploaded; list what to leave out in ./train/.skerryignore
  command: [python, train.py]       # run inside it, once per replica

outer:
  rounds: 20                        # outer steps; null trains until it is stopped
  sync_every: 100                   # inner steps between two exchanges: more means less traffic
  codec: bf16                       # half the bytes of none
  lr: 0.7                           # the outer optimizer (Nesterov SGD)
  momentum: 0.9

faults:
  min_replicas: 2                   # a round needs so many contributions
  grace: 2m                         # and then waits so long for the others
  start_window: 30m                 # how long the first round waits for all of them: machines have to be found
  checkpoint_every: 1               # rounds

limits:
  max_hours: 24                     # of the whole run, from its first apply; then every replica stops

tags: {team: research}              # on everything that is made; take it out, or write your own

replicas:                           # slots: sm-0, sm-1, ...; several groups may be in several regions
  - name: sm
    count: 4
    target:
      kind: sagemaker
      region: us-east-1
      instance: ml.g6e.xlarge       # one for each replica; its quota for training jobs has to allow as many
      spot: true                    # cheaper; of a machine that is taken back the replica starts again on another
      # max_wait: 48h               # how long it may look for machines and run, together
      # max_runtime: 12h            # of one job; by default as long as limits say, else 5 days
      # gpus: 1                     # by default all that the machine has, a rank for each
      # role: replica               # a role for each replica instead of one for all
      # byo: {role: trainer}        # what your platform team has made already; see `skerry schema`
"""

_VERTEX: Final = """\
# A DiLoCo run on Vertex AI. `skerry validate` checks this file, `skerry plan` shows what would be made, `skerry apply`
# makes it and starts the replicas, `skerry destroy` takes it all away; `skerry schema` prints every field.

run: my-run                         # its prefix in the store, and a part of the names of all that is made
store: gs://my-bucket/runs          # made if it is not there; the bucket's name must be free in all of Google Cloud
image: us-central1-docker.pkg.dev/my-project/skerry/replica:gpu    # what `scripts/image push` prints

code:
  path: ./train                     # packed and uploaded; list what to leave out in ./train/.skerryignore
  command: [python, train.py]       # run inside it, once per replica

outer:
  rounds: 20                        # outer steps; null trains until it is stopped
  sync_every: 100                   # inner steps between two exchanges: more means less traffic
  codec: bf16                       # half the bytes of none
  lr: 0.7                           # the outer optimizer (Nesterov SGD)
  momentum: 0.9

faults:
  min_replicas: 2                   # a round needs so many contributions
  grace: 2m                         # and then waits so long for the others
  start_window: 30m                 # how long the first round waits for all of them: machines have to be found
  checkpoint_every: 1               # rounds

limits:
  max_hours: 24                     # of the whole run, from its first apply; then every replica stops

tags: {team: research}              # labels of everything that is made; take it out, or write your own

replicas:                           # slots: vertex-0, vertex-1, ...; several groups may be in several regions
  - name: vertex
    count: 4
    target:
      kind: vertex
      project: my-project           # jobs are made in it, and paid by it
      region: us-central1
      machine: g2-standard-8        # one for each replica
      accelerator: nvidia-l4        # what is built into g2; n1 machines take a T4, P4, P100 or V100
      scheduling: spot              # cheaper; a replica whose machine is taken back is started by the next apply
      disk: 100GiB
      # accelerators: 1             # by default as many as are built in
      # max_runtime: 12h            # of one job; without it and without limits Vertex AI ends a job after seven days
      # role: replica               # a service account for each replica instead of one for all
      # byo: {service_account: trainer@my-project.iam.gserviceaccount.com}   # what your platform team has made already
"""

SAMPLES: Final = {"local": SAMPLE, "aws_batch": _BATCH, "sagemaker": _SAGEMAKER, "vertex": _VERTEX}
"""A spec for each kind of target that a first run may have."""

SCRIPT: Final = '''\
"""One replica of a DiLoCo run: a tiny network learns sin(x). Replace model, data and loss by yours."""

import torch
from torch import nn
from torchft.local_sgd import DiLoCo

from skerry.runtime.replica import connect

BATCH = 64

with connect() as replica:  # this process's place in the run; ends the script with the right exit code
    run = replica.run  # what the spec says under `outer:`
    torch.manual_seed(0)  # all replicas begin with the same weights
    layers = [nn.Sequential(nn.Linear(1, 32), nn.Tanh()), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 1)]
    model = nn.Sequential(*layers)
    inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # DiLoCo exchanges `outer.fragments` parts of the model in turn, each with an outer optimizer of its own.
    count = run.fragments
    parts = [model[len(model) * part // count : len(model) * (part + 1) // count] for part in range(count)]
    outer = [
        torch.optim.SGD(part.parameters(), lr=run.outer_lr, momentum=run.outer_momentum, nesterov=True)
        for part in parts
    ]

    def save():
        return {"model": model.state_dict(), "inner": inner.state_dict()}

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["inner"])

    manager = replica.manager(state_dict=save, load_state_dict=load)
    with DiLoCo(manager, parts, inner, outer, sync_every=run.sync_every):
        for step in replica.steps(inner):  # until the run is finished, or is to stop
            # Which data is decided by the step and the replica alone, so a restart goes on where the run is.
            generator = torch.Generator().manual_seed(step * replica.replicas + replica.index)
            x = torch.rand(BATCH, 1, generator=generator) * 6 - 3
            loss = nn.functional.mse_loss(model(x), x.sin())
            inner.zero_grad()
            loss.backward()
            inner.step()
            replica.log(loss=loss.item(), tokens=BATCH)
    print(f"{replica.slot} ends at round {manager.current_step()}")
'''
