# An image of Taibai for NVIDIA GPUs. Build it in the repository, and train in any folder, which then gets the folder runs/:
#
#   docker build --tag=taibai .
#   docker run --gpus=all --shm-size=8g --user="$(id -u)" --env=HOME=/workspace --volume="$PWD:/workspace" taibai train --config=gpt2
#
# The base image tells the container runtime to mount the host's driver. CUDA's libraries are in jax's own packages.
FROM nvidia/cuda:12.9.1-base-ubuntu24.04

# The base image's tag fixes the distribution, and with it the version of Python.
# hadolint ignore=DL3008
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install --yes --no-install-recommends \
        ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH \
    PYTHONUNBUFFERED=1

# First only the requirements, so that changes of the code do not install the dependencies (several GB) again.
WORKDIR /opt/taibai
COPY requirements.txt requirements-cpu.txt ./
RUN python -m pip install --no-cache-dir --requirement requirements.txt

# The command taibai imports the project from here.
COPY . .
RUN python -m pip install --no-cache-dir --no-deps --editable . \
    && python -m compileall -q .

RUN useradd --uid=1001 --create-home taibai \
    && install --directory --owner=taibai /workspace
USER 1001
WORKDIR /workspace

ENTRYPOINT ["taibai"]
CMD ["--help"]
