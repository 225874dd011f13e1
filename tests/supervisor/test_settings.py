"""Settings: layers, one clear line for each bad value, no secret shown, documents that agree with the code (Q13)."""

import io
import json
import re
import socket
from pathlib import Path

import attrs
import pytest
from dotenv import dotenv_values

from dataloader.flows.etl.declare.pipeline_config import PREFIX, PipelineConfig
from dataloader.jobs.errors import ConfigError
from dataloader.jobs.notices import KINDS
from dataloader.jobs.process_outbox import SINK_KINDS
from dataloader.supervisor.open_parts import options_of
from dataloader.supervisor.setting_lists import PLACEHOLDER
from dataloader.supervisor.settings import ApiToken, Settings, Worker, settings_table
from dataloader.supervisor.settings_layers import client_token, explain, load_settings, unknown_variables

pytestmark = pytest.mark.requirement("Q13")

ROOT = Path(__file__).parents[2]
DSN = "postgresql://bob:s3cr3t@db:5432/etl"
TOKENS = '[{"name":"ci","role":"operate","token":"s3cr3t-0123456789"}]'

RANDOM = "a random one from `openssl rand -hex 24`, with at least 6 different characters and no repeated text"
NETWORKS = "a list of IP addresses or networks separated by commas, for example 127.0.0.1,10.0.0.0/8"


def refusals(env: dict[str, str], directory: Path) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_settings(env, directory=directory)
    return str(caught.value).splitlines()


def test_without_anything_the_documented_defaults_hold(tmp_path: Path) -> None:
    settings = load_settings({}, directory=tmp_path)
    assert settings == Settings()
    assert (settings.db_dsn, settings.direct_dsn, settings.workers) == (None, None, ())
    assert (settings.heartbeat_s, settings.default_lease_s) == (10, 60)
    assert (settings.reaper_period_s, settings.claim_backoff_s) == (10, 15)
    assert (settings.drain_timeout_s, settings.poll_s) == (30, 5)
    assert (settings.host, settings.port, settings.migrate) == ("127.0.0.1", 8080, True)
    assert settings.data_dir == Path(".dataloader")
    assert settings.instance == socket.gethostname()


def test_each_layer_overrides_the_one_below(tmp_path: Path) -> None:
    names = ["DL_PORT", "DL_POOL_SIZE", "DL_HEARTBEAT_SEC", "DL_POLL_SEC"]
    (tmp_path / ".env").write_text("".join(f"{name}=11\n" for name in names))
    (tmp_path / ".env.local").write_text("".join(f"{name}=12\n" for name in names[:3]))
    env = dict.fromkeys(names[:2], "13")
    overrides = {"port": 14, "host": None}
    settings = load_settings(env, directory=tmp_path, overrides=overrides)
    assert (settings.port, settings.pool_size, settings.heartbeat_s, settings.poll_s) == (14, 13, 12, 11)
    sources = {row.name: row.source for row in explain(env, directory=tmp_path, overrides=overrides)}
    assert [sources[name] for name in names] == ["command line", "environment", ".env.local", ".env"]
    assert sources["DL_HOST"] == "default"


def test_the_process_environment_and_directory_are_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".env").write_text("DL_POLL_SEC=7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DL_POOL_SIZE", "9")
    assert (load_settings().poll_s, load_settings().pool_size) == (7, 9)


def test_a_blank_value_counts_as_not_set(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"DL_DB_DSN={DSN}\nDL_PORT=\nDL_HOST\n")
    assert load_settings({"DL_DB_DSN": " "}, directory=tmp_path).db_dsn == DSN


