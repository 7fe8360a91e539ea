"""The `skerry` command: parses the command line, prints text or JSON, and turns errors into exit codes."""
