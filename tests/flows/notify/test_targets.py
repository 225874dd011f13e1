"""Webhooks and commands that are notified of failures (S6): a real server, real programs."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pytest
import trio
from conditions import patience_s

from dataloader.flows.notify import command
from dataloader.flows.notify.command import CommandFailed, run_command
from dataloader.flows.notify.webhook import NotTaken, send
from dataloader.flows.signed_post import MAX_ANSWER, signature
from dataloader.jobs.ids import uuid7
from dataloader.jobs.notices import CommandTarget, Notice, WebhookTarget
from dataloader.jobs.outcomes import GiveUp

pytestmark = pytest.mark.requirement("S6")

SECRET = "a secret of the webhook"
NOTICE = Notice(
    kind="failed", name="load.year", queue="q", group="HTTP #", error="HTTP 503", times=3,
    first_at=datetime(2026, 3, 1, tzinfo=UTC), last_at=datetime(2026, 3, 1, 1, tzinfo=UTC), told_before_at=None,
    job_ids=(uuid7(),),
)  # fmt: skip


@asynccontextmanager
async def open_hook(answer):
    """Run an HTTP server that answers each request with these bytes; yield its address, and its requests."""
    requests = []

    async def serve(stream):
        data = b""
        async for chunk in stream:
            data += chunk
            head, end, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head.lower())
            if end and length and len(body) == int(length[1]):
                break
        lines = head.decode().split("\r\n")
        requests.append((lines[0], dict(line.lower().split(": ", 1) for line in lines[1:]), lines, body))
        with trio.move_on_after(30):
            for part in answer if isinstance(answer, list) else [answer]:
                if part is None:
                    await trio.sleep_forever()
                await stream.send_all(part)

    async with trio.open_nursery() as nursery:
        [listener] = await nursery.start(partial(trio.serve_tcp, serve, 0, host="127.0.0.1"))
        port = listener.socket.getsockname()[1]
        yield f"http://127.0.0.1:{port}/hooks/very-secret-path", requests
        nursery.cancel_scope.cancel()


def answered(status, headers="", body=b""):
    return f"HTTP/1.1 {status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n{headers}\r\n".encode() + body


async def test_a_webhook_gets_signed_json():
    delivery = uuid7()
    async with open_hook(answered(204)) as (url, requests):
        assert await send(WebhookTarget(name="ops", url=url, secret=SECRET), NOTICE, delivery=delivery) is None
    [(first, headers, lines, body)] = requests
    assert first == "POST /hooks/very-secret-path HTTP/1.1"
    assert headers["content-type"] == "application/json"
    assert headers["x-dataloader-delivery"] == str(delivery)
    stamp = headers["x-dataloader-timestamp"]
    assert abs(int(stamp) - datetime.now(UTC).timestamp()) < 60
    assert headers["x-dataloader-signature"] == signature(SECRET, stamp, body)
    assert headers["x-dataloader-signature"] != signature(SECRET, str(int(stamp) + 1), body)
    assert json.loads(body) == {
        "kind": "failed", "name": "load.year", "queue": "q", "group": "HTTP #", "error": "HTTP 503", "times": 3,
        "first_at": "2026-03-01T00:00:00Z", "last_at": "2026-03-01T01:00:00Z", "told_before_at": None,
        "job_ids": [str(NOTICE.job_ids[0])],
    }  # fmt: skip
    assert SECRET not in "\n".join(lines)


async def test_a_transient_webhook_error_is_retried_and_a_permanent_one_is_not():
    elsewhere = "Location: http://127.0.0.1:1/\r\n"
    for answer, again in (
        (answered(500, body=b"password=sesame down"), True),
        (answered(429), True),
        (answered(302, elsewhere), False),
        (answered(401), False),
        (b"nonsense\r\n\r\n", True),
    ):
        async with open_hook(answer) as (url, requests):
            target = WebhookTarget(name="ops", url=url, secret=SECRET)
            if again:
                with pytest.raises(NotTaken) as error:
                    await send(target, NOTICE, delivery=uuid7())
                said = str(error.value)
                assert error.value.__suppress_context__ or error.value.__context__ is None
            else:
                given_up = await send(target, NOTICE, delivery=uuid7())
                assert isinstance(given_up, GiveUp)
                said = given_up.reason
            assert len(requests) == 1  # no redirect is followed
            assert "ops" in said
            assert not any(secret in said for secret in ("sesame", "very-secret", SECRET))


@pytest.mark.parametrize("cut", [0, MAX_ANSWER - 20])
async def test_an_error_hides_the_address_and_signature_that_a_receiver_repeats(cut):
    async with open_hook([None]) as (url, _requests):
        path = url.partition("127.0.0.1")[2].partition("/")[2]
    body = f"{'x' * cut}Cannot POST /{path}?token=quietriverlamp".encode()
    async with open_hook(answered(404, body=body)) as (url, requests):
        given_up = await send(
            WebhookTarget(name="ops", url=f"{url}?token=quietriverlamp", secret=SECRET), NOTICE, delivery=uuid7()
        )
    assert len(requests) == 1
    assert "status 404" in given_up.reason or "404" in given_up.reason
    assert not any(part in given_up.reason for part in ("very", "quietriver"))


@pytest.mark.slow
async def test_an_endless_answer_is_read_to_its_bound_and_a_silent_webhook_to_its_deadline():
    head = b"HTTP/1.1 500 X\r\nContent-Length: 100000000\r\n\r\n"
    for answer, match in (([head, b"x" * 100_000, None], "returned 500: xxx"), ([None], "did not answer within 1 s")):
        async with open_hook(answer) as (url, _):
            target = WebhookTarget(name="ops", url=url, secret=SECRET)
            with trio.fail_after(patience_s()), pytest.raises(NotTaken, match=match) as error:
                await send(target, NOTICE, delivery=uuid7(), timeout_s=1.0)
            assert len(str(error.value)) < MAX_ANSWER + 100


def python(code, **more):
    return CommandTarget(name="page", argv=(sys.executable, "-c", code), **more)


async def test_a_command_gets_json_on_stdin_and_no_secret_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("DL_TOKENS", "sesame")
    monkeypatch.setenv("PLAIN", "yes")
    out = tmp_path / "out"
    code = f"import os, sys; open({str(out)!r}, 'w').write(sys.stdin.read() + repr(dict(os.environ)))"
    assert await run_command(python(code), NOTICE) is None
    text = out.read_text()
    assert json.loads(text.partition("}")[0] + "}")["times"] == 3
    assert "'PLAIN': 'yes'" in text
    assert "sesame" not in text


async def test_a_command_that_does_not_read_or_exits_badly_or_is_not_there_says_so():
    assert await run_command(python("pass"), NOTICE) is None
    with pytest.raises(CommandFailed, match=r"page ended with 3: .*no pager") as error:
        await run_command(
            python("import sys; sys.stderr.write('password=sesame no pager' + 'x' * 9000); sys.exit(3)"), NOTICE
        )
    assert "sesame" not in str(error.value)
    assert len(str(error.value)) < command.MAX_SAID + 100
    given_up = await run_command(CommandTarget(name="page", argv=("/no/such/program",)), NOTICE)
    assert isinstance(given_up, GiveUp)


@pytest.mark.slow
async def test_a_command_that_hangs_is_killed_with_all_that_it_has_started(tmp_path):
    pids = tmp_path / "pids"
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    with trio.fail_after(patience_s()), pytest.raises(CommandFailed, match="did not end within 3 s"):
        await run_command(python(code, timeout_s=3), NOTICE)
    for pid in map(int, pids.read_text().split()):
        with trio.fail_after(patience_s()):
            while is_alive(pid):  # noqa: ASYNC110 - not a child of this process, so it has no event
                await trio.sleep(0.02)


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.slow
async def test_processes_left_by_a_command_are_not_awaited(tmp_path):
    pids = tmp_path / "pid"
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pids)!r}, 'w').write(str(child.pid))"
    )
    with trio.fail_after(patience_s()):
        assert await run_command(python(code, timeout_s=25), NOTICE) is None
    os.kill(int(pids.read_text()), signal.SIGKILL)
