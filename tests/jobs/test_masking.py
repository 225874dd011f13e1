"""Secrets are never shown in our output, and texts without secrets stay readable (Q16)."""

import datetime as dt
import enum
import uuid
from decimal import Decimal
from pathlib import PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloader.jobs.secrets import secret_names
from dataloader.jobs.secrets.masking import mask, mask_text, names_a_secret

pytestmark = pytest.mark.requirement("Q16")

SECRET_NAMES = """
    password Password PASSWORD db_password PGPASSWORD userPassword password1 passwd pwd user_pwd passphrase
    token access_token accessToken AuthToken x-auth-token csrftoken tokens DL_TOKENS secret client_secret clientSecret
    clientsecret secret_value api_key apikey apiKey APIKey X-API-Key api_keys access_key private-key privateKey
    ssh.private.key signing_key_pem dsn DL_DB_DSN authorization Authorization Proxy-Authorization auth cookie Set-Cookie
    cookies credential credentials awsCredentials smtp_pass X-Amz-Signature sig api_key2 token_hash secret_id
    dbpass jwt session_id sessionId JSESSIONID PHPSESSID otp totp_code pin card_pin userPIN cvv passcode csrf
    client_key fernet_key rapidapi-key storage.key verification_code 2fa_code recovery_codes code_verifier
    accountkey bearer
""".split()  # noqa: SIM905

HARMLESS_NAMES = """
    lock_key lockKey partition_key partition-key idempotency_key idempotencyKey primary_key primary_keys
    foreign_key sort_key public_key object_key keyboard monkey hockey keys key_count keyed tokenizer token_count
    token_type expires_in secretary passenger_count bypass compass author authority cookie_policy queue task design
    signal trespass lock_key_hash user host dsn_count compassion 1 _ - code status_code currency_code security_code
    session session_count spinning shipping pinned pin_count opinion encode name value key key2
    customer_key date_key queue_key password_file secret_name credentials_path password_changed_at passwordless
    next_token nextPageToken fencing_token max_tokens_per_page
""".split()  # noqa: SIM905


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_a_value_under_a_secret_name_is_hidden(name: str) -> None:
    assert mask({"a": [{name: "hunter2-xyz"}]}) == {"a": [{name: "***"}]}
    assert mask_text(f"see {name}=hunter2-xyz now") == f"see {name}=*** now"
    assert mask_text(f'{{"{name}": "hunter2-xyz", "n": 1}}') == f'{{"{name}": "***", "n": 1}}'


def test_each_name_that_is_secret_by_its_words_is_found_in_a_text() -> None:
    names = {*secret_names._ALWAYS, *secret_names._AT_THE_END, *secret_names._ENDINGS, "pass", "password", "token"}
    names |= {f"{word}_{last}" for last, words in secret_names._SECRET_IF_OF.items() for word in words}
    assert {name for name in names if not names_a_secret(name)} == set()
    assert {name for name in names if mask_text(f"{name}=gZ7qT4") != f"{name}=***"} == set()


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_a_value_under_a_harmless_name_stays_readable(name: str) -> None:
    assert not names_a_secret(name)
    assert mask({name: "hunter2-xyz"}) == {name: "hunter2-xyz"}
    assert mask_text(f"see {name}=hunter2-xyz now") == f"see {name}=hunter2-xyz now"


