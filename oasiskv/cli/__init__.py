"""The command `oasiskv`: one file for each subcommand, and `main` which puts them together.

Nothing here imports vLLM or torch before a command needs it, so a wrong setting is refused at once.
"""
