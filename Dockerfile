# One process, all workers inside; configured by DL_DB_DSN, WORKERS_JSON and the other settings (docs/settings.md). DL_TOKENS is
# needed, because the API answers to more than its own machine. Your tasks come with an image on top of this one:
# COPY my_module.py . and CMD ["serve", "--tasks", "my_module:tasks"].

# A tag names another image tomorrow; a digest does not: --build-arg BASE=python:3.12-slim@sha256:…
ARG BASE=python:3.12-slim

FROM ${BASE} AS builder
WORKDIR /source
COPY deploy/build-requirements.txt .
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --requirement build-requirements.txt
COPY . .
RUN python -m build --wheel --no-isolation --outdir /wheels

FROM ${BASE}
RUN useradd --system --uid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin dataloader
# Root's, as all that is installed: the service can't change what it runs.
WORKDIR /app
# Without extras: in a container the database is another machine. Loads from S3 need boto3.
COPY deploy/requirements.txt /wheels/
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --requirement /wheels/requirements.txt
COPY --from=builder /wheels/*.whl /wheels/
RUN pip install --no-cache-dir --no-index --no-deps /wheels/*.whl && rm -r /wheels
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/app DL_HOST=0.0.0.0 DL_PORT=8080
USER 10001
EXPOSE 8080
# `serve` as process 1 hands signals on to the service below it, and takes away ended processes: no shell between, and no other init.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['DL_PORT']}/health\", timeout=2)"]
ENTRYPOINT ["dataloader"]
CMD ["serve"]