TEXTS = [
    # URLs
    ("postgresql://bob:s3cr3t@db:5432/etl", "postgresql://***@db:5432/etl"),
    (
        "to postgres+asyncpg://bob:p%40ss@[::1]:5432/etl?x=1 failed",
        "to postgres+asyncpg://***@[::1]:5432/etl?x=1 failed",
    ),
    ("redis://:s3cr3t@cache/0", "redis://***@cache/0"),
    ("https://ghp_abc@github.com/a/b.git", "https://***@github.com/a/b.git"),
    ("postgres://bob:p@ss:w@db/etl", "postgres://***@db/etl"),
    ("postgres://bob:p/s?w#d@db/etl", "postgres://***@db/etl"),
    ("postgresql://bob@db/etl?password=s3cr3t&sslmode=require", "postgresql://***@db/etl?password=***&sslmode=require"),
    ("postgresql://u:p@h1:5432,h2:5433/db", "postgresql://***@h1:5432,h2:5433/db"),
    ("postgresql://h1:5432,h2:5433/db?user=a@b", "postgresql://h1:5432,h2:5433/db?user=a@b"),
    ("GET https://api.example/x?token=s3cr3t&page=2#top", "GET https://api.example/x?token=***&page=2#top"),
    ("https://b.s3/x?X-Amz-Signature=abc&X-Amz-Date=2026", "https://b.s3/x?X-Amz-Signature=***&X-Amz-Date=2026"),
    ("https://example.com/@bob/a", "https://example.com/@bob/a"),
    ("http://host:8080/mail/a@b.example", "http://host:8080/mail/a@b.example"),
    ("http://host:8080/x mailto:a@b.example", "http://host:8080/x mailto:a@b.example"),
    # HTTP headers
    ("Authorization: Bearer abc.def-ghi", "Authorization: ***"),
    ("authorization: Basic dXNlcjpwYXNz\r\nHost: x", "authorization: ***\r\nHost: x"),
    ("curl -H 'Authorization: Bearer abc' http://x/y", "curl -H 'Authorization: ***' http://x/y"),
    ("{'Authorization': 'Bearer abc', 'Accept': '*/*'}", "{'Authorization': '***', 'Accept': '*/*'}"),
    ("Cookie: a=1; session=s3cr3t\nAccept: x", "Cookie: ***\nAccept: x"),
    ("Authorization=Bearer s3cr3t now", "Authorization=*** now"),
    ("sent Bearer xyz to it", "sent Bearer *** to it"),
    ("sent Basic dXNlcjpwYXNz to it", "sent Basic *** to it"),
    ("a Bearer token is required", "a Bearer token is required"),
    ("Basic authentication and a basic course", "Basic authentication and a basic course"),
    # pairs
    ("host=db user=bob password=s3cr3t dbname=etl", "host=db user=bob password=*** dbname=etl"),
    ("host=db password = 's3 cr\\'3t' dbname=etl", "host=db password = '***' dbname=etl"),
    ("Server=db;Password=s3cr3t;Database=etl", "Server=db;Password=***;Database=etl"),
    ("Client(host='h', api_key='s3cr3t', n=1)", "Client(host='h', api_key='***', n=1)"),
    ("Client(token=b's3cr3t', n=1)", "Client(token=b'***', n=1)"),
    ("Client(token=Secret('s3cr3t'), n=1)", "Client(token=Secret('***'), n=1)"),
    ("Point(x=1,token=s3cr3t,y=2)", "Point(x=1,token=***,y=2)"),
    ("password=s3,cr3t and more", "password=*** and more"),
    ("(token=s3cr3t), then", "(token=***), then"),
    ("DETAIL: Key (token)=(s3cr3t) already exists.", "DETAIL: Key (token)=*** already exists."),
    ("DETAIL: Key (lock_key)=(ecb 2024) already exists.", "DETAIL: Key (lock_key)=(ecb 2024) already exists."),
    ("token => s3cr3t", "token => ***"),
    ("export PGPASSWORD=s3cr3t", "export PGPASSWORD=***"),
    (
        "Command '['mysqldump', '--password=s3cr3t', 'db']' failed",
        "Command '['mysqldump', '--password=***', 'db']' failed",
    ),
    ("tool --token=s3cr3t -Dpassword=s3cr3t --api-key s", "tool --token=*** -Dpassword=*** --api-key ***"),
    ("tool --password s3cr3t --lock-key ecb -token 's3 cr3t' x", "tool --password *** --lock-key ecb -token '***' x"),
    ("Command '['tool', '--password', 's3cr3t', 'db']'", "Command '['tool', '--password', '***', 'db']'"),
    ("tool --password --verbose; ['--token', '-v']", "tool --password --verbose; ['--token', '***']"),
    ("tool --lock-key=ecb", "tool --lock-key=ecb"),
    ('DL_TOKENS=[{"name":"ci","token":"a]b"}] x=1', "DL_TOKENS=*** x=1"),
    # JSON in texts, also cut off and nested
    ('{"password": "s3\\"cr3t", "n": 1}', '{"password": "***", "n": 1}'),
    ('{"password":12345,"n":1}', '{"password":***,"n":1}'),
    ('{"password": null, "token": true, "secret": ""}', '{"password": null, "token": true, "secret": ""}'),
    ('{"args": "{\\"password\\": \\"s3cr3t\\", \\"n\\": 1}"}', '{"args": "{\\"password\\": \\"***\\", \\"n\\": 1}"}'),
    ('{"credentials": {"user": "bob", "p": "}"}, "n": 1}', '{"credentials": ***, "n": 1}'),
    ('{"sql": "ALTER USER u; token=s3cr3t"}', '{"sql": "ALTER USER u; token=***"}'),
    ('{"password": "s3cr', '{"password": "***'),
    (
        "-----BEGIN RSA PRIVATE KEY-----\nMII-Eab\n-----END RSA PRIVATE KEY-----\nx",
        "-----BEGIN RSA PRIVATE KEY-----***-----END RSA PRIVATE KEY-----\nx",
    ),
    ("machine h login bob password s3cr3t", "machine h login bob password ***"),
    ("machine h password s3cr3t login bob", "machine h password *** login bob"),
    ("machine h\n  login bob\n  password s3cr3t\nmachine i", "machine h\n  login bob\n  password ***\nmachine i"),
    ("docker login -u bob -p s3cr3t registry", "docker login -u bob -p *** registry"),
    ("podman login r.example -p=s3cr3t", "podman login r.example -p=***"),
    ("docker login --password s3cr3t", "docker login --password ***"),
    ("user=bob pw=s3cr3t db_pw: s3cr3t, n=1", "user=bob pw=*** db_pw: ***, n=1"),
    ("plink -pw s3cr3t host", "plink -pw *** host"),
    ("db.example:5432:etl:bob:s3c\\:r3t", "db.example:5432:etl:bob:***"),
    ("*:*:*:bob:s3cr3t\nh:6432:*:ann:s3cr3t", "*:*:*:bob:***\nh:6432:*:ann:***"),
    (
        "Public-Lines: 1\nAAAA\nPrivate-Lines: 2\nAAAAB3Nz\nC1yc2E=\nPrivate-MAC: 1f2e",
        "Public-Lines: 1\nAAAA\nPrivate-Lines: 2***Private-MAC: 1f2e",
    ),
    # nothing to hide
    ("docker run -p 8080:80 image", "docker run -p 8080:80 image"),
    ("docker login failed: see -h", "docker login failed: see -h"),
    ("ecb:2024:eur:day:1 2001:5432:abcd", "ecb:2024:eur:day:1 2001:5432:abcd"),
    ("the login needs a password for bob", "the login needs a password for bob"),
    ("httpwatch=1 pwm=2", "httpwatch=1 pwm=2"),
    ("password authentication failed for user bob", "password authentication failed for user bob"),
    ("the key of the lock is held", "the key of the lock is held"),
    ("lock_key=ecb:2024 idempotency_key=a,b", "lock_key=ecb:2024 idempotency_key=a,b"),
    ("KeyError: 'queue'", "KeyError: 'queue'"),
    ("https://example.com:8443/a/b?page=1", "https://example.com:8443/a/b?page=1"),
    ("12:30:45 a=b, c: d", "12:30:45 a=b, c: d"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "shown"), TEXTS)
