# xtrain on CPUs, from a wheel:
#
#     python -m build --wheel && docker build -f docker/cpu.Dockerfile -t xtrain:cpu dist
#
# PIP_EXTRA_INDEX_URL: an index with CPU builds of torch, which are smaller by gigabytes.
FROM python:3.11-slim-bookworm

ARG EXTRAS=data,hub,serve,transformers
ARG PIP_EXTRA_INDEX_URL=""

WORKDIR /tmp/wheel
COPY *.whl ./
# The wheel is the version.
# hadolint ignore=DL3013
RUN set -- ./*.whl \
 && pip install --no-cache-dir "$1[${EXTRAS}]" \
 && rm -r /tmp/wheel \
 && useradd --create-home --uid 1000 trainer

USER 1000
# Runs and specs: docker run -v "$PWD:/work" xtrain:cpu run spec.xtrain
WORKDIR /work
ENTRYPOINT ["xtrain"]
CMD ["--help"]
