# The image of a run on TPUs (EXTRA=tpu) or NVIDIA GPUs (EXTRA=cuda): Python, the locked dependencies, and this
# repository's code as the working directory.
#
#   docker build --build-arg EXTRA=tpu --tag IMAGE .
#   docker run --rm IMAGE
#
# docs/on_a_pod.md describes its use.
ARG EXTRA=tpu

FROM python:3.13-slim-bookworm AS code
ARG EXTRA
WORKDIR /xshard
# Before the code, so that a change of the code does not install them again.
COPY requirements/${EXTRA}_lock.txt requirements/
RUN python -m pip install --no-cache-dir --require-hashes -r requirements/${EXTRA}_lock.txt
COPY LICENSE README.md pyproject.toml ./
COPY xshard xshard
COPY launch launch
COPY configs configs
COPY experiments experiments
# The user of a run may not write here.
RUN python -m compileall -q . && useradd --uid 1000 --create-home xshard
# Python finds xshard and launch from every folder, such as that of an image built on this one.
ENV PYTHONPATH=/xshard PYTHONUNBUFFERED=1
# No entry point: `docker run IMAGE`, srun and a JobSet all give the whole command, as `python -m launch` does.
CMD ["python", "-m", "xshard.main", "--help"]

# With JAX_PLATFORMS, a run fails where JAX finds no accelerator. Otherwise it would train on the CPU.
FROM code AS tpu
# As root: in a container the devices of TPUs belong to root, and libtpu locks memory.
ENV JAX_PLATFORMS=tpu,cpu

FROM code AS cuda
ENV JAX_PLATFORMS=cuda,cpu
# A number, so that Kubernetes can see that it is not root.
USER 1000:1000

FROM ${EXTRA}