def test_files_are_taken_literally(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(
        "\ufeff# comment\nexport DL_DB_DSN=postgresql://u:a$HOME${X}b@h/d  # trailing\n"
        'WORKERS_JSON=[{"queue":"load.cbr","concurrency":2}, {"queue":"ж", "concurrency":1}]\n'
        'DL_INSTANCE="worker # 1"\n'
    )
    settings = load_settings({"X": "x"}, directory=tmp_path)
    assert settings.db_dsn == "postgresql://u:a$HOME${X}b@h/d"
    assert settings.workers == (Worker("load.cbr", 2), Worker("ж", 1))
    assert settings.instance == "worker # 1"


def test_a_broken_line_of_a_file_is_named_without_its_content(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DL_PORT=1\n\nDL_DB_DSN='postgresql://u:s3cr3t@h/d\n")
    assert refusals({}, tmp_path) == [".env: line 3 must have the form NAME=value, with closed quotes"]
    (tmp_path / ".env").write_bytes(b"DL_INSTANCE=\xff\n")
    assert refusals({}, tmp_path) == [".env: cannot be read: it is not UTF-8 text"]


def test_a_directory_called_env_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / ".env").mkdir()
    assert refusals({}, tmp_path) == [".env: cannot be read: Is a directory"]


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+asyncpg", "PostgreSQL"])
def test_a_dsn_is_taken_in_every_usual_form(scheme: str) -> None:
    for rest in ("u:p@h/d", "u:p@h1:1,h2:2/d?sslmode=require", "/d?host=/run/postgresql", "[::1]:5432/d"):
        assert Settings(db_dsn=f"{scheme}://{rest}").db_dsn == f"postgresql://{rest}"


def test_the_direct_address_is_the_database_unless_given_also_when_that_is_changed() -> None:
    other = "postgresql://u@other/etl"
    assert options_of(Settings(db_dsn=DSN)).direct_dsn is None
    assert options_of(attrs.evolve(Settings(db_dsn=DSN), db_dsn=other)) == options_of(Settings(db_dsn=other))
    assert Settings(db_dsn=DSN, direct_dsn="postgres://direct/etl").direct_dsn == "postgresql://direct/etl"


NAME = "1 to 200 characters on one line, without control characters, and not only spaces"
SEC = "a number of seconds greater than 0, for example"
WORKERS = 'a JSON list such as [{"queue":"load.cbr","concurrency":2}]'
DSN_LIKE = "the address of a database, for example postgresql://user:password@host:5432/name"
ENCODED = "(in the password, encode / ? # as %2F %3F %23)"
ENTRY = '{"queue":"a","concurrency":1}'
OF_TASKS = '{"queue":"a","concurrency":1,"tasks":["t"]}'
BAD = [
    ("DL_HEARTBEAT_SEC", "0", f"must be {SEC} 10, not '0'"),
    ("DL_HEARTBEAT_SEC", "-1", f"must be {SEC} 10, not '-1'"),
    ("DL_HEARTBEAT_SEC", "ten", f"must be {SEC} 10, not 'ten'"),
    ("DL_HEARTBEAT_SEC", "nan", f"must be {SEC} 10, not 'nan'"),
    (
        "DL_STATEMENT_TIMEOUT_SEC",
        "2592000",
        f"must be {SEC} 30, and at most 2147000 (the limit of PostgreSQL), not '2592000'",
    ),
    ("DL_CONNECT_TIMEOUT_SEC", "0.0001", f"must be {SEC} 10, and at least 0.001, not '0.0001'"),
    ("DL_CLAIM_BACKOFF_SEC", "inf", f"must be {SEC} 15, and at most 31536000 (a year), not 'inf'"),
    ("DL_DRAIN_TIMEOUT_SEC", "-1", "must be a number of seconds, at least 0, for example 30, not '-1'"),
    ("DL_DEFAULT_LEASE_TTL_SEC", "1.5", "must be an integer from 3 to 86400, not '1.5'"),
    (
        "DL_PUBLIC_URL",
        "https://me:secret@ops.example.com",
        (
            "must be an http or https URL without user and query, for example "
            "https://ops.example.com/dataloader, not 'https://me:secret@ops.example.com'"
        ),
    ),
    ("DL_PORT", "65536", "must be an integer from 0 to 65535, not '65536'"),
    ("DL_PORT", "8_0", "must be an integer from 0 to 65535, not '8_0'"),
    ("DL_PORT", "9" * 5000, f"must be an integer from 0 to 65535, not '{'9' * 200}…'"),
    ("DL_MIGRATE", "maybe", "must be true or false, not 'maybe'"),
    ("DL_LOG_FORMAT", "xml", "must be one of auto, console, json, not 'xml'"),
    (
        "DL_HOST",
        "127.0.0.1:80",
        "must be an IP address or host name, without a port, for example 127.0.0.1, not '127.0.0.1:80'",
    ),
    (
        "DL_DATA_DIR",
        "~nobody-at-all/x",
        "must be the path of a directory (there is no such user), not '~nobody-at-all/x'",
    ),
    ("DL_INSTANCE", "a\nb", r"must be 1 to 200 characters on one line, not 'a\nb'"),
    ("DL_DB_DSN", "mysql://bob:s3cr3t@db/etl", f"must be {DSN_LIKE}, not 'mysql://***'"),
    ("DL_DB_DSN", "s3cr3t", f"must be {DSN_LIKE}, not '***'"),
    ("DL_DB_DSN", "postgresql://bob:s3 cr3t@db/etl", f"must be {DSN_LIKE}, not 'postgresql://***'"),
    ("DL_DB_DSN", "postgresql://bob:s3cr3t@db:x/etl", f"must be {DSN_LIKE} {ENCODED}, not 'postgresql://***'"),
    ("DL_DB_DSN", "postgresql://bob:s3#cr3t@db/etl", f"must be {DSN_LIKE} {ENCODED}, not 'postgresql://***'"),
    ("DL_DB_DSN", "postgresql://bob@db/etl#s3cr3t", f"must be {DSN_LIKE} {ENCODED}, not 'postgresql://***'"),
    ("WORKERS_JSON", "{}", f"must be {WORKERS}, not '{{}}'"),
    ("WORKERS_JSON", "[{", f"must be {WORKERS} (Input data was truncated), not '[{{'"),
    ("WORKERS_JSON", "[1]", "[0] must be an object with queue, concurrency, not '1'"),
    ("WORKERS_JSON", '[{"queue":"a"}]', "[0].concurrency is required; it must be an integer from 1 to 1000"),
    (
        "WORKERS_JSON",
        '[{"queue":"a","concurrency":1,"x":2}]',
        "[0] must be an object with only queue, concurrency, tasks, not 'x'",
    ),
    (
        "WORKERS_JSON",
        f'[{ENTRY},{{"queue":"b","concurrency":0}}]',
        "[1].concurrency must be an integer from 1 to 1000, not '0'",
    ),
    (
        "WORKERS_JSON",
        '[{"queue":"b","concurrency":true}]',
        "[0].concurrency must be an integer from 1 to 1000, not 'True'",
    ),
    (
        "WORKERS_JSON",
        '[{"queue":" ","concurrency":1}]',
        f"[0].queue must be {NAME}, not ' '",
    ),
    ("WORKERS_JSON", f"[{ENTRY},{ENTRY}]", "[1].queue must be different in each entry, not 'a'"),
    (
        "WORKERS_JSON",
        f"[{OF_TASKS},{ENTRY}]",
        "[1].queue must be different in each entry, unless all entries with this queue have tasks, not 'a'",
    ),
    (
        "WORKERS_JSON",
        f"[{OF_TASKS},{OF_TASKS}]",
        "[1].tasks must be names that are in no other entry of the queue, not 't'",
    ),
    (
        "WORKERS_JSON",
        OF_TASKS.join("[]").replace('["t"]', "[]"),
        "[0].tasks must be a list of different task names such as [\"employee\"], not '[]'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"a","role":"read","token":"s3cr3t"}]',
        "[0].token must be 16 to 1000 printable ASCII characters without spaces, not '***'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"a","role":"s3cr3t-0123456789","token":"another-0123456789"}]',
        "[0].role must be one of read, operate, admin, not '***'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"a","role":"write","token":"s3cr3t-0123456789"}]',
        "[0].role must be one of read, operate, admin, not 'write'",
    ),
    (
        "DL_TOKENS",
        f"[{TOKENS[1:-1]},{TOKENS[1:-1].replace('s3cr3t', 'other')}]",
        "[1].name must be different in each entry, not 'ci'",
    ),
    (
        "DL_TOKENS",
        f"[{TOKENS[1:-1]},{TOKENS[1:-1].replace('ci', 'cd')}]",
        "[1].token must be different in each entry, not '***'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"ci","role":"operate","token":"aaaaaaaaaaaaaaaaaaaaaaaa"}]',
        f"[0].token must be {RANDOM}, not '***'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"ci","role":"operate","token":"password-password-pass"}]',
        f"[0].token must be {RANDOM}, not '***'",
    ),
    (
        "DL_NOTIFY",
        '[{"name":"ops","url":"https://x.example","secret":"abcabcabcabcabcabc"}]',
        f"[0].secret must be {RANDOM}, not '***'",
    ),
    ("DL_TRUSTED_PROXIES", "10.0.0.1/8", f"must be {NETWORKS}, not '10.0.0.1/8'"),
    ("DL_TRUSTED_PROXIES", "proxy", f"must be {NETWORKS}, not 'proxy'"),
    (
        "DL_TRUSTED_PROXIES",
        "::/0",
        f"must be {NETWORKS}; a network of all addresses would trust every client, not '::/0'",
    ),
    (
        "DL_TOKENS",
        '[{"name":"ci","role":"operate","token":"replace-me-by-a-random-one"}]',
        (
            "[0].token must be a random one from `openssl rand -hex 24`, not the published example, "
            "not 'replace-me-by-a-random-one'"
        ),
    ),
]


@pytest.mark.parametrize(("name", "text", "line"), BAD)
def test_a_bad_value_is_one_line_naming_variable_value_and_what_is_allowed(
    name: str, text: str, line: str, tmp_path: Path
) -> None:
    assert refusals({name: text}, tmp_path) == [f"{name}: {line}"]


def test_a_malformed_secret_is_not_echoed(tmp_path: Path) -> None:
    for text in ("s3cr3t", '["s3cr3t"]', '[{"s3cr3t":1}]', '[{"name":"a","role":"read","token":"s3cr3t'):
        assert "s3cr3t" not in refusals({"DL_TOKENS": text}, tmp_path)[0]


def test_all_bad_values_are_named_together(tmp_path: Path) -> None:
    lines = refusals({"DL_PORT": "x", "DL_HEARTBEAT_SEC": "0", "WORKERS_JSON": "no"}, tmp_path)
    assert [line.split(":")[0] for line in lines] == ["WORKERS_JSON", "DL_HEARTBEAT_SEC", "DL_PORT"]


def test_all_faults_of_a_list_are_named_together_with_their_positions(tmp_path: Path) -> None:
    workers = '[{"queue":"","concurrency":0},7,{"queue":"a","concurency":1},{"queue":"a","concurrency":2}]'
    tokens = '[{"name":"","role":"write","token":"s3cr3t"},{"name":"b","role":"read"}]'
    assert refusals({"WORKERS_JSON": workers, "DL_TOKENS": tokens, "DL_PORT": "x"}, tmp_path) == [
        f"WORKERS_JSON: [0].queue must be {NAME}, not ''",
        "WORKERS_JSON: [0].concurrency must be an integer from 1 to 1000, not '0'",
        "WORKERS_JSON: [1] must be an object with queue, concurrency, not '7'",
        "WORKERS_JSON: [2] must be an object with only queue, concurrency, tasks, not 'concurency'",
        "WORKERS_JSON: [2].concurrency is required; it must be an integer from 1 to 1000",
        "WORKERS_JSON: [3].queue must be different in each entry, not 'a'",
        "DL_PORT: must be an integer from 0 to 65535, not 'x'",
        "DL_TOKENS: [0].name must be 1 to 200 characters on one line, not ''",
        "DL_TOKENS: [0].role must be one of read, operate, admin, not 'write'",
        "DL_TOKENS: [0].token must be 16 to 1000 printable ASCII characters without spaces, not '***'",
        "DL_TOKENS: [1].token is required; it must be 16 to 1000 printable ASCII characters without spaces",
    ]


def test_settings_made_in_code_are_checked_with_the_same_words() -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(heartbeat_s=0, workers=(Worker("a", 0),))
    assert str(caught.value).splitlines() == [
        "WORKERS_JSON: [0].concurrency must be an integer from 1 to 1000, not '0'",
        "DL_HEARTBEAT_SEC: must be a number of seconds greater than 0, for example 10, not '0'",
    ]


@pytest.mark.parametrize(
    ("env", "line"),
    [
        (
            {"DL_HEARTBEAT_SEC": "60"},
            "DL_HEARTBEAT_SEC: must be less than DL_DEFAULT_LEASE_TTL_SEC (60), preferably a sixth of it, not '60'",
        ),
        (
            {"DL_MAX_BODY_BYTES": "20000000"},
            "DL_MAX_BATCH_BODY_BYTES: must be at least DL_MAX_BODY_BYTES (20000000), not '8388608'",
        ),
        (
            {"DL_DIRECT_DSN": DSN},
            "DL_DIRECT_DSN: must be set together with DL_DB_DSN, not alone ('postgresql://***@db:5432/etl')",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(env: dict[str, str], line: str, tmp_path: Path) -> None:
    assert refusals(env, tmp_path) == [line]


def test_a_direct_dsn_from_a_file_is_refused_with_a_database_from_the_environment(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"DL_DB_DSN={DSN}\nDL_DIRECT_DSN={DSN}\n")
    assert load_settings({}, directory=tmp_path).direct_dsn == DSN
    other = DSN.replace("db:", "test:")
    (line,) = refusals({"DL_DB_DSN": other}, tmp_path)
    assert line == (
        "DL_DIRECT_DSN: is set in .env, but DL_DB_DSN in environment, which has precedence: they might refer to "
        "different databases; set both in the same place"
    )
    assert load_settings({"DL_DB_DSN": other, "DL_DIRECT_DSN": other}, directory=tmp_path).direct_dsn == other


def test_a_former_name_of_a_setting_is_refused_with_the_new_one(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"DL_LOCK_DSN={DSN}\n")
    assert refusals({"DL_LOCK_DSN": DSN, "DL_DB_DSN": DSN}, tmp_path) == [
        "DL_LOCK_DSN: is now named DL_DIRECT_DSN; rename it in .env",
        "DL_LOCK_DSN: is now named DL_DIRECT_DSN; rename it in the environment",
    ]
    with pytest.raises(ConfigError, match=r"^DL_LOCK_DSN: is now named DL_DIRECT_DSN"):
        explain({}, directory=tmp_path)
    assert unknown_variables({}, directory=tmp_path) == []
    with pytest.raises(TypeError, match=r"^Settings: the argument lock_dsn is now named direct_dsn$"):
        Settings(db_dsn=DSN, lock_dsn=DSN)  # type: ignore[call-arg]


def test_an_empty_former_name_of_a_setting_is_pointed_out(tmp_path: Path) -> None:
    env = {"DL_LOCK_DSN": ""}
    assert load_settings(env, directory=tmp_path).direct_dsn is None
    assert unknown_variables(env, directory=tmp_path) == [
        "DL_LOCK_DSN (environment) is not a setting and has no effect; did you mean DL_DIRECT_DSN?"
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "dataloader.example"])
def test_another_than_a_loopback_address_needs_tokens(host: str, tmp_path: Path) -> None:
    (line,) = refusals({"DL_HOST": host}, tmp_path)
    assert line.startswith("DL_HOST: must be a loopback address such as 127.0.0.1 unless DL_TOKENS is set")
    assert load_settings({"DL_HOST": host, "DL_TOKENS": TOKENS}, directory=tmp_path).host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_a_loopback_address_needs_no_tokens(host: str) -> None:
    assert Settings(host=host).tokens == ()


def test_tokens_are_read(tmp_path: Path) -> None:
    settings = load_settings({"DL_TOKENS": TOKENS}, directory=tmp_path)
    assert settings.tokens == (ApiToken("ci", "operate", "s3cr3t-0123456789"),)


@pytest.mark.requirement("Q16")
@pytest.mark.parametrize(
    ("dsn", "shown"),
    [
        (DSN, "postgresql://***@db:5432/etl"),
        (
            "postgresql://db/etl?user=a@b&password=s3cr3t&sslmode=require",
            "postgresql://db/etl?user=a@b&password=***&sslmode=require",
        ),
        ("postgresql://u:\"s3cr3t'@db/etl", "postgresql://***@db/etl"),
        ("postgresql://u:x@y@s3cr3t@db/etl", "postgresql://***@db/etl"),
    ],
)
def test_no_secret_is_shown(dsn: str, shown: str, tmp_path: Path) -> None:
    env = {"DL_DB_DSN": dsn, "DL_TOKENS": TOKENS, "WORKERS_JSON": f"[{ENTRY}]"}
    settings = load_settings(env, directory=tmp_path)
    assert "s3cr3t" not in f"{settings!r} {settings}"
    rows = {row.name: row.value for row in explain(env, directory=tmp_path)}
    assert rows["DL_DB_DSN"] == rows["DL_DIRECT_DSN"] == shown
    assert json.loads(rows["DL_TOKENS"]) == [{"name": "ci", "role": "operate", "token": "***"}]
    assert rows["WORKERS_JSON"] == f"[{ENTRY}]"
    assert (rows["DL_HEARTBEAT_SEC"], rows["DL_MIGRATE"], rows["DL_DATA_DIR"]) == ("10", "true", ".dataloader")


def test_the_client_s_token_is_read_from_the_files_too_and_not_shown(tmp_path: Path) -> None:
    assert client_token({}, directory=tmp_path) is None
    (tmp_path / ".env").write_text("DL_TOKEN=of-env\n")
    (tmp_path / ".env.local").write_text("DL_TOKEN=of-local\n")
    assert client_token({"DL_TOKEN": " "}, directory=tmp_path) == "of-local"
    assert client_token({"DL_TOKEN": "of-environment"}, directory=tmp_path) == "of-environment"
    [row] = [row for row in explain({}, directory=tmp_path) if row.name == "DL_TOKEN"]
    assert (row.value, row.source) == ("***", ".env.local")


def test_a_misspelt_variable_is_pointed_out_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / ".env").write_text("DL_HEARTBEAT=5\nOTHER=1\n")
    env = {"DL_XYZZY_PLUGH": "1", "DL_TOKEN": "1", "DL_PIPELINE__RATE_MIN": "1", "DL_PORT": "1", "HOME": "/"}
    assert unknown_variables(env, directory=tmp_path) == [
        "DL_HEARTBEAT (.env) is not a setting and has no effect; did you mean DL_HEARTBEAT_SEC?",
        "DL_XYZZY_PLUGH (environment) is not a setting and has no effect",
    ]


def test_every_explained_value_can_be_set_again(tmp_path: Path) -> None:
    rows = {row.name: row.value for row in explain({}, directory=tmp_path)}
    assert load_settings(rows, directory=tmp_path) == Settings()


@pytest.mark.requirement("E5")
def test_each_layer_overrides_single_settings_of_pipelines(tmp_path: Path) -> None:
    names = [PREFIX + name for name in ("WORKERS", "QUEUE_SIZE", "BATCH_SIZE", "MAX_FAILURES", "ECB_RATES__WORKERS")]
    (tmp_path / ".env").write_text("".join(f"{name}=11\n" for name in names))
    (tmp_path / ".env.local").write_text("".join(f"{name}=12\n" for name in names[:3]))
    layers = {"env": dict.fromkeys(names[:2], "13"), "directory": tmp_path}
    overrides = {"pipeline": dict.fromkeys(names[:1], "14"), "port": None}
    settings = load_settings(**layers, overrides=overrides).pipeline
    config = settings.config("other", {}, {})
    assert (config.workers, config.queue_size, config.batch_size, config.max_failures) == (14, 13, 12, 11)
    # A value for one load takes precedence over values for all loads.
    assert settings.config("ecb.rates", {}, {}).workers == 11
    sources = {row.name: row.source for row in explain(**layers, overrides=overrides)}
    assert sources[f"{PREFIX}…"] == "command line"
    assert {row.name: row.source for row in explain(**layers)}[f"{PREFIX}…"] == "environment"


@pytest.mark.requirement("E5")
def test_pauses_that_contradict_each_other_are_refused_across_layers(tmp_path: Path) -> None:
    overrides = {"pipeline": {f"{PREFIX}RATE_MIN": "9"}}
    with pytest.raises(ConfigError, match=r"^DL_PIPELINE__RATE_MIN: must be .*, not 9\.0$"):
        load_settings({f"{PREFIX}RATE_MAX": "3"}, directory=tmp_path, overrides=overrides)
    assert load_settings({f"{PREFIX}RATE_MAX": "9"}, directory=tmp_path, overrides=overrides).pipeline.of_all == {
        "rate_min": 9.0,
        "rate_max": 9.0,
    }


@pytest.mark.requirement("E5")
def test_the_document_has_every_setting_of_pipelines_with_its_default() -> None:
    text = (
        (ROOT / "docs" / "loads" / "politeness.md")
        .read_text("utf-8")
        .partition("\n## Settings\n")[2]
        .partition("\n## ")[0]
    )
    told: dict[str, str] = {}
    for names, defaults in re.findall(r"^\| (`.+?`) \| (.+?) \|", text, re.MULTILINE):
        told |= zip(re.findall(r"`(\w+)`", names), defaults.split(", "), strict=True)
    assert told == {name: f"{value:g}" for name, value in attrs.asdict(PipelineConfig()).items()}


def test_the_document_has_the_table_of_the_code() -> None:
    document = (ROOT / "docs" / "settings.md").read_text("utf-8")
    table = re.search(r"<!-- settings -->\n(.*)<!-- /settings -->", document, re.DOTALL)
    assert table is not None
    assert table[1] == settings_table()


@pytest.mark.parametrize(
    ("query", "says"),
    [
        (
            "sslmode=require&connect_timeout=3",
            "connect_timeout, which only libpq supports; set DL_CONNECT_TIMEOUT_SEC instead",
        ),
        ("keepalives=1", "keepalives, which only libpq supports; omit it"),
        ("load_balance_hosts", "load_balance_hosts, .*; omit it"),
    ],
)
def test_a_parameter_of_an_address_that_only_libpq_knows_is_named(query: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"DL_DB_DSN: must be an address without the parameter {says}"):
        load_settings({"DL_DB_DSN": f"{DSN}?{query}"}, directory=ROOT / "no such directory")


@pytest.mark.requirement("Q18")
def test_the_example_file_has_every_setting_with_its_default() -> None:
    text = (ROOT / ".env.example").read_text("utf-8")
    assert dotenv_values(stream=io.StringIO(text)) == {}, "an example sets nothing until somebody decides"
    examples = re.findall(r"^#([A-Z_]+)=(.*)$", text, re.MULTILINE)
    pipeline = {name: value for name, value in examples if name.startswith(PREFIX)}
    assert pipeline == {PREFIX + name.upper(): f"{value:g}" for name, value in attrs.asdict(PipelineConfig()).items()}
    assert (
        load_settings(pipeline, directory=ROOT / "no such directory").pipeline.config("x", {}, {}) == PipelineConfig()
    )
    examples = [(name, value) for name, value in examples if name not in pipeline]
    rows = {row.name: row.value for row in explain({}, directory=ROOT / "no such directory")}
    assert {name for name, _ in examples} == set(rows) - {f"{PREFIX}…"}
    only_examples = {"DL_DB_DSN", "DL_DIRECT_DSN", "DL_TOKENS", "DL_PUBLIC_URL", "DL_NOTIFY", "DL_SINKS", "DL_INSTANCE"}
    only_examples |= {
        "DL_ENVIRONMENT",
        "DL_TRUSTED_PROXIES",
        "DL_DASK",
        "DL_DASK_TLS_CA",
        "DL_DASK_TLS_CERT",
        "DL_DASK_TLS_KEY",
    }
    assert {name: value for name, value in examples if name not in only_examples} == {
        name: value for name, value in rows.items() if name not in {*only_examples, f"{PREFIX}…"}
    }
    assert sum(name == "WORKERS_JSON" for name, _ in examples) > 1
    (tokens,) = [value for name, value in examples if name == "DL_TOKENS"]
    assert [entry["token"] for entry in json.loads(tokens)] == [PLACEHOLDER]
    for name, value in examples:
        if PLACEHOLDER in value:
            continue  # these must not work
        dsn = {"DL_DB_DSN": DSN} if name == "DL_DIRECT_DSN" else {}
        load_settings({**dsn, name: value}, directory=ROOT / "no such directory")


@pytest.mark.requirement("S6")
def test_targets_are_checked_field_by_field_and_never_shown(tmp_path: Path) -> None:
    good = [
        {
            "name": "ops",
            "url": "https://hooks.example.org/T0/s3cr3t",
            "secret": "s3cr3t-0123456789",
            "kinds": ["lost", "lost"],
        },
        {"name": "page", "argv": ["/bin/page", "s3cr3t"], "timeout_s": 2},
    ]
    env = {"DL_NOTIFY": json.dumps(good)}
    settings = load_settings(env, directory=tmp_path)
    assert [(one.name, one.kinds, one.task) for one in settings.notify] == [
        ("ops", ("lost",), "notify.webhook"),
        ("page", KINDS, "notify.command"),
    ]
    rows = {row.name: row.value for row in explain(env, directory=tmp_path)}
    assert "s3cr3t" not in repr(settings) + rows["DL_NOTIFY"] + str(settings.notify)
    bad = [
        {"name": "", "url": "ftp://s3cr3t", "secret": "s3cr3t"},
        {"name": "page", "argv": ["s3cr3t", 1], "timeout_s": 0, "kinds": ["s3cr3t"]},
        {"name": "page", "argv": ["s3cr3t"], "shell": "s3cr3t" * 4},
    ]
    lines = refusals({"DL_NOTIFY": json.dumps(bad)}, tmp_path)
    assert [line.split(" ")[1] for line in lines] == [
        "[0].name", "[0].url", "[0].secret", "[1].argv", "[1].timeout_s", "[1].kinds", "[2]", "[2].name",
    ]  # fmt: skip
    assert not [line for line in lines if "s3cr3t" in line and "kinds" not in line]
    assert refusals({"DL_NOTIFY": "{}"}, tmp_path)[0].startswith("DL_NOTIFY: must be a JSON list such as")


@pytest.mark.requirement("P9")
def test_sinks_are_checked_field_by_field_and_their_addresses_never_shown(tmp_path: Path) -> None:
    good = [
        {
            "name": "books",
            "url": "https://hooks.example.org/T0/s3cr3t",
            "secret": "s3cr3t-0123456789",
            "kinds": ["event"],
        },
        {"name": "ledger", "types": ["payment", "payment"], "max_tries": 3, "timeout_s": 2},
    ]
    env = {"DL_SINKS": json.dumps(good)}
    settings = load_settings(env, directory=tmp_path)
    assert [(one.name, one.url is None, one.types, one.kinds, one.max_tries) for one in settings.sinks] == [
        ("books", False, None, ("event",), 20),
        ("ledger", True, ("payment",), SINK_KINDS, 3),
    ]
    rows = {row.name: row.value for row in explain(env, directory=tmp_path)}
    assert "s3cr3t" not in repr(settings) + rows["DL_SINKS"] + str(settings.sinks)
    bad = [
        {"name": "messages", "url": "ftp://s3cr3t"},
        {"name": "a", "secret": "s3cr3t-0123456789", "types": ["a/b"], "kinds": ["s3cr3t"], "max_tries": 0},
        {"name": "a", "types": []},
    ]
    lines = refusals({"DL_SINKS": json.dumps(bad)}, tmp_path)
    assert [line.split(" ")[1] for line in lines] == [
        "[0].name", "[0].url", "[0].secret", "[1].url", "[1].types", "[1].kinds", "[1].max_tries", "[2].types",
        "[2].name",
    ]  # fmt: skip
    assert not [line for line in lines if "s3cr3t" in line and "kinds" not in line]
