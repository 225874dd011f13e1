# Recipes for developers. VENV names another environment than .venv; `./run RECIPE` makes one first.

bin := env("VENV", ".venv") / "bin"
versions := "18,16,15"
rooms := "supervisor cli actors web flows store jobs src"

# Tests start hundreds of processes. Where a machine forbids bytecode files, each of them would compile all anew.

export PYTHONDONTWRITEBYTECODE := ""

# ASYNC9 is optional (and this option replaces its default); ASYNC114 wants a list of all that nursery.start takes;
# ASYNC124: an interface decides whether a function is async.

not_async := "--disable ASYNC9,ASYNC114,ASYNC124"
passed := ".flake8_async_passed"

# list the recipes
default:
    @{{ bin }}/just --list

# install the project, editable, with an extra: dev, demo or embedded; once, so that it runs without a network from then on
setup extra="dev":
    @done={{ bin }}/installed-{{ extra }}-$({{ bin }}/python -c 'import sys; print(sys.version_info[1])'); \
        test "$done" -nt pyproject.toml && test "$done" -nt constraints.txt \
        || { {{ bin }}/pip install --quiet --constraint constraints.txt --editable '.[{{ extra }}]' && touch "$done"; }

# what every commit passes, in two minutes
[parallel]
check: lint types imports quick

# Tests also wait, so there are more processes than cores. The tests of `test-rest` wait longer.

pytest := bin / "pytest --dist worksteal --parts --durations 10 -r fEs"

# the quick tests: three of five
quick *args:
    {{ pytest }} -n 4 -m "not slow and not full" {{ args }}

# nine of ten tests, on one PostgreSQL and without other programs
test *args:
    {{ pytest }} -n 4 -m "not full" {{ args }}

# the other tests: long faults, browsers, Dask, RabbitMQ, the standalone binary, and the SQL on each supported PostgreSQL
test-rest *args: _servers
    STORM_SECONDS=30 {{ pytest }} -n 5 --rest --pg {{ versions }} -o faulthandler_timeout=900 {{ args }}

# all tests; the second part also runs if the first one fails
test-all:
    @status=0; {{ bin }}/just test || status=1; {{ bin }}/just test-rest || status=1; exit $status

# The oldest supported PostgreSQL, PgBouncer, Chromium and RabbitMQ are Debian's packages. Tests that lack one are skipped; in CI
# they fail.
_servers:
    @test -x /usr/lib/postgresql/15/bin/initdb && test -x /usr/sbin/pgbouncer && exit; \
        test "$(id -u)" = 0 && apt-get update -qq && apt-get install -qq --no-install-recommends postgresql-15 pgbouncer \
        || echo "PostgreSQL 15 or PgBouncer is not installed: apt-get install postgresql-15 pgbouncer" >&2
    @which chromium >/dev/null && exit; \
        test "$(id -u)" = 0 && apt-get update -qq && apt-get install -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null \
        || echo "Chromium is not installed: apt-get install chromium" >&2
    @test -e {{ bin }}/../rabbitmq || {{ bin }}/just rabbitmq || echo "RabbitMQ is not installed: run just rabbitmq" >&2

# No service is installed or started: tests start nodes of their own. It takes five seconds and 60 MB.

# Debian's RabbitMQ, unpacked into the environment, for the tests of AMQP
rabbitmq:
    #!/usr/bin/env bash
    set -euo pipefail
    to=$(realpath {{ bin }}/..)/rabbitmq
    test ! -e "$to" || exit 0
    work=$(mktemp -d); trap 'rm -rf "$work"' EXIT; cd "$work"
    what_is_missing() { apt-get install --simulate --no-install-recommends rabbitmq-server | awk '/^Inst/ {print $2}'; }
    packages=$(what_is_missing 2>/dev/null) || { apt-get update -qq; packages=$(what_is_missing); }
    apt-get download -qq -o APT::Sandbox::User=root $packages
    for package in *.deb; do dpkg -x "$package" rabbitmq; done
    sed -i "s#ROOTDIR=/usr/lib/erlang#ROOTDIR=$to/usr/lib/erlang#" rabbitmq/usr/lib/erlang/bin/erl
    mv rabbitmq "$to"

# the tests of `just test`, and the lines that none of them has run; half as slow again
coverage *args:
    {{ bin }}/coverage erase
    {{ bin }}/coverage run -m pytest -n 2 --dist worksteal -m "not full" {{ args }}
    {{ bin }}/coverage combine --quiet
    {{ bin }}/coverage report

# The tests of the faults wait more than they work: for leases to end, for processes to leave.

# the faults, in full: processes killed, networks cut, databases gone (--count 20 repeats them; -k f06 runs one)
faults *args:
    STORM_SECONDS=300 IDLE_CONNECTIONS=10000 MANY_JOBS=20000 {{ bin }}/pytest tests/faults tests/web/test_contract.py -n 4 --dist worksteal \
        -o faulthandler_timeout=900 {{ args }}

# the loads, in full, with the real data sets where they are at hand
loads *args: _servers
    {{ bin }}/pytest tests/flows tests/store tests/cli/test_etl.py tests/web/api/test_etl.py \
        tests/jobs/test_loads_contract.py tests/examples -k "etl or loads_contract or earth" \
        -n 2 --dist worksteal --pg {{ versions }} {{ args }}

# bodies in child processes while services, guards and bodies are killed and stopped, for some seconds (600)
child-chaos seconds="600":
    CHILD_CHAOS_SECONDS={{ seconds }} {{ bin }}/pytest tests/faults/test_children.py -k chaos -o faulthandler_timeout=3600

# It prints its seed: --seed 7 repeats the faults. --without GUARD takes a guard out.

