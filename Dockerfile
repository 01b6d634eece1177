# SparseBP in a container: a virtual environment built in one stage and copied into another of the same base.
#
#   make image                                   # with CUDA inside (VARIANT=cuda)
#   make image VARIANT=cpu                       # several GB smaller
#   make image BASE=my-registry/python:3.12      # another base; it needs Python 3.11 or newer with venv and pip
#   docker run --rm -v sparsebp:/data sparsebp:latest run quickstart
ARG BASE=python:3.12-slim

# What pip installs, alone: the layer with torch in it is built again only when this list changes.
FROM ${BASE} AS requirements
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > /requirements.txt

FROM ${BASE} AS build
# cuda: torch as pip finds it, which on Linux brings CUDA's libraries; cpu: PyTorch's own builds without them.
ARG VARIANT=cuda
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
ARG PIP_OPTIONS=""
WORKDIR /build
COPY --from=requirements /requirements.txt ./
RUN python3 -m venv /venv \
 && case "${VARIANT}" in \
      cuda) ;; \
      cpu) grep '^torch[<>=]' requirements.txt > torch.txt \
        && /venv/bin/pip install --no-cache-dir --no-deps ${PIP_OPTIONS} --index-url "${CPU_INDEX}" --requirement torch.txt ;; \
      *) echo "VARIANT must be cuda or cpu, got ${VARIANT}" >&2; exit 2 ;; \
    esac \
 && /venv/bin/pip install --no-cache-dir ${PIP_OPTIONS} --requirement requirements.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY sparsebp_cli sparsebp_cli
COPY recipes recipes
COPY plugins/sparsebp-audit plugins/sparsebp-audit
COPY plugins/sparsebp-lab plugins/sparsebp-lab
COPY plugins/sparsebp-shelf plugins/sparsebp-shelf
COPY plugins/sparsebp-tools plugins/sparsebp-tools
RUN /venv/bin/pip wheel --no-cache-dir --no-deps ${PIP_OPTIONS} --wheel-dir dist . ./plugins/sparsebp-audit ./plugins/sparsebp-lab ./plugins/sparsebp-shelf ./plugins/sparsebp-tools \
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
    SPARSEBP_HOME=/data
USER 10001:10001
# Runs, checkpoints and the tracking database. A bind mount must be writable by user 10001.
VOLUME /data
ENTRYPOINT ["sparsebp"]
CMD ["--help"]
