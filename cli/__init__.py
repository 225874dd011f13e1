"""Command line: entry.py knows the commands and the exit codes, each other file has the commands of one subject.

A command's file is imported when the command is called, so that `dataloader --version` needs neither a web framework
nor a database driver. The commands that use a queue get a client from target.py, for the database or for `--url`.
"""
