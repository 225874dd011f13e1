"""Marks of a secret in a text, and texts that only resemble one: a table of both (Q16)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from dataloader.jobs.secrets.masking import mask, mask_text
from dataloader.jobs.secrets.secrets_in_text import secrets_in
from dataloader.jobs.secrets.token_formats import FORMATS

pytestmark = pytest.mark.requirement("Q16")

S = "Kn4ry-hunter2"
"""The secret in each text."""
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NSJ9.dBjftJeZ4CVPmB92K27uhbUJU1p1r"
ALNUM = "aB3dE6gH9jK2mN5pQ8sT1vW4xY7zA0cD3fG6hJ9kL2nP5rS8tU1wX4yZ7bC0eF3gH6jK9mN2pQ5sT8vW1xY4zA7cD0fG3hJ6kL9nP2rS5"
HEX = "0123456789abcdef" * 8
UPPER = "A1B2C3D4E5F6G7H8J9K0L1M2N3P4Q5R6S7T8U9V0W1X2Y3Z4A5B6C7D8E9F0"

# A text in which {} is a secret, and nothing else is.
PAIRS = [
    # names
    "session_id={}",
    "sessionId: {}",
    "JSESSIONID={}",
    "phpsessid={}; lang=en",
    "otp={}",
    "totp: {}",
    "otp_code={} sent",
    "pin={}",
    "PIN: {}",
    "card_pin={}, tries=3",
    "userPin={}",
    "cvv={}",
    "passcode={}",
    "the password: {}, not the one before",
    "csrf={}",
    "code_verifier={}",
    "client_assertion={}",
    "verification_code={}",
    "recovery-codes: {}",
    "2fa_code={}",
    "bearer={}",
    "accountkey={}",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};EndpointSuffix=core.windows.net",
    "Endpoint=sb://a.example/;SharedAccessKeyName=Root;SharedAccessKey={}",
    "//registry.example/:_authToken={}",
    'os.environ["DB_PASSWORD"] = "{}"',
    "headers['X-Api-Key'] = '{}'",
    'if password == "{}":',
    # URLs
    "GET /callback?code={}&state=5",
    "https://h.example/callback?state=5&code={}",
    "https://h.example/#code={}",
    "GET /login?pin={}&page=2",
    "https:\\/\\/{}@h.example\\/a",
    # encoded, once and twice
    "password%3D{}%26page%3D2",
    "q=a%26password%3D{}",
    "%22password%22%3A%22{}%22",
    "%7B%22api_key%22%3A%20%22{}%22%2C%22n%22%3A1%7D",
    "token%253D{}%2526page%253D2",
    "postgresql%3A%2F%2F{}%40db%2Fetl",
    "&quot;password&quot;:&quot;{}&quot;",
    "password&#61;{}&amp;page=2",
    "https://h.example/a?page=2&amp;token={}",
    '"\\u0022password\\u0022:\\u0022{}\\u0022"',
    "?token\\u003d{}\\u0026page=2",
    '"line\\napi_key={}"',
    "a\\tpin={} b",
    # objects of a name and a value
    '{"name": "DB_PASSWORD", "value": "{}"}',
    '{"Name":"X-Api-Key","Value":"{}"}',
    '{"key": "password", "value": "{}", "enabled": true}',
    '{"value": "{}", "name": "client_secret"}',
    "{'name': 'token', 'value': '{}'}",
    '[{"name": "HOST", "value": "db"}, {"name": "PGPASSWORD", "value": "{}"}]',
    '{\\"name\\": \\"DB_PASSWORD\\", \\"value\\": \\"{}\\"}',
    "- name: DB_PASSWORD\n  value: {}\n- name: HOST\n  value: db",
    "name=API_TOKEN value={}",
    '<add key="ApiKey" value="{}"/>',
    '<input type="hidden" name="csrf_token" value="{}">',
    '<meta name="csrf-token" content="{}">',
    # lists of a name and a value
    '["X-Api-Key", "{}"]',
    "('password', '{}')",
    "[(b'authorization', b'{}'), (b'host', b'h')]",
    '[["Accept","*/*"],["Cookie","{}"]]',
    '[\\"X-Auth-Token\\", \\"{}\\"]',
    "dict_items([('user', 'bob'), ('api_key', '{}')])",
    # XML
    "<password>{}</password>",
    "<user>bob</user><Password>{}</Password>",
    '<wsse:Password Type="text">{}</wsse:Password>',
    "<api-key>{}</api-key>",
    '<string name="api_key">{}</string>',
    '<entry key="db.password">{}</entry>',
    "<key>Password</key><string>{}</string>",
    "<header><name>X-Api-Key</name>\n  <value>{}</value></header>",
    '<user name="bob" password="{}"/>',
    "&lt;password&gt;{}&lt;/password&gt;",
    "<a:secretKey>{}</a:secretKey>",
    # SQL
    "CREATE ROLE bob LOGIN PASSWORD '{}' CREATEDB",
    "ALTER USER 'bob'@'%' IDENTIFIED BY '{}'",
    "CREATE SECRET s (TYPE s3, SECRET '{}')",
    # headers, options, keys
    "X-Csrf-Token: {}",
    "tool --pin {} --verbose",
    "-----BEGIN OPENSSH PRIVATE KEY-----{}-----END OPENSSH PRIVATE KEY-----",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----{}-----END PGP PRIVATE KEY BLOCK-----",
    # words before a bare name
    "API key: {}",
    "the access key: {}",
    "secret key = {}",
    "verification code: {}",
    # clouds, stores, formats
    "fs.azure.account.key.a.dfs.core.windows.net={}",
    "SharedAccessSignature sr=x&sig={}&se=1",
    "https://a.blob.example/x?sv=2024&sig={}&se=2026",
    "https://s3.example/b?X-Amz-Signature={}&X-Amz-Date=5",
    "X-Amz-Security-Token={}&x=1",
    "Ocp-Apim-Subscription-Key: {}",
    "x-functions-key: {}",
    "X-RapidAPI-Key: {}",
    "?hapikey={}",
    "DD_APP_KEY={}",
    "export OPENAI_KEY={}",
    "AIRFLOW__CORE__FERNET_KEY={}",
    "SAMLResponse={}",
    "user[password]={}&x=1",
    "user%5Bpassword%5D={}%26x",
    "private_key: |\n  {}\nuser: bob",
    "password: >-\n    {}\n\nuser: bob",
    "SplitResult(scheme='postgresql', netloc='{}@db:5432', path='/etl')",
    "PWD={};UID=sa",
    # SQL
    "SECRET_ACCESS_KEY '{}' FORMAT CSV",
    "IDENTIFIED WITH sha256_password BY '{}'",
    'CREATE USER bob IDENTIFIED BY "{}"',
    # commands
    "sshpass -p {} ssh h",
    "mysql -uroot -p{} etl",
    "curl -s --user '{}' https://h",
]  # fmt: skip

TOKENS = {
    "JSON Web Token, and its like": f"{JWT} eyJhbGciOiJkaXIifQ..48V1_ALb6US.5eym8TW_c8SuK0l.XFBoMYUZodetZ",
    "age": f"AGE-SECRET-KEY-1{UPPER[:58]}",
    "Aiven": f"AVNS_{ALNUM[:19]}",
    "Airtable": f"pat{ALNUM[:14]}.{HEX[:64]}",
    "Alibaba Cloud": f"LTAI{ALNUM[:20]}",
    "Amazon": f"AKIA{UPPER[:16]} ASIA{UPPER[:16]}",
    "Anthropic, OpenAI and others": f"sk-{ALNUM[:48]} sk-ant-api03-{ALNUM[:20]}-{ALNUM[20:60]} sk-{HEX[:32]}",
    "Atlassian": f"ATATT3xFfGF0{ALNUM[:60]}=1A2B3C4D",
    "Brevo": f"xkeysib-{HEX[:64]}",
    "crates.io": f"cio{ALNUM[:32]}",
    "Databricks": f"dapi{HEX[:32]}",
    "dbt": f"dbtc_{ALNUM[:40]} dbtu_{ALNUM[:40]}",
    "DigitalOcean": f"dop_v1_{HEX[:64]}",
    "Docker": f"dckr_pat_{ALNUM[:27]}",
    "Doppler": f"dp.pt.{ALNUM[:43]}",
    "Figma": f"figd_{ALNUM[:40]}",
    "GitHub": f"ghp_{ALNUM[:36]} gho_{ALNUM[:36]} ghs_{ALNUM[:36]} github_pat_{ALNUM[:22]}_{ALNUM[:59]}",
    "GitLab": f"glpat-{ALNUM[:20]} glrt-{ALNUM[:20]}",
    "Google": f"AIza{ALNUM[:35]} GOCSPX-{ALNUM[:28]} ya29.{ALNUM[:60]} 1//0{ALNUM[:60]}",
    "Grafana": f"glsa_{ALNUM[:32]}_{HEX[:8]}",
    "Groq": f"gsk_{ALNUM[:52]}",
    "Heroku": f"HRKU-{ALNUM[:36]}",
    "Hugging Face": f"hf_{ALNUM[:34]}",
    "LangSmith": f"lsv2_pt_{HEX[:32]}_{HEX[:10]}",
    "Linear": f"lin_api_{ALNUM[:40]}",
    "Mailgun": f"key-{HEX[:32]}",
    "Neon": f"npg_{ALNUM[:12]}",
    "New Relic": f"NRAK-{UPPER[:27]}",
    "Notion": f"ntn_{ALNUM[:46]}",
    "npm": f"npm_{ALNUM[:36]}",
    "Perplexity": f"pplx-{ALNUM[:48]}",
    "PlanetScale": f"pscale_tkn_{ALNUM[:43]}",
    "Postman": f"PMAK-{HEX[:24]}-{HEX[:34]}",
    "Prefect": f"pnu_{ALNUM[:36]} pnb_{ALNUM[:36]}",
    "Pulumi": f"pul-{HEX[:40]}",
    "PyPI": f"pypi-AgEIcHlwaS5vcmc{ALNUM[:60]}",
    "Replicate": f"r8_{ALNUM[:37]}",
    "RubyGems": f"rubygems_{HEX[:48]}",
    "SendGrid": f"SG.{ALNUM[:22]}.{ALNUM[:43]}",
    "Sentry": f"sntrys_{ALNUM[:60]}",
    "Shopify": f"shpat_{HEX[:32]}",
    "Slack": f"xoxb-1234567890-{ALNUM[:24]} xapp-1-A1B2-{ALNUM[:20]} xoxp-12345-abcdef",
    "Square": f"sq0atp-{ALNUM[:22]}",
    "Stripe": f"sk_live_{ALNUM[:24]} rk_test_{ALNUM[:24]} whsec_{ALNUM[:32]}",
    "Supabase": f"sbp_{HEX[:40]} sb_secret_{ALNUM[:31]}",
    "Tailscale": f"tskey-auth-{ALNUM[:17]}",
    "Telegram": f"1234567890:AA{ALNUM[:33]} bot1234567890:AA{ALNUM[:33]}",
    "Tencent Cloud": f"AKID{ALNUM[:32]}",
    "Terraform": f"atlasv1.{ALNUM[:67]}",
    "Twilio": f"SK{HEX[:32]}",
    "Vault": f"hvs.{ALNUM[:24]}",
    "xAI": f"xai-{ALNUM[:80]}",
    "Yandex Cloud": f"AQVN{ALNUM[:36]}",
}
"""Invented ones, in the form of each."""

HARMLESS = """
    spinning=5 wheels
    shipping: 3 days, opinion=none, pinned=true, pin_count=4
    the pin of the map
    code: 404
    status_code=200 exit_code=1 error code=42P01
    {"code": "USD", "country_code": "DE", "zip_code": "10115", "security_code": "600519"}
    GET /rates?code=USD&date=2026-11-20
    GET /errors?code=404
    encode=utf-8 decode: latin1
    design: done
    token.refresh
    task token.refresh failed, queue reset-password is paused
    reset-password
    /reset-password?step=2
    session started in 5 s, session 17 of 20
    the lock session is lost: it is opened again
    session_count=5 sessions: 3
    cbr:2026-11
    lock_key=cbr:2026-11 partition_key=2026 idempotency_key=cbr-2026-11-20
    otpauth is no name here
    monkey=1 donkey: 2 keyboard=us hockey=5
    author=bob authority=x coauthor: y
    a basic course for the bearer of good news
    Basic authentication is off
    password authentication failed for user "bob"
    Unexpected token '<' in JSON at position 0
    KeyError: 'queue'
    missing key 'queue' in 'args'
    token 'abc' was not expected here
    usage: tool <token> <file>
    expected <password> or <key>, got </table>
    <pinned>5</pinned><spin>3</spin>
    <name>bob</name><value>5</value>
    <code>USD</code><rate>1.1</rate>
    <a href="/docs/auth/">Authentication</a>
    <key_count>5</key_count>
    {"name": "HOST", "value": "db.example"}
    {"name": "token_count", "value": 5}
    {"key": "color", "value": "red"}
    - name: HOST\\n  value: db
    name=amount value=5
    ["token", "amount", "day"]
    ("password", "varchar", 20)
    ["host", "db.example"]
    ['lock_key', 'cbr:2026-11']
    ["key", "value"]
    eyJhbGciOiJIUzI1NiJ9
    eyJ.eyJ.x
    0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b
    da39a3ee5e6b4b0d3255bfef95601890afd80709
    e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
    data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJ
    ghp_ is the prefix of GitHub, glpat- that of GitLab, xoxb- that of Slack
    the AKIA of a park, AKIAB, asia-northeast1-a
    sk-learn-pipelines-of-the-whole-team sk-SK task-force-of-the-data-team-2026
    sk-learn-2-pipelines-of-the-team-and-more
    npm_config_registry=https://registry.example npm_lifecycle_event=test
    pypi-mirror-of-the-company hf_hub shp_file dp.pt key-value-store
    pk_live_aB3dE6gH9jK2mN5pQ8sT1vW4
    the skeleton SKU SK12345 cio hvac
    12:30:45 1234567890:A
    2026-11-20T12:00:00.000Z
    https://h.example:8443/a/b?page=1&sort=day#top
    http://h.example/oauth/token
    https://hooks.slack.com/docs
    mailto:bob@h.example bob@h.example:5432
    a%3Db%26c%3Dd page%3D2 100%25 of it
    caf%C3%A9 %E2%82%AC
    &lt;b&gt;bold&lt;/b&gt; a &amp; b
    C:\\\\new\\\\table\\\\rows.csv
    {"a": "line\\\\nnext: one"}
    SELECT password_changed_at FROM users
    Key (lock_key, day)=(ecb 2024, 5) already exists.
    -----BEGIN CERTIFICATE----- MIIB -----END CERTIFICATE-----
    -----BEGIN PUBLIC KEY----- MIIB -----END PUBLIC KEY-----
    x = y == z != w, a := b, c => d
    tool --verbose --lock-key ecb --count 5 -p 8080
    identified by its number
    DL_DB_DSN: is missing; the address of a database
    --token: is not allowed; a token has letters only
    password: must have 12 characters
    This address needs an API token: send `Authorization: Bearer …`.
    WWW-Authenticate: Bearer realm="dataloader", error="invalid_token"
    token: … key: ...
    {'rate': 1.1, 'currency': 'USD', 'at': '2026-11-20'}
    signal=15 significant: yes sigma=3
    load.cbr
    earth:2026-11-20:M4.5
    csv: text/csv; charset=utf-8
    pages 5, tokens_used 7, keys 3
    max_tokens_per_page: 5, tokenizer=bpe
    max_tokens: 4096
    tokens=1200
    queue_key: x
    Press any key: Enter
    key=EUR_USD
    token_count=5
    total_tokens: 12,345
    {"usage": {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19}}
    primary key: id
    foreign key: order_id
    KeyError: 'name'
    customer_key=1234 date_key=20261120
    {"key": "rates/EUR_USD.csv", "size": 5}
    key: 2026-11-20T12:00:00Z
    key=0197a1b2-c3d4-7e5f-8a6b-9c0d1e2f3a4b
    Done. PASS=12 WARN=0 ERROR=0 SKIP=0 TOTAL=12
    password_file=/run/secrets/db
    secret_name: db-creds
    password_changed_at=2026-11-20
    passwordless=true
    Unexpected token: '<'
    unexpected token: SELECT
    next_page_token=abc continuation token: 5
    fencing token: 17
    nextToken=CAEaB
    cookies: 3, secrets: 12
    password: str, port: int
    PWD=/app
    auth=scram-sha-256
    basic OAuth2 flow
    assertion: row_count > 0
    token: missing
    token=expired
    sort_key=day partition_key: month
    --max-tokens 4096
    keys=3 keys: [1, 2]
    cache_key=e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855
    duplicate key value violates unique constraint "dl_jobs_pkey"
    Key (customer_key, day)=(17, 2026-11-20) already exists.
    key not found: rates
    {"Key": "data/2026/11/20/part-00001.parquet"}
    <Key>data/part-0001.parquet</Key>
    secrets_path=/etc/x
    max_token=5
    stop tokens: 3
    message key: abc
    key_id=5
    shard key=user
    business_key=CUST-0001
    token bucket: 5 of 10
    order key: 17
    the key is: x
    secretary: bob, passenger=ann, compass: north
    trans_code_set cvcheck jwtish
