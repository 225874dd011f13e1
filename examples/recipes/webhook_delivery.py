"""Webhooks to customers: one job for each delivery, signed, tried again for days, one at a time to each address.

dataloader serve --tasks webhook_delivery:tasks
dataloader trigger webhook.deliver --url http://127.0.0.1:8080 --wait \\
    --args '{"url": "https://example.org/hook", "event": "order.paid", "data": {"order": 7}}'   # from another terminal
"""

import hashlib
import hmac
import json
import os
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import httpx2

from dataloader import GiveUp, Job, Retry, RetryPolicy, Tasks, Transaction

SECRET = os.environ.get("WEBHOOK_SECRET", "not yet a secret").encode()
TRY_AGAIN = {408, 425, 429, 500, 502, 503, 504}

tasks = Tasks()


@attrs.frozen
class Delivery:
    url: str
    event: str
    data: dict[str, Any]


@tasks.resource
@asynccontextmanager
async def client() -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(timeout=15, follow_redirects=False) as opened:
        yield opened


@tasks.task(
    "webhook.deliver",
    args=Delivery,
    queue="webhooks",
    lock_key="webhook:{url}",  # a slow customer uses one slot only
    max_attempts=12,
    retry=RetryPolicy(base_s=10, factor=3, cap_s=12 * 3_600),
    timeout_s=30,
)
async def deliver(job: Job[Delivery]) -> int | Retry | GiveUp:
    body = json.dumps({"event": job.args.event, "data": job.args.data}).encode()
    sent_at = str(int(time.time()))
    headers = {
        "Content-Type": "application/json",
        "X-Delivery": str(job.job_id),  # the same in each attempt: the receiver ignores repetitions
        "X-Timestamp": sent_at,
        "X-Signature": hmac.new(SECRET, sent_at.encode() + b"." + body, hashlib.sha256).hexdigest(),
    }
    answer = await job.resource(client).post(job.args.url, content=body, headers=headers)
    if answer.is_success:
        return answer.status_code
    if answer.status_code not in TRY_AGAIN:
        return GiveUp(f"HTTP {answer.status_code}: {answer.text[:200]}")
    wait = answer.headers.get("Retry-After", "")
    if wait.isdecimal():
        return Retry(after_s=min(int(wait), 86_400), reason=f"HTTP {answer.status_code}, asked to wait")
    answer.raise_for_status()  # the retry policy decides
    return answer.status_code


async def publish(transaction: Transaction, urls: Iterable[str], event: str, data: dict[str, Any]) -> None:
    """Send an event to all customers when this transaction commits."""
    for url in urls:
        await transaction.enqueue(deliver, Delivery(url, event, data))
