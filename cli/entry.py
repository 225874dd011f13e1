"""Entry point: the group of all commands, and the messages and exit codes of failed commands.

Exit codes: 0 done; 1 failed; 2 a wrong argument or setting, one line each on stderr; 3 the job of `--wait` did not
succeed; 4 nothing has this ID or name; 130 interrupted. Failures with a known reason have one line and no traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, Final

import click

from dataloader.jobs.error_groups import single_errors
from dataloader.jobs.errors import AccessDenied, BadRequest, ConfigError, DataloaderError, NotFound
from dataloader.jobs.visible import visible

FAILED: Final = 1
WRONG_USE: Final = 2
NOT_SUCCEEDED: Final = 3
NOT_FOUND: Final = 4
INTERRUPTED: Final = 130

_FILES: Final = MappingProxyType(
    {
        "serve": "service",
        "demo": "demo.command",
        "etl": "etl",
        "trigger": "jobs",
        "status": "jobs",
        "jobs": "jobs",
        "events": "jobs",
        "logs": "jobs",
        "cancel": "job_changes",
        "retry": "job_changes",
        "run-now": "job_changes",
        "priority": "job_changes",
        "bulk": "bulk",
        "errors": "failures",
        "duplicates": "duplicates",
        "audit": "job_changes",
        "queues": "queues",
        "pause": "queues",
        "resume": "queues",
        "workers": "queues",
        "task": "task_limits",
        "supplier": "suppliers",
        "schedule": "schedules",
        "process": "processes",
        "stats": "stats",
        "tasks": "service",
        "config": "service",
        "migrate": "database",
        "psql": "database",
        "backup": "backup",
        "restore": "backup",
    }
)
"""All commands, in the order of the help, with their file in this folder."""
_ALSO_MEANT: Final = MappingProxyType({"job": "jobs, or status for a single job"})
"""Commands with a similar meaning, if another command has more similar letters."""


class Interrupted(Exception):  # noqa: N818 - like KeyboardInterrupt
    """^C, or a signal with the same effect, while a command ran."""


class Group(click.Group):
    """Group that suggests similar commands if a command does not exist."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve the command like click, with a suggestion."""
        near = difflib.get_close_matches(args[0], self.list_commands(ctx), 2)
        if near and near[0] != args[0]:
            meant = _ALSO_MEANT.get(args[0], " or ".join(near))
            ctx.fail(f"there is no command {args[0]!r}; did you mean {meant}?")
        return super().resolve_command(ctx, args)


class _Commands(Group):
    """Imports a command's file when the command is called."""

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke like click, which would write an empty line for an interrupt, also to a log."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:
            if sys.stderr.isatty():
                click.echo(err=True)  # below the ^C
            raise Interrupted from interrupt

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names, in the order of their first use."""
        del ctx
        return list(_FILES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with this name. The function of `run-now` is `run_now_command`."""
        del ctx
        if cmd_name not in _FILES:
            return None
        file = importlib.import_module(f"dataloader.cli.{_FILES[cmd_name]}")
        command: click.Command = getattr(file, f"{cmd_name.replace('-', '_')}_command")
        return command


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="dataloader-supervisor", prog_name="dataloader", message="%(prog)s %(version)s")
def cli() -> None:
    """Durable jobs and ETL from a queue in PostgreSQL, in one process.

    Commands use the database of DL_DB_DSN, the embedded one of the data directory, or a running service (--url).
    """


def run_command_line(arguments: Sequence[str] | None = None) -> int:
    """Run one command to its end and return the exit code. `arguments` are the process's own by default."""
    try:
        code = cli.main(arguments, prog_name="dataloader", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort as abort:  # ^C as passed on by click, or a `no` to a question
        return INTERRUPTED if isinstance(abort.__cause__, KeyboardInterrupt) else FAILED
    except Interrupted:
        return INTERRUPTED
    except (Exception, BaseExceptionGroup, KeyboardInterrupt) as error:
        # Trio's nurseries and both clients wrap errors in groups.
        errors = list(single_errors(error))
        if any(isinstance(single, KeyboardInterrupt) for single in errors):
            return INTERRUPTED
        if not all(isinstance(single, DataloaderError) for single in errors):
            raise
        code = max(report(single) for single in errors)
        if any(isinstance(single, ConfigError) for single in errors):
            _point_out_unknown_variables()
        return code
    return code if isinstance(code, int) else 0


def report(error: BaseException) -> int:
    """Print the error to stderr and return its exit code."""
    for line in str(error).splitlines():
        click.echo(visible(line), err=True)
    match error:
        case ConfigError() | AccessDenied() | BadRequest():
            return WRONG_USE
        case NotFound():
            return NOT_FOUND
        case _:
            return FAILED


def _point_out_unknown_variables() -> None:
    """Print unknown variables: if a setting is wrong or missing, the name of another may be mistyped."""
    from dataloader.supervisor.settings_layers import unknown_variables  # noqa: PLC0415

    with contextlib.suppress(ConfigError):  # an unreadable file was already reported
        for sentence in unknown_variables():
            click.echo(sentence, err=True)
