# SparseBP in a container: a virtual environment built in one stage and copied into another of the same base.
#
#   make image                                   # CPU or GPU: whichever build of torch pip finds for this platform
#   make image BASE=my-registry/python:3.12      # another base; it needs Python 3.11 or newer with venv and pip
#   docker run --rm -v sparsebp:/data sparsebp:latest run recipes/quickstart.yaml
ARG BASE=python:3.12-slim

# What pip installs, alone: the layer with torch in it is built again only when this list changes.
FROM ${BASE} AS requirements
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /requirements.txt

FROM ${BASE} AS build
# Such as "--extra-index-url ..." for a build of torch without CUDA, which makes the image several GB smaller.
ARG PIP_OPTIONS=""
WORKDIR /build
COPY --from=requirements /requirements.txt ./
RUN python3 -m venv /venv && /venv/bin/pip install --no-cache-dir ${PIP_OPTIONS} --requirement requirements.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY sparsebp_cli sparsebp_cli
RUN /venv/bin/pip wheel --no-cache-dir --no-deps ${PIP_OPTIONS} --wheel-dir dist . \
 && /venv/bin/pip install --no-cache-dir --no-deps dist/*.whl

FROM ${BASE}
# Written by hand because not every slim base has useradd. The name is needed: libraries ask who they run as.
RUN echo 'sparsebp:x:10001:10001::/home/sparsebp:/bin/sh' >> /etc/passwd \
 && echo 'sparsebp:x:10001:' >> /etc/group \
 && mkdir -p /home/sparsebp /data \
 && chown 10001:10001 /home/sparsebp /data
COPY --from=build /venv /venv
WORKDIR /home/sparsebp
COPY recipes recipes
ENV PATH=/venv/bin:$PATH \
    HOME=/home/sparsebp \
    SPARSEBP_HOME=/data \
    PYTHONUNBUFFERED=1
USER 10001:10001
# Runs, checkpoints and the tracking database. A bind mount must be writable by user 10001.
VOLUME /data
ENTRYPOINT ["sparsebp"]
CMD ["--help"]