def test_secrets_inside_a_text_are_hidden_and_the_rest_is_not(text: str, shown: str) -> None:
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


class Colour(enum.StrEnum):
    RED = "red"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class Login:
    def __repr__(self) -> str:
        return "Login(user='bob', password='s3cr3t')"


def test_masked_values_are_plain_data() -> None:
    job_id = uuid.uuid4()
    value = {
        1: (1, 2.5, None, True),
        b"token": b"s3cr3t",
        "raw": b"token=s3cr3t \xff",
        "at": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "id": job_id,
        "amount": Decimal("1.10"),
        "path": PurePosixPath("/tmp/x"),
        "colour": Colour.RED,
        "login": Login(),
        "broken": Broken(),
        "error": ValueError("password=s3cr3t"),
        "postgres://u:p@h": {"x"},
    }
    assert mask(value) == {
        "1": [1, 2.5, None, True],
        "token": "***",
        "raw": "token=*** \\xff",
        "at": "2026-01-02T00:00:00+00:00",
        "id": str(job_id),
        "amount": "1.10",
        "path": "/tmp/x",
        "colour": "red",
        "login": "Login(user='bob', password='***')",
        "broken": "<unprintable Broken: RuntimeError>",
        "error": "ValueError('password=***')",
        "postgres://***@h": ["x"],
    }


