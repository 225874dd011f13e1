"""Buckets as a source: with a server that implements S3's protocol on a socket (moto's), and one that misbehaves."""

from __future__ import annotations

import gzip
import json
import logging
import subprocess
import sys
import time
from datetime import UTC, datetime

import httpx2
import pytest
import trio
from etl_tasks import item
from source_app import Answer
from walking import ask, records, requests, walk

boto3 = pytest.importorskip("boto3", reason="the extra s3 is not installed")
moto_server = pytest.importorskip(
    "moto.server", reason="moto[s3] and flask-cors, which serve S3 here, are not installed"
)

from dataloader.flows.etl import Load, RateLimit, Table  # noqa: E402 - after its requirement
from dataloader.flows.etl.formats.csv_format import Csv  # noqa: E402
from dataloader.flows.etl.formats.json_format import JsonLines  # noqa: E402
from dataloader.flows.etl.formats.packed_format import Compressed  # noqa: E402
from dataloader.flows.etl.sources.s3 import S3  # noqa: E402
from dataloader.flows.etl.sources.source import Request, SourceError, Window  # noqa: E402 - after its requirement

pytestmark = pytest.mark.requirement("S7")

CSV = Csv(columns=["n"])
SECRET = "s3cr3t/k3y/of/the/bucket"
KEYS = {"region_name": "us-east-1", "aws_access_key_id": "AKIATEST", "aws_secret_access_key": SECRET}


