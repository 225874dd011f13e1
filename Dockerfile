# One process, all workers inside; configured by DL_DB_DSN, WORKERS_JSON and the other settings (docs/settings.md). DL_TOKENS is
# needed, because the API answers to more than its own machine. Your tasks come with an image on top of this one:
# COPY my_module.py . and CMD ["serve", "--tasks", "my_module:tasks"].

FROM python:3.12-slim AS builder
WORKDIR /source
RUN pip install --no-cache-dir build
COPY . .
RUN python -m build --wheel --outdir /wheels

FROM python:3.12-slim
RUN useradd --system --uid 10001 --create-home --home-dir /app dataloader
WORKDIR /app
COPY --from=builder /wheels /wheels
COPY constraints.txt /wheels/
# Without extras: in a container the database is another machine. Loads from S3 and `processes=True` need boto3 and trio-parallel.
RUN pip install --no-cache-dir --constraint /wheels/constraints.txt /wheels/*.whl && rm -r /wheels
ENV PYTHONUNBUFFERED=1 PYTHONPATH=/app DL_HOST=0.0.0.0 DL_PORT=8080
USER 10001
EXPOSE 8080
# The command runs as process 1 and takes SIGTERM itself: no shell between.
HEALTHCHECK --interval=10s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request; urllib.request.urlopen(f\"http://127.0.0.1:{os.environ['DL_PORT']}/health\", timeout=2)"]
ENTRYPOINT ["dataloader"]
CMD ["serve"]
