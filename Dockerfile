# syntax=docker/dockerfile:1
#
# GPU image:  docker build --build-arg ACCELERATOR=cuda [--build-arg TORCH_INDEX=URL of PyTorch's CUDA index] -t jetspecpp .
# CPU image:  docker build --build-arg TORCH_INDEX=URL of PyTorch's CPU index -t jetspecpp .
# Its commit, for /version, is not in the image's sources: add --build-arg GIT_COMMIT=$(git rev-parse HEAD).
# Run:        docker run --gpus all -p 8000:8000 -v jetspecpp-cache:/cache jetspecpp serve --host 0.0.0.0 --model demo

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
ARG TORCH_INDEX=""
ARG ACCELERATOR=cpu
ARG GIT_COMMIT=""
RUN apt-get update \
    && apt-get install --yes --no-install-recommends make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
# The Makefile's own install, into a folder that the second stage takes over; the package as a wheel, without tools.
RUN GIT_COMMIT="${GIT_COMMIT}" make install VENV=/opt/jetspecpp INSTALL="'.[otel]'" \
    TORCH_INDEX="${TORCH_INDEX}" PIP_NO_CACHE_DIR=1
# A CPU build of torch in a GPU image would start, and then serve at a hundredth of the speed.
RUN if [ "${ACCELERATOR}" = cuda ]; then \
        /opt/jetspecpp/bin/python -c 'import torch; assert torch.version.cuda, "this torch has no CUDA: set TORCH_INDEX"'; \
    fi

FROM ${PYTHON_IMAGE}
# The compiler is for the CPU kernels, which are built for the machine they run on, into the cache volume.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 jetspecpp \
    && useradd --uid 10001 --gid 10001 --create-home --shell /usr/sbin/nologin jetspecpp \
    && install --directory --owner=10001 --group=10001 /cache
COPY --from=build /opt/jetspecpp /opt/jetspecpp
ENV PATH=/opt/jetspecpp/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    XDG_CACHE_HOME=/cache \
    HF_HOME=/cache/huggingface
USER 10001:10001
WORKDIR /home/jetspecpp
VOLUME ["/cache"]
EXPOSE 8000
# The first start fetches and converts the model, hence the long grace period.
HEALTHCHECK --interval=10s --timeout=5s --start-period=300s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "jetspecpp"]
CMD ["serve", "--host", "0.0.0.0", "--model", "demo"]