@pytest.fixture(scope="module")
def server():
    """Return the address of moto's server."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    served = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    served.start()
    host, port = served.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        served.stop()


@pytest.fixture
def bucket(server):
    """Create a bucket for the test; return its name, and a client to fill it."""
    name = f"bucket-{time.monotonic_ns()}"
    client = boto3.session.Session().client("s3", endpoint_url=server, **KEYS)
    client.create_bucket(Bucket=name)
    yield name, client
    client.close()


@pytest.fixture
def options(server):
    return {"endpoint_url": server, **KEYS}


@pytest.mark.slow
async def test_each_object_below_the_prefix_is_read_by_name(bucket, options):
    name, client = bucket
    for key in ("in/b.csv", "in/a.csv", "in/c.txt", "out/d.csv", "in/folder.csv/"):
        client.put_object(Bucket=name, Key=key, Body=f"{key}\n".encode())
    source = S3(name, "in/", format=CSV, pattern="*.csv", options=options)
    assert records(await walk(source)) == [
        {"n": "in/a.csv", "source_file": "in/a.csv"},
        {"n": "in/b.csv", "source_file": "in/b.csv"},
    ]
    assert (source.name, source.needs_answer) == (None, False)
    response = await ask(source)
    assert response.url == f"s3://{name}/in/a.csv"


@pytest.mark.slow
async def test_a_list_of_more_than_a_page_is_whole(bucket, options):
    name, client = bucket
    for number in range(25):
        client.put_object(Bucket=name, Key=f"{number:02}.csv", Body=b"1\n")
    source = S3(name, format=CSV, options=options)

    def small(params, **_rest):
        """Answer like a service with shorter pages."""
        params["MaxKeys"] = 10

    with trio.fail_after(60):
        async with source.open() as connection:
            connection.client.meta.events.register("provide-client-params.s3.ListObjectsV2", small)
            names, following, pages = [], "", 0
            while following is not None:
                page, following = await connection.names(following, 60)
                names += page
                pages += 1
    assert names == [f"{number:02}.csv" for number in range(25)]
    assert pages == 3


@pytest.mark.slow
async def test_only_the_objects_of_the_window_are_read(bucket, options):
    name, client = bucket
    for key in ("y=2024/a.csv", "y=2025/a.csv", "notes.csv"):
        client.put_object(Bucket=name, Key=key, Body=b"1\n")
    source = S3(name, format=CSV, window_of=r"y=(?P<year>\d{4})/", record_source=False, options=options)
    window = Window(datetime(2025, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC))
    assert [one.endpoint for one in await requests(source, window)] == ["y=2025/a.csv"]
    assert records(await walk(source, window)) == [{"n": "1"}]


@pytest.mark.slow
async def test_names_of_any_kind_and_packed_objects_are_read(bucket, options):
    name, client = bucket
    keys = ["a b+c&d=é/ü%20.jsonl", "z.jsonl"]
    for number, key in enumerate(keys):
        client.put_object(Bucket=name, Key=key, Body=gzip.compress(b'{"id": %d}\n' % number))
    found = records(await walk(S3(name, format=Compressed(JsonLines()), options=options)))
    assert found == [{"id": number, "source_file": key} for number, key in enumerate(keys)]


@pytest.mark.slow
async def test_an_object_of_many_pieces_is_whole_and_one_above_the_bound_refused(bucket, options):
    name, client = bucket
    body = b"".join(b"%d\n" % number for number in range(300_000))
    client.put_object(Bucket=name, Key="a.csv", Body=body)
    assert (await ask(S3(name, format=CSV, options=options))).body == body
    with pytest.raises(SourceError, match="has more than the limit of 1,000,000 bytes") as caught:
        await ask(S3(name, format=CSV, max_body_bytes=1_000_000, options=options))
    assert not caught.value.is_retryable


@pytest.mark.slow
async def test_a_missing_object_or_bucket_is_not_retried(bucket, options):
    name, _client = bucket
    with pytest.raises(SourceError, match=rf"s3://{name}/a\.csv: .* \(NoSuchKey\)") as caught:
        await ask(S3(name, format=CSV, options=options), Request(endpoint="a.csv"))
    assert (caught.value.status, caught.value.is_retryable) == (404, False)
    with pytest.raises(SourceError, match="NoSuchBucket"):
        await requests(S3("no-such-bucket", format=CSV, options=options))
    assert await requests(S3(name, format=CSV, options=options)) == []


@pytest.fixture
def checked(bucket, options):
    """Return options with keys that may read; during the test, the server checks every signature."""
    name, client = bucket
    client.put_object(Bucket=name, Key="a.csv", Body=b"1\n")
    iam = boto3.session.Session().client("iam", **options)
    iam.create_user(UserName=name)
    allowed = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName=name, PolicyName="all", PolicyDocument=json.dumps(allowed))
    key = iam.create_access_key(UserName=name)["AccessKey"]
    iam.close()
    keys = {"aws_access_key_id": key["AccessKeyId"], "aws_secret_access_key": key["SecretAccessKey"]}
    checking = f"{options['endpoint_url']}/moto-api/reset-auth"
    httpx2.post(checking, content=b"0")
    yield {**options, **keys}
    httpx2.post(checking, content=b"inf")


@pytest.mark.slow
async def test_a_signature_that_is_not_right_is_refused(bucket, checked):
    name, _client = bucket
    assert len(records(await walk(S3(name, format=CSV, options=checked)))) == 1
    with pytest.raises(SourceError, match="SignatureDoesNotMatch") as caught:
        await walk(S3(name, format=CSV, options={**checked, "aws_secret_access_key": "wrong"}))
    assert (caught.value.status, caught.value.is_retryable) == (403, False)


# A server that misbehaves.


def misbehaving(service, **more) -> S3:
    service.put("/bucket/a.csv", Answer(b"1\n" * 1_000, "text/csv"))
    return S3("bucket", format=CSV, options={"endpoint_url": service.url, **KEYS}, **more)


OBJECT = Request(endpoint="a.csv")


def refusal(code: str) -> bytes:
    return f"<Error><Code>{code}</Code><Message>because {SECRET} is so</Message></Error>".encode()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "code", "is_retryable"),
    [
        (503, "SlowDown", True),
        (500, "InternalError", True),
        (429, "TooMany", True),
        (400, "RequestTimeout", True),
        (403, "AccessDenied", False),
        (400, "ExpiredToken", False),
    ],
)
async def test_a_refusal_passes_or_does_not_and_is_not_asked_again_from_here(service, status, code, is_retryable):
    service.misbehave(times=None, status=status, body=refusal(code), headers={"Retry-After": "7"})
    with pytest.raises(SourceError, match=rf"s3://bucket/a\.csv: because .* \({code}\)") as caught:
        await ask(misbehaving(service), OBJECT)
    assert (caught.value.status, caught.value.is_retryable, caught.value.retry_after_s) == (status, is_retryable, 7)
    assert SECRET not in str(caught.value)
    assert len(service.requests) == 1


async def test_an_object_that_is_cut_is_an_error_that_passes(service):
    service.misbehave(cut_at=500)
    with pytest.raises(SourceError, match=r"s3://bucket/a\.csv: ") as caught:
        await ask(misbehaving(service), OBJECT)
    assert caught.value.is_retryable


@pytest.mark.slow
async def test_an_object_received_byte_by_byte_has_one_deadline_for_all_of_it(service):
    service.misbehave(drip_s=0.05)
    with pytest.raises(SourceError, match=r"no complete answer within 0\.5 s|not read in time") as caught:
        await ask(misbehaving(service), OBJECT, timeout_s=0.5)
    assert caught.value.is_retryable


async def test_an_unreachable_server_is_a_retryable_error(service):
    source = S3("bucket", format=CSV, options={"endpoint_url": "http://127.0.0.1:9", **KEYS})
    with pytest.raises(SourceError, match="EndpointConnectionError") as caught:
        await ask(source, OBJECT)
    assert caught.value.is_retryable


FOLLOWED = "<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>"


def listed(seen) -> Answer:
    """Return the list of a bucket with two objects, in two pages."""
    name, followed = ("b", "") if "continuation-token" in seen.query else ("a", FOLLOWED)
    contents = f"<Contents><Key>{name}.jsonl</Key></Contents>"
    return Answer(f"<ListBucketResult>{followed}{contents}</ListBucketResult>".encode(), "application/xml")


@pytest.mark.slow
@pytest.mark.requirement("E1", "S4")
async def test_each_page_of_a_bucket_s_list_is_a_request_in_its_turn(items, outcome_of, raw, soon):
    service = items.service
    service.put("/bucket", listed)
    for number, name in enumerate("ab"):
        service.put(f"/bucket/{name}.jsonl", Answer(json.dumps(item(number)).encode()))
    service.misbehave("continuation-token", status=503, body=refusal("SlowDown"))
    source = S3("bucket", format=JsonLines(), name="shop", options={"endpoint_url": service.url, **KEYS})
    paused = {"rate_min": 0.15, "rate_max": 0.15}
    rate_limits = (RateLimit(1_000, 3_600),)
    load = Load("s3", source, Table("item", key="id"), pipeline=paused, rate_limits=rate_limits)
    outcome = await outcome_of(load)
    assert outcome.result["counts"].items() >= {"requests": 5, "inserted": 2, "segments": 2}.items()
    assert len(service.requests) == await raw.fetchval("SELECT count(*) FROM dl_source_calls") == 5
    assert min(service.pauses()) >= 0.15
    told = [(line.message, line.fields["endpoint"]) for line in outcome.log if line.message.startswith("request")]
    assert told.count(("request", "s3://bucket/")) == 2
    assert told.count(("request failed", "s3://bucket/")) == 1


@pytest.mark.requirement("Q16")
def test_a_source_shows_no_keys(service):
    assert SECRET not in repr(misbehaving(service))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"bucket": ""}, "bucket: must be a non-empty string, not ''"),
        ({"pattern": ""}, "pattern: must be .*, not ''"),
        ({"window_of": "x"}, "window_of: must be .*, not 'x'"),
        ({"max_body_bytes": -1}, "max_body_bytes: must be .*, not -1"),
    ],
)
def test_invalid_options_of_a_bucket_are_refused_at_the_declaration(options, error):
    with pytest.raises(ValueError, match=error):
        S3(**{"bucket": "b", "format": CSV, **options})


@pytest.mark.slow
def test_without_the_extra_the_error_says_what_to_install():
    program = "import sys; sys.modules['boto3'] = None; import dataloader.flows.etl.sources.s3"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: S3 needs the extra s3: pip install 'dataloader-supervisor[s3]'" in ended.stderr
