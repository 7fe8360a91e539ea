"""The operator's side: reads a spec, plans and applies it, starts, watches and removes runs. Imports no torch.

Each line imports only from the lines below it:

    cli             the command line: text, JSON and exit codes
    deploy          runs whose replicas are jobs in clouds; executors: replicas from ten lines of Python
    targets         the kinds of places where replicas run, one folder each; image: pushes the replica image
    clouds          the resources that hold a run in AWS and Google Cloud; report: a run as one page
    cost            prices and estimates; local: replicas as processes or containers of this machine
    provision       the engine: resource graph, plan, apply, state; it knows no cloud
    run             what is the same for every target: record, code archive, restarts, restore, repair
    spec            the spec's models, its YAML reader, and the checks on the text alone
    observe         reads a run's store: status, history, and the examination of `doctor`
    spec_and_store_errors    errors of specs and stores; number_text: numbers for people
"""