def test_the_argument_after_a_secret_option_is_hidden() -> None:
    command = ["tool", "--user", "bob", "--password", "s3cr3t", "--token", "--lock-key", "ecb", "-pwd", 7]
    assert mask(command) == ["tool", "--user", "bob", "--password", "***", "--token", "--lock-key", "ecb", "-pwd", 7]


NAMED_BESIDE = [
    ({"name": "DB_PASSWORD", "value": "s3cr3t"}, {"name": "DB_PASSWORD", "value": "***"}),
    ({"value": 1234, "Name": "pin"}, {"value": "***", "Name": "pin"}),
    ({"key": "api_key", "value": "s3cr3t"}, {"key": "api_key", "value": "***"}),
    ({"headerName": "X-Api-Key", "values": ["a", "b"]}, {"headerName": "X-Api-Key", "values": "***"}),
    ({"name": "DB_PASSWORD", "value": None}, {"name": "DB_PASSWORD", "value": None}),
    ({"name": "API key", "value": "s3cr3t"}, {"name": "API key", "value": "***"}),
    ({"key": "EUR_USD"}, {"key": "EUR_USD"}),
    ({"key": "aB3dE6gH9jK2mN5pQ8sT"}, {"key": "***"}),
    ({"key": 7, "value": 1}, {"key": 7, "value": 1}),
    ({"max_tokens": 4096, "tokens": "1,200", "pins": 17}, {"max_tokens": 4096, "tokens": "1,200", "pins": "***"}),
    ({"api_tokens": ["a"], "tokens": "abc"}, {"api_tokens": "***", "tokens": "***"}),
    (["tool", "--max-tokens", "4096", "--token", "4096"], ["tool", "--max-tokens", "4096", "--token", "***"]),
    (["tokens", 1200], ["tokens", 1200]),
    ({"key": "color", "value": "red"}, {"key": "color", "value": "red"}),
    ({"name": "token_count", "value": 5}, {"name": "token_count", "value": 5}),
    (["X-Api-Key", "s3cr3t"], ["X-Api-Key", "***"]),
    ([("pin", 1234), ("host", "h")], [["pin", "***"], ["host", "h"]]),
    ([(b"authorization", b"s3cr3t")], [["authorization", "***"]]),
    ([["token", None], ["cookie", ["a", "b"]]], [["token", None], ["cookie", "***"]]),
    (["token", "amount", "day"], ["token", "amount", "day"]),
    (["key", "value"], ["key", "value"]),
    (["a token of mine", "b"], ["a token of mine", "b"]),
]


@pytest.mark.parametrize(("value", "shown"), NAMED_BESIDE)
def test_a_value_whose_name_stands_beside_it_is_hidden(value: object, shown: object) -> None:
    assert mask(value) == shown
    assert mask(shown) == shown
    assert mask({"deep": [value]}) == {"deep": [shown]}


def test_names_that_differ_in_their_secrets_alone_both_stay() -> None:
    shown = mask({"token=a": 1, "token=b": 2, "token=c": 3})
    assert shown == {"token=***": 1, "token=*** (2)": 2, "token=*** (3)": 3}


def test_the_original_is_left_alone() -> None:
    value = {"password": "s3cr3t", "list": [{"token": "t"}]}
    mask(value)
    assert value == {"password": "s3cr3t", "list": [{"token": "t"}]}


def test_whether_there_is_a_secret_may_be_seen() -> None:
    assert mask({"password": None, "token": True, "secret": 0}) == {"password": None, "token": True, "secret": "***"}


def test_depth_is_bounded_and_a_cycle_ends() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert "…" in str(mask(loop))
    deep: dict[str, object] = {"password": "s3cr3t"}
    for _ in range(10_000):
        deep = {"d": deep}
    assert "s3cr3t" not in str(mask(deep))


@given(
    st.recursive(
        st.none() | st.integers() | st.floats() | st.text() | st.binary(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
        max_leaves=8,
    )
)
@settings(max_examples=50)
def test_anything_can_be_masked(value: object) -> None:
    mask(value)


@given(st.text(alphabet="ab\"'\\=:,;()[]{}@/ \n"), st.sampled_from(["{} ", "x {}, ", "({}) ", '"{}" ']))
def test_a_secret_never_survives_what_stands_around_it(noise: str, frame: str) -> None:
    text = noise + "\n" + frame.format("password=s3cr3t")
    assert "s3cr3t" not in mask_text(text)
