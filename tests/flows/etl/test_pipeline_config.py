"""Configuration of loads: defaults, layers, a load's own settings, and errors that name the fault (E5)."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from etl_tasks import items_load

from dataloader import Tasks
from dataloader.flows.etl import CancellationToken, Flow, PipelineConfig, PipelineSettings, add_flows, add_loads
from dataloader.flows.etl.declare.pipeline_config import read_settings
from dataloader.flows.etl.flow.flow import loads_of
from dataloader.jobs.errors import ConfigError
from dataloader.supervisor.settings_layers import load_settings

pytestmark = pytest.mark.requirement("E5")
WHOLE = "an integer from 1 to 1,000,000"
SECONDS = "a number of seconds from 0 to 86,400"


def test_the_defaults_are_the_document_s():
    assert attrs.asdict(PipelineConfig()) == {
        "workers": 2,
        "queue_size": 100,
        "batch_size": 100,
        "batch_timeout": 5.0,
        "rate_min": 5.0,
        "rate_max": 20.0,
        "attempts": 3,
        "request_timeout": 60.0,
        "max_failures": 10,
        "max_failed_segments": 0,
        "max_failed_share": 0.01,
        "drain_timeout": 20.0,
    }


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("workers", 0, WHOLE),
        ("workers", 1.5, WHOLE),
        ("workers", True, WHOLE),
        ("workers", "two", WHOLE),
        ("queue_size", 0, WHOLE),
        ("queue_size", 1_000_001, WHOLE),
        ("batch_size", 0, WHOLE),
        ("batch_size", -1, WHOLE),
        ("attempts", 0, WHOLE),
        ("max_failures", 0, WHOLE),
        ("max_failed_segments", -1, "an integer from 0 to 1,000,000"),
        ("max_failed_share", 1.01, "a number from 0 to 1"),
        ("max_failed_share", True, "a number from 0 to 1"),
        ("batch_timeout", -1, SECONDS),
        ("batch_timeout", 0, "a number of seconds greater than 0"),
        ("request_timeout", 0, "a number of seconds greater than 0"),
        ("rate_min", -0.1, SECONDS),
        ("rate_min", float("nan"), SECONDS),
        ("rate_min", 21, "a number of seconds not greater than rate_max (20)"),
        ("rate_max", 86_401, SECONDS),
        ("rate_max", None, SECONDS),
        ("drain_timeout", float("inf"), SECONDS),
    ],
)
def test_a_setting_that_is_not_allowed_is_refused_by_name(name, value, allowed):
    with pytest.raises(ValueError, match=r".") as caught:
        PipelineConfig(**{name: value})
    assert str(caught.value) == f"pipeline.{name}: must be {allowed}, not {value!r}"


@pytest.mark.requirement("E1")
def test_a_least_pause_above_the_greatest_is_refused_and_no_pause_is_legal():
    with pytest.raises(ValueError, match=r"^pipeline\.rate_min: must be .* not greater than rate_max \(2\), not 3$"):
        PipelineConfig(rate_min=3, rate_max=2)
    assert PipelineConfig(rate_min=0, rate_max=0).rate_max == 0
    assert PipelineConfig(rate_min=2, rate_max=2).rate_min == 2


def test_a_load_is_refused_at_its_declaration():
    with pytest.raises(
        ValueError, match=r"^load items: pipeline: 'worker' is not a pipeline setting; the settings are workers, "
    ):
        items_load("http://source", pipeline={"worker": 2})
    with pytest.raises(ValueError, match=r"^pipeline\.rate_min: must be .*, not 3$"):
        items_load("http://source", pipeline={"rate_min": 3, "rate_max": 2})
    with pytest.raises(ValueError, match=r"^pipeline\.batch_size: must be .*, not 0$"):
        items_load("http://source", pipeline={"batch_size": 0})
    # Also together with one end of the pause, which is checked with the other one when the run begins.
    with pytest.raises(ValueError, match=r"^pipeline\.workers: must be .*, not 0$"):
        attrs.evolve(items_load("http://source"), pipeline={"workers": 0, "rate_min": 30})
    with pytest.raises(ValueError, match=r"^pipeline\.rate_max: must be .*, not -1$"):
        attrs.evolve(items_load("http://source"), pipeline={"rate_max": -1})
    attrs.evolve(items_load("http://source"), pipeline={"rate_min": 30})


def test_the_nearer_to_the_run_the_stronger():
    settings = PipelineSettings(
        {"workers": 3, "batch_size": 3, "queue_size": 3, "attempts": 3},
        {"ECB_RATES": {"batch_size": 5, "queue_size": 5}},
    )
    declared = {"workers": 4, "batch_size": 4, "queue_size": 4}
    config = settings.config("ecb.rates", declared, {"queue_size": 6})
    assert (config.attempts, config.workers, config.batch_size, config.queue_size) == (3, 4, 5, 6)
    assert config.batch_timeout == 5
    other = settings.config("names", {}, {})
    assert (other.workers, other.batch_size) == (3, 3)


def test_ends_of_the_pause_from_two_places_are_judged_together():
    settings = PipelineSettings({"rate_max": 4})
    with pytest.raises(ValueError, match=r"^pipeline\.rate_min: must be .* rate_max \(4\), not 6$"):
        settings.config("names", {"rate_min": 6}, {})


def of(config):
    return config.workers, config.batch_size, config.rate_min, config.rate_max


def test_each_layer_of_settings_overrides_the_one_below(tmp_path: Path):
    names = [f"DL_PIPELINE__{name}" for name in ("WORKERS", "BATCH_SIZE", "RATE_MIN", "RATE_MAX")]
    (tmp_path / ".env").write_text("".join(f"{name}=11\n" for name in names))
    (tmp_path / ".env.local").write_text("".join(f"{name}=12\n" for name in names[1:]))
    env = dict.fromkeys(names[2:], "13")
    overrides = {"pipeline": {names[3]: "14"}}
    settings = load_settings(env, directory=tmp_path, overrides=overrides)
    assert of(settings.pipeline.config("any", {}, {})) == (11, 12, 13, 14)


def test_a_load_s_own_settings_come_through_all_layers(tmp_path: Path):
    (tmp_path / ".env").write_text("DL_PIPELINE__RATE_MIN=1.5\nDL_PIPELINE__ECB_RATES__WORKERS=7\n")
    env = {"DL_PIPELINE__ECB_RATES__RATE_MIN": "2.5", "DL_PIPELINE__ECB_RATES__BATCH_SIZE": " "}
    overrides = {"pipeline": {"DL_PIPELINE__RATE_MIN": "3.5"}}
    pipeline = load_settings(env, directory=tmp_path, overrides=overrides).pipeline
    assert of(pipeline.config("ecb.rates", {}, {})) == (7, 100, 2.5, 20)
    assert of(pipeline.config("names", {}, {})) == (2, 100, 3.5, 20)


@pytest.mark.parametrize(
    ("variable", "text", "said"),
    [
        ("DL_PIPELINE__WORKERS", "0", "DL_PIPELINE__WORKERS: must be "),
        ("DL_PIPELINE__WORKERS", "2.5", "DL_PIPELINE__WORKERS: must be "),
        ("DL_PIPELINE__RATE_MIN", "nan", "DL_PIPELINE__RATE_MIN: must be "),
        ("DL_PIPELINE__RATE_MIN", "30", "DL_PIPELINE__RATE_MIN: must be "),
        ("DL_PIPELINE__NAMES__RATE_MAX", "1", "DL_PIPELINE__NAMES__RATE_MIN: must be "),
        ("DL_PIPELINE__WORKER", "1", "DL_PIPELINE__WORKER: 'worker' is not a pipeline setting"),
        ("DL_PIPELINE__A__B__WORKERS", "1", "DL_PIPELINE__A__B__WORKERS: must be DL_PIPELINE__<SETTING> or "),
        (
            "DL_PIPELINE__ECB__ATTEMPTS",
            "0",
            "DL_PIPELINE__ECB__ATTEMPTS: must be an integer from 1 to 1,000,000",
        ),
    ],
)
def test_a_variable_that_is_not_allowed_is_refused_in_one_line(tmp_path: Path, variable, text, said):
    with pytest.raises(ValueError, match=r".") as caught:
        read_settings({variable: text})
    assert str(caught.value).startswith(said)
    with pytest.raises(ConfigError) as told:
        load_settings({variable: text}, directory=tmp_path)
    [line] = str(told.value).splitlines()
    assert said in line


@pytest.mark.parametrize("name", ["ecb.rates", "ecb-rates", "Ecb Rates", "ecb__rates", ".ecb.rates."])
def test_a_load_s_name_is_found_in_a_variable(name):
    settings = read_settings({"DL_PIPELINE__ECB_RATES__WORKERS": "9"})
    assert settings.config(name, {}, {}).workers == 9


def test_settings_of_a_load_that_is_misspelt_are_pointed_out():
    tasks = Tasks()
    add_loads(tasks, items_load("http://h", name="shop.orders"))
    add_flows(tasks, Flow(name="nightly", layers={"ods": [items_load("http://h", name="shop.items")]}))
    names = ("SHOP_ORDER", "SHOP_ITEMS", "SHOP_ORDERS", "XYZZY")
    settings = read_settings({f"DL_PIPELINE__{name}__RATE_MIN": "1" for name in names})
    told = "is for a load that this process does not have, and has no effect"
    assert settings.of_no_load(loads_of(tasks)) == [
        f"DL_PIPELINE__SHOP_ORDER__… {told}; did you mean DL_PIPELINE__SHOP_ORDERS__…, for the load shop.orders?",
        f"DL_PIPELINE__XYZZY__… {told}",
    ]


@pytest.mark.requirement("E4")
@pytest.mark.parametrize("timeout", [0, -1, float("nan")])
def test_a_token_with_a_timeout_that_makes_no_sense_is_refused(timeout):
    with pytest.raises(ValueError, match=r"^timeout: must be a number of seconds greater than 0, not .*$"):
        CancellationToken(timeout)


async def test_a_process_warns_of_settings_of_a_load_that_it_does_not_have(supervised, caplog):
    misspelt = PipelineSettings(of_one={"ITEM": {"rate_min": 1}})
    async with supervised(items_load("http://h"), pipeline=misspelt):
        assert "did you mean DL_PIPELINE__ITEMS__…, for the load items?" in caplog.text