"""
HARMLESS_LINES = [line.strip() for line in HARMLESS.strip().splitlines()]


def test_the_tables_are_long() -> None:
    assert {*FORMATS} - {*TOKENS} == {"webhooks"}  # which are also recognized by their addresses
    assert len(PAIRS) + len(TOKENS) >= 150
    assert len(HARMLESS_LINES) >= 130


@pytest.mark.parametrize("form", PAIRS)
def test_a_secret_in_a_text_is_hidden_and_nothing_else_is(form: str) -> None:
    for around in ("…", "it said: …", "it said: … (twice)", "\t…\n"):
        text = around.replace("…", form)
        assert mask_text(text.replace("{}", S)) == text.replace("{}", "***")
        assert mask_text(text.replace("{}", "***")) == text.replace("{}", "***")


MORE_THAN_THE_SECRET = [
    (f"Authorization: token {S}\r\nHost: h", "Authorization: ***\r\nHost: h"),
    (f"Proxy-Authorization: Digest username={S}, nonce=5", "Proxy-Authorization: ***"),
    (f"Key (tenant, token)=(5, {S}) already exists.", "Key (tenant, token)=*** already exists."),
    (f'"line\\napi_key={S}\\nend"', '"line\\napi_key=***"'),
    (f"<credentials>\n  <user>bob</user>\n  <p>{S}</p>\n</credentials>", "<credentials>***</credentials>"),
    (f"<password><![CDATA[{S}]]></password>", "<password>***</password>"),
    (f"cut off: <token>{S}", "cut off: <token>***"),
    (f'    password: str = "{S}"', '    password: ***"'),
    (f"Authorization=Basic {S} now", "Authorization=*** now"),
    (f"Authorization=ApiKey {S} now", "Authorization=*** now"),
    (f'Authorization: Digest username="bob", response="{S}"\nHost: h', "Authorization: ***\nHost: h"),
    (f'Cookie: a="x"; session={S}', "Cookie: ***"),
    (f"PASSWORD 'it''s {S}' LOGIN", "PASSWORD '***' LOGIN"),
    (f"jdbc:oracle:thin:bob/{S}@host:1521:orcl", "jdbc:oracle:thin:***@host:1521:orcl"),
    (f'["X-Api-Key", "{S} and so on', '["X-Api-Key", "***'),
    (f"curl -u bob:{S} https://h", "curl -u *** https://h"),
    ("AUTH PLAIN AGJvYgBzM2NyM3Q=", "AUTH PLAIN ***"),
    (f"https://api.telegram.org/bot1234567890:AA{ALNUM[:33]}/send", "https://api.telegram.org/***/send"),
    (f"https://hooks.slack.com/services/T0/B0/{ALNUM[:24]}", "https://hooks.slack.com/***"),
    (f"https://discord.com/api/webhooks/1234567890/{ALNUM[:60]}", "https://discord.com/api/***"),
    (f"key={ALNUM[:24]} x", "key=*** x"),
    (f"https://h/?key={ALNUM[:24]}&x=1", "https://h/?key=***&x=1"),
    (f"WEATHER_KEY={HEX[:32]}", "WEATHER_KEY=***"),
]


@pytest.mark.parametrize(("text", "shown"), MORE_THAN_THE_SECRET)
def test_where_a_secret_ends_late_more_is_hidden(text: str, shown: str) -> None:
    assert mask_text(text) == shown
    assert mask_text(shown) == shown


@pytest.mark.parametrize("whose", TOKENS)
def test_a_token_is_recognized_by_its_form_at_any_place(whose: str) -> None:
    for around in ("{}", "got {}, which", '{{"a": "{}"}}', "a/{}?b=1", "a%20{}%20b", "a\\n{}\\nb", "<a>{}</a>"):
        for token in TOKENS[whose].split():
            assert mask_text(around.format(token)) == around.format("***"), token
            assert mask([around.format(token)]) == [around.format("***")]


@pytest.mark.parametrize("text", HARMLESS_LINES)
def test_text_that_only_resembles_a_secret_stays_readable(text: str) -> None:
    assert mask_text(text) == text
    assert mask({"said": text, "list": [text]}) == {"said": text, "list": [text]}


PIECES = [
    *("a", " ", "é", "A", "0", "a.", "a-", "a,", ",;", "-", "_", "=", ":", "\\", "\n", '"', "'", '\\"', "'\\", '"\\'),
    *(
        "(",
        ")",
        "[",
        "]",
        "{",
        "}",
        ">",
        "<a ",
        "://",
        "://a:",
        "://a@",
        "----",
        "-----BEGIN ",
        "-----BEGIN PRIVATE KEY-----",
    ),
    *(
        "token=",
        "token=(",
        'token="',
        "token='",
        'token=\\"',
        'token="\\',
        "token=[",
        "token=a,",
        'token=a"b',
        "token: a=",
    ),
    *(
        "tokenA",
        "key =",
        "key",
        "password:",
        "password '",
        "--token ",
        "--token '",
        "authorization:",
        "identified by '",
    ),
    *(
        "Bearer ",
        "bearer a",
        "basic a",
        "?code=",
        "&code=",
        "name=",
        "name=token ",
        "name='token' ",
        "value=",
        "value=x ",
    ),
    *('value="', "value=(", 'key="token" value=', "('token','", '["token",', '("token",\'', '("a","', "(a,token)=("),
    *("<token>", "<token>a</token>", "</token>", "<token ", "<name>", "<name>token</name><b>", "<![CDATA["),
    *("%3D", "%253D", "%22", "%25", "&quot;", "&amp;", "\\u0022", "\\n"),
    *(
        "eyJ",
        "eyJaaaaaa",
        "eyJaaaaaa.",
        "sk-",
        "sk-aA1",
        "SG.aaaaaaaaaaaaaaaaaaa",
        "ghp_",
        "ghp_aaaaaaaaaaaaaaa",
        "AKIA",
    ),
]


def cpu_seconds(text: str) -> float:
    began = time.process_time()
    secrets_in(text)  # `mask_text` remembers what it has found in a long text
    return time.process_time() - began


def assert_linear(make: Callable[[int], str]) -> None:
    """Check that a text of eight times the length takes about eight times as long.

    A quadratic search would take 64 times.
    """
    tried = []
    for _ in range(4):  # other processes use the CPU, too
        few, many = cpu_seconds(make(4_000)), cpu_seconds(make(32_000))
        tried.append(many / (few + 0.0005))
        if tried[-1] < 20:
            return
    pytest.fail(f"so many times as long: {tried}")


@pytest.mark.slow
@pytest.mark.parametrize("piece", PIECES)
def test_a_hostile_text_takes_linear_time(piece: str) -> None:
    assert_linear(lambda size: "token " + piece * (size // len(piece)))


@pytest.mark.slow
def test_any_mixture_of_hostile_texts_takes_linear_time() -> None:
    chance = random.Random(0)
    for _ in range(25):
        pieces = [chance.choice(PIECES) for _ in range(chance.randint(2, 4))]
        unit = "".join(pieces)
        assert_linear(lambda size, unit=unit: "token " + unit * (size // len(unit)))  # type: ignore[misc]
        assert_linear(
            lambda size, pieces=pieces: (
                "token " + "".join(piece * (size // len(pieces) // len(piece)) for piece in pieces)
            )  # type: ignore[misc]
        )


def test_a_quote_that_is_never_closed_is_looked_for_once() -> None:
    assert_linear(lambda size: "token=(" * (size // 14) + "'\\" * (size // 4))


@pytest.mark.parametrize(
    "form", ["<token{}>", "token{}=x ", "name=token{} value=x ", "</token{}>", "<name>token{}</name><b>"]
)
def test_many_names_take_linear_time(form: str) -> None:
    assert_linear(lambda size: "".join(form.replace("{}", str(number)) for number in range(size // len(form))))
