# xtrain on NVIDIA GPUs, from a wheel:
#
#     python -m build --wheel && docker build -f docker/cuda.Dockerfile -t xtrain:cuda dist
#     docker run --gpus all --shm-size=1g -v "$PWD:/work" xtrain:cuda run spec.xtrain
#
# torch's wheels bring the CUDA libraries; the driver comes from the host. This base has the C compiler and Python.h, which
# Triton needs for `compile` and flex attention.
FROM python:3.11-bookworm

ARG EXTRAS=data,hub,serve,transformers
ARG PIP_EXTRA_INDEX_URL=""
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

WORKDIR /tmp/wheel
COPY *.whl ./
# The wheel is the version.
# hadolint ignore=DL3013
RUN set -- ./*.whl \
 && pip install --no-cache-dir "$1[${EXTRAS}]" \
 && rm -r /tmp/wheel \
 && useradd --create-home --uid 1000 trainer

USER 1000
WORKDIR /work
ENTRYPOINT ["xtrain"]
CMD ["--help"]
