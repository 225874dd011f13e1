"""Settings of a pipeline: workers, queues, batches, pauses and limits.

A setting can be given in several places. Later places in this list override the earlier ones:

* the defaults here;
* `DL_PIPELINE__RATE_MIN` and `--pipeline-rate-min`, for all loads of a process;
* the load's own declaration;
* `DL_PIPELINE__<LOAD>__RATE_MIN`, for this load in this process;
* the `pipeline` of a job's args, for one run.

So a load that was declared with long pauses keeps them when the pauses of all loads are shortened.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import attrs


@attrs.frozen(kw_only=True)
class PipelineConfig:
    """Settings of one pipeline. Times are in seconds.

    `workers` read and transform responses. At most `queue_size` responses wait. A batch is written when it has
    `batch_size` rows or more, or `batch_timeout` after its first row. Between the end of a response and the next
    request to the same source, there is a random pause from `rate_min` to `rate_max`. A request is tried up to
    `attempts` times, each for at most `request_timeout`. More than `max_failures` consecutive failures end the run:
    failures of requests, batches and segments, and responses and batches without a good record, while more than
    `max_failed_share` of the records have failed so far. A run that reaches its end has failed if more than
    `max_failed_segments` of its segments could not be loaded, or more than the share `max_failed_share` (0 to 1) of its
    records or details. `drain_timeout` is the time in which a canceled run may process and write the responses that it
    has.

    Raises `ValueError` with the setting, its value and the allowed values.
    """

    workers: int = 2
    queue_size: int = 100
    batch_size: int = 100
    batch_timeout: float = 5.0
    rate_min: float = 5.0
    rate_max: float = 20.0
    attempts: int = 3
    request_timeout: float = 60.0
    max_failures: int = 10
    max_failed_segments: int = 0
    max_failed_share: float = 0.01
    drain_timeout: float = 20.0

    def __attrs_post_init__(self) -> None:
        for name in WHOLE:
            value = getattr(self, name)
            least = 0 if name == "max_failed_segments" else 1
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
                raise _pipeline_refusal(name, value, f"an integer from {least} to {MOST:,}")
        for name, most, what in (*((name, LONGEST_S, "number of seconds") for name in SECONDS), (SHARE, 1, "number")):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise _pipeline_refusal(name, value, f"a {what} from 0 to {most:,}")
        for name in ("batch_timeout", "request_timeout"):
            if getattr(self, name) == 0:
                raise _pipeline_refusal(name, 0, "a number of seconds greater than 0")
        if self.rate_min > self.rate_max:
            raise _pipeline_refusal(
                "rate_min", self.rate_min, f"a number of seconds not greater than rate_max ({self.rate_max:g})"
            )


WHOLE: Final = ("workers", "queue_size", "batch_size", "attempts", "max_failures", "max_failed_segments")
SECONDS: Final = ("batch_timeout", "rate_min", "rate_max", "request_timeout", "drain_timeout")
SHARE: Final = "max_failed_share"
MOST: Final = 1_000_000
LONGEST_S: Final = 86_400

Given = Mapping[str, Any]
"""Settings of a `PipelineConfig`, by name. May be incomplete."""


def _pipeline_refusal(name: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"pipeline.{name}: must be {allowed}, not {value!r}")


def check_names(given: Given, where: str) -> None:
    """Raise `ValueError` if one of the names is not a setting of a pipeline. `where` is their origin, for the error."""
    known = [field.name for field in attrs.fields(PipelineConfig)]
    for name in given:
        if name not in known:
            raise ValueError(f"{where}: {name!r} is not a pipeline setting; the settings are {', '.join(known)}")


def variable_of(load: str) -> str:
    """Return a load's name as part of a variable: ECB_RATES for ecb.rates, as in DL_PIPELINE__ECB_RATES__WORKERS."""
    return re.sub(r"[^A-Z0-9]+", "_", load.upper()).strip("_")


@attrs.frozen
class PipelineSettings:
    """Pipeline settings of a process: `of_all` loads, and `of_one` load, by the `variable_of` its name.

    The values are numbers or the texts of variables. `tables_at_once` is the number of tables of a set of dimensions
    that are merged concurrently, unless the set has its own number.
    """

    of_all: Given = attrs.field(factory=dict)
    of_one: Mapping[str, Given] = attrs.field(factory=dict)
    tables_at_once: int = 4

    def config(self, load: str, declared: Given, asked: Given) -> PipelineConfig:
        """Return the settings of a run of `load`, with those `declared` with the load and `asked` by the job's args.

        Raises `ValueError` for a setting that is not allowed.
        """
        check_names(asked, "the job's pipeline")
        given = {**self.of_all, **declared, **self.of_one.get(variable_of(load), {}), **asked}
        return PipelineConfig(**{name: _number_or_text(name, value) for name, value in given.items()})

    def of_no_load(self, loads: Collection[str]) -> list[str]:
        """Return a sentence for each load that has settings but is not in `loads`, with the most similar name."""
        known = {variable_of(load): load for load in loads}
        sentences = []
        for name in sorted(set(self.of_one) - set(known)):
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {PREFIX}{near[0]}__…, for the load {known[near[0]]}?" if near else ""
            sentences.append(
                f"{PREFIX}{name}__… is for a load that this process does not have, and has no effect{hint}"
            )
        return sentences


@contextmanager
def _naming(prefix: str) -> Iterator[None]:
    """Replace a setting's name in errors by its variable's name, which begins with `prefix`."""
    try:
        yield
    except ValueError as error:
        name, _, what = str(error).removeprefix("pipeline.").partition(":")
        raise ValueError(f"{prefix}{name.upper()}:{what}") from None


def read_settings(texts: Mapping[str, str]) -> PipelineSettings:
    """Read the settings in variables such as `DL_PIPELINE__RATE_MIN` and `DL_PIPELINE__ECB_RATES__RATE_MIN`.

    Raises `ValueError`, with one line, for an unknown setting and for a value that is not allowed.
    """
    of_all: dict[str, Any] = {}
    of_one: dict[str, dict[str, Any]] = {}
    for variable, text in texts.items():
        if not variable.startswith(PREFIX) or not text.strip():
            continue
        *load, name = variable.removeprefix(PREFIX).split("__")
        name = name.lower()
        check_names({name: text}, variable)
        if len(load) > 1:
            raise ValueError(f"{variable}: must be {PREFIX}<SETTING> or {PREFIX}<LOAD>__<SETTING>")
        with _naming(variable.removesuffix(name.upper())):
            (of_one.setdefault(load[0], {}) if load else of_all)[name] = _number_or_text(name, text)
    together = {PREFIX: of_all, **{f"{PREFIX}{load}__": {**of_all, **one} for load, one in of_one.items()}}
    for prefix, given in together.items():
        with _naming(prefix):
            PipelineConfig(**given)
    return PipelineSettings(of_all, of_one)


PREFIX: Final = "DL_PIPELINE__"


def _number_or_text(name: str, value: Any) -> Any:
    """Return the number in a variable's text, or any other text unchanged, to be refused with the variable's name."""
    if not isinstance(value, str):
        return value
    try:
        number = int(value) if name in WHOLE else float(value)
    except ValueError:
        return value
    return value if math.isnan(number) else number
