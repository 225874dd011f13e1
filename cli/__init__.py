"""The command line: entry.py knows the commands and the exit codes, each other file the commands of one subject.

A command's file is imported when the command is called, so that `dataloader --version` needs neither a web framework
nor a database driver. The commands that ask a queue do so through `Jobs`, which target.py opens: by the database, or by
`--url`.
"""
