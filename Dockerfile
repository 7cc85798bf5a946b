# An image in which every container is a node of a run.
#
# Without a GPU (the embedded engine), from the root of a checkout:
#
#     docker build --tag flagpost:0.1.0 .
#
# With GPUs: vLLM's own image brings CUDA, torch and vLLM, in versions that fit each other, so the constraints
# of this repository must not replace them:
#
#     docker build --tag flagpost:0.1.0 --build-arg BASE=vllm/vllm-openai:v0.32.0 --build-arg CONSTRAINTS=/dev/null .
#
# Any base will do that has Python 3.11 or newer with pip and venv.
ARG BASE=python:3.11-slim
FROM ${BASE}

# Extras of the package, e.g. "math,lora"; what they are for is in docs/engines.md.
ARG EXTRAS=""
ARG CONSTRAINTS=constraints.txt
# Another package index for this build only, e.g. one with builds of torch that need no CUDA libraries.
ARG PIP_EXTRA_INDEX_URL

WORKDIR /usr/src/flagpost
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY scripts/flagpost_command.py scripts/
COPY coordinator coordinator
COPY rollout rollout
COPY trainer trainer
# An environment of its own that sees what the base has installed: it works where the system's Python refuses packages.
RUN python3 -m venv --system-site-packages /opt/flagpost
RUN /opt/flagpost/bin/python -m pip install --no-cache-dir --constraint "${CONSTRAINTS}" ".${EXTRAS:+[$EXTRAS]}"
ENV PATH=/opt/flagpost/bin:$PATH

# A node needs no root. The number lets Kubernetes see that; no base has a user with it.
RUN useradd --create-home --uid 10001 flagpost
USER 10001
WORKDIR /home/flagpost

# Log lines reach `docker logs` at once.
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["run"]
CMD ["--help"]
