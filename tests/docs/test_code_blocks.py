"""Every block of code on the pages is run, compiled or read by its own reader; exceptions are listed here."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import click
import psycopg
import pytest
import yaml

from dataloader.cli.entry import cli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^( *)```(\{?[\w-]*\}?)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHOWN = {"", "text", "caddy", "nginx", "console"}
"""Drawings, output and files of other programs. Commands within them are checked nevertheless."""
BUILT = {"{toctree}"}
"""Read by the build of the site."""
BEFORE = """
CREATE ROLE shop; CREATE ROLE jobs_service; DROP INDEX ix_dl_jobs_ready;
CREATE TABLE procrastinate_jobs (id int, task_name text, args jsonb, queue_name text, lock text, priority int,
                                 scheduled_at timestamptz, status text);
"""
"""Objects that the statements of the pages need."""
CHECKED = {"python", "sh", "json", "yaml", "sql"}


def blocks(language):
    """Return the page and the text of each block."""
    return [(path, code) for path in PAGES for _, name, code in BLOCK.findall(path.read_text()) if name == language]


def test_there_is_a_check_for_each_language():
    named = {name for path in PAGES for _, name, _ in BLOCK.findall(path.read_text())}
    assert named == SHOWN | BUILT | CHECKED


def test_documents_in_json_and_yaml_can_be_read():
    for _, code in blocks("json"):
        json.loads(code)
    for _, code in blocks("yaml"):
        assert yaml.safe_load(code)


def test_lines_for_a_shell_have_its_syntax():
    for path, code in blocks("sh"):
        done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, check=False, timeout=10)
        assert not done.stderr, (path.name, done.stderr)


def commands():
    """Return each `dataloader …` in a block, at the beginning of a line, or in a text."""
    for path in [*PAGES, *sorted((ROOT / "examples").rglob("*.py"))]:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(
            r"^ *(?:\$ |[\w=]+=\S+ )*(dataloader [a-z-].*)$|`(dataloader [a-z][^`]*)`", text, re.MULTILINE
        ):
            yield path, "".join(line)


def test_commands_and_options_on_the_pages_exist():
    seen, wrong = 0, []
    for path, line in commands():
        words = shlex.split(re.sub(r"…|\[[A-Z…].*?\]", "", line).split(" | ")[0], comments=True)[1:]
        command, context = cli, click.Context(cli)
        while isinstance(command, click.Group) and words and re.match(r"[a-z]", words[0]):
            command = command.get_command(context, words.pop(0).rstrip(",;:."))
        given = {word.split("=")[0] for word in words if re.match(r"--\w", word)}
        options = [] if command is None else [(*one.opts, *one.secondary_opts) for one in command.params]
        if command is None or not given <= {"--help"}.union(*options):
            wrong.append(f"{path.name}: {line}")
        seen += 1
    assert wrong == []
    assert seen > 150


def test_statements_of_sql_are_understood_by_the_database(database):
    for path, code in blocks("sql"):
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            connection.execute("BEGIN")
            try:
                connection.execute(BEFORE)
                connection.execute("SELECT set_config('search_path', current_schema(), true)")
                connection.execute(re.sub(r"^(BEGIN|COMMIT);$", "", code, flags=re.MULTILINE))
            except psycopg.Error as error:
                pytest.fail(f"{path.name}: {error}\n{code}")
            finally:
                connection.execute("ROLLBACK")
