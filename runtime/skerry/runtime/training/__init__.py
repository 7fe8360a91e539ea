"""One replica's life: join the run, train a round, contribute, follow the log, recover."""