# all kinds of jobs under random faults for some seconds (3600), then a check of most guarantees
[positional-arguments]
chaos *args:
    @PYTHONPATH=tests/shared:tests:. {{ bin }}/python -m chaos "$@"

# what durable processes do beside their model, over many random histories (some minutes)
process-histories number="2000":
    PROCESS_HISTORIES={{ number }} {{ bin }}/pytest tests/store/processes/test_process_histories.py

# flake8-async takes half a second for each file, so it checks only files with asynchronous code that changed since it
# last passed. Ruff has a third of its rules and checks all files, also the tests.

# style: ruff, its formatter, the language (tests/shared/prose.py), and flake8-async, which has more rules for Trio
lint:
    {{ bin }}/ruff check
    {{ bin }}/ruff format --check
    {{ bin }}/python tests/shared/prose.py
    touch {{ passed }}.next
    [ justfile -ot {{ passed }} ] && [ constraints.txt -ot {{ passed }} ] || touch -d @0 {{ passed }}
    find {{ rooms }} examples -name '*.py' -newer {{ passed }} -print0 \
        | xargs -0 -r grep -lwZE 'async|await' | xargs -0 -r -n 20 -P 2 {{ bin }}/flake8-async {{ not_async }}
    mv {{ passed }}.next {{ passed }}

# the tests of a requirement (Q7), a source file or a guard; without an argument, a table of all requirements
[positional-arguments]
tests-of *what:
    @{{ bin }}/python tests/shared/tests_of.py "$@"

# bring the layout in order
format:
    {{ bin }}/ruff check --fix
    {{ bin }}/ruff format

# mypy, strict
types:
    {{ bin }}/mypy

# the one-way imports between the layers
imports:
    {{ bin }}/lint-imports --no-logo

# measure dataloader beside other queues, and print one table (--quick: two minutes; see docs/performance.md)
[positional-arguments]
bench *args: _bench-tools
    {{ bin }}/python -m benchmarks.peers "$@"

# what loads take, beside a plain script, dlt and psql (see benchmarks/README.md)
[positional-arguments]
bench-loads *args: _bench-tools
    {{ bin }}/pip install --quiet --constraint constraints.txt --group bench-loads
    {{ bin }}/python -m benchmarks.loads "$@"

# what schedules and limits promise while processes are killed, and what they cost; one table (see benchmarks/README.md)
[positional-arguments]
bench-scheduling *args: _bench-tools
    {{ bin }}/python -m benchmarks.scheduling "$@"

# what the admin pages weigh and take, with ten million ended jobs and beside a drain; one table (see benchmarks/README.md)
[positional-arguments]
bench-pages *args: _bench-tools
    {{ bin }}/python -m benchmarks.pages "$@"

# what durable processes take, beside the queue's own jobs and beside DBOS; one table (see benchmarks/README.md)
[positional-arguments]
bench-processes *args: _bench-tools
    {{ bin }}/python -m benchmarks.processes "$@"

# what a job beside a Dask worker takes, beside plain client.submit; one table (see docs/process-isolation.md)
[positional-arguments]
bench-dask *args: _bench-tools
    {{ bin }}/python -m benchmarks.dask "$@"

# an hour under steady load, with kills and restarts at random; the report with its plots goes to a folder (--out)
[positional-arguments]
soak *args: _bench-tools
    {{ bin }}/python -m benchmarks.soak "$@"

# attack a service over HTTP, and print a table: its memory, what /health took meanwhile, errors in its log (three minutes)
[positional-arguments]
attack *args: (setup "embedded")
    {{ bin }}/python -m benchmarks.attack "$@"

_bench-tools: (setup "embedded")
    {{ bin }}/pip install --quiet 'pip>=25.1'
    {{ bin }}/pip install --quiet --constraint constraints.txt --group bench

# the documentation as a site, in build/site; without a network, and every warning is an error
site: setup
    {{ bin }}/sphinx-build --quiet --fail-on-warning --keep-going --builder html --conf-dir docs/site --doctree-dir build/site-trees docs build/site

# write the pages of docs/ that are generated from the code; a test fails while they are not current
reference:
    {{ bin }}/python docs/site/http_routes.py
    {{ bin }}/python docs/site/python_reference.py
    {{ bin }}/python docs/site/guards_page.py

# load the European Central Bank's rates, on an embedded database
[no-exit-message]
demo *args:
    {{ bin }}/dataloader demo {{ args }}

# a service: just serve --tasks my_module:tasks
[no-exit-message]
serve *args:
    {{ bin }}/dataloader serve {{ args }}

lock_options := "--constraint constraints.txt --generate-hashes --only-binary :all: --python-version 3.12 --python-platform linux \
    --no-python-downloads --no-annotate --quiet --custom-compile-command 'just lock'"

# write down what goes into the image: versions and the hashes of all their files, into deploy/
lock: (setup "dev")
    {{ bin }}/pip install --quiet 'pip>=25.1'
    {{ bin }}/pip install --quiet --group lock
    {{ bin }}/uv pip compile pyproject.toml {{ lock_options }} --output-file deploy/requirements.txt
    {{ bin }}/uv pip compile --group image-build {{ lock_options }} --output-file deploy/build-requirements.txt

# source distribution, and the wheel from it, into dist/
build:
    {{ bin }}/python -m build

# The Python of the environment goes into it, and the C library of this machine is the oldest that it runs with.

# one executable with Python, the program and the embedded PostgreSQL, into dist/ (see docs/standalone.md)
binary: build
    {{ bin }}/python deploy/binary/build.py "$(ls -t dist/*.whl | head -n 1)" dist build/binary
