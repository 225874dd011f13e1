"""Runs a command with a notice on its standard input, without a shell and without our secrets in its environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from typing import Final

import msgspec
import trio

from dataloader.jobs.notices import CommandTarget, Notice
from dataloader.jobs.outcomes import GiveUp
from dataloader.jobs.secrets.masking import mask_text
from dataloader.jobs.text import storable_text

MAX_SAID: Final = 2_000
"""Maximum bytes of the command's stderr that are kept for the error."""
LAST_WORDS_S: Final = 0.5
"""Seconds to wait for the rest of the command's stderr after it has ended."""
END_S: Final = 5.0
"""Seconds within which a killed command must end."""
_OURS: Final = ("DL_", "WORKERS_JSON")
"""Prefixes of our settings, which include tokens and passwords."""


class CommandFailed(Exception):  # noqa: N818 - the command's result
    """The command failed. The notice is sent again."""


async def run_command(target: CommandTarget, notice: Notice) -> GiveUp | None:
    """Run the target's command. Raises `CommandFailed` if it exits with a code other than 0, or not in time."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    try:
        # A separate session, so that its child processes can be killed with it.
        process = await trio.lowlevel.open_process(
            list(target.argv),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
            env=environment,
        )
    except (OSError, ValueError) as error:
        return GiveUp(f"the command {target.name} cannot be started: {type(error).__name__}")
    said = bytearray()
    try:
        with trio.move_on_after(target.timeout_s) as limit:
            code = await _finish(process, msgspec.json.encode(notice), said)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with trio.move_on_after(END_S, shield=True):
                await process.wait()
    if limit.cancelled_caught:
        raise CommandFailed(f"the command {target.name} did not end within {target.timeout_s:g} s, and was killed")
    if code:
        text = storable_text(mask_text(said.decode(errors="replace")), MAX_SAID).strip()
        raise CommandFailed(f"the command {target.name} ended with {code}: {text}".rstrip(": "))
    return None


async def _finish(process: trio.Process, data: bytes, said: bytearray) -> int:
    """Return the command's exit code. Do not wait for child processes that it has left, which may keep stderr open."""
    async with trio.open_nursery() as nursery:
        if process.stdin is not None:
            nursery.start_soon(_write, process.stdin, data)
        is_read = trio.Event()
        if process.stderr is not None:
            nursery.start_soon(_read_stderr, process.stderr, said, is_read)
        code = await process.wait()
        with trio.move_on_after(LAST_WORDS_S):
            await is_read.wait()
        nursery.cancel_scope.cancel()
    return code


async def _write(stdin: trio.abc.SendStream, data: bytes) -> None:
    # The command may end without reading its input.
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        async with stdin:
            await stdin.send_all(data)


async def _read_stderr(stderr: trio.abc.ReceiveStream, said: bytearray, is_read: trio.Event) -> None:
    async with stderr:
        async for chunk in stderr:
            said += chunk[: MAX_SAID - len(said)]
    is_read.set()
