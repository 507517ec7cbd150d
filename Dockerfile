# The image of every mode. Two targets: the default, and `smoke`, the same with vLLM's CPU build. Each step is
# containers/install.sh's, in layers: torch with CUDA, the other packages (both shared), vLLM's build, the source.
# Nothing here that buildah lacks (heredocs, COPY --link, a syntax line), so docker and podman build it alike.
ARG BASE_IMAGE=docker.io/library/debian@sha256:88200866dfff7ea7f5cbcb6ec7c8a701889efe6fe859fe64d6990e4b07ea4171

FROM ${BASE_IMAGE} AS system
ARG BASE_IMAGE
COPY containers/install.sh /opt/wherry-src/containers/
RUN /opt/wherry-src/containers/install.sh /opt/wherry --only system \
 && useradd --uid 10001 --create-home wherry \
 && install -d -m 1777 /work
# The driver: CUDA 12's minor version compatibility starts with it.
LABEL org.opencontainers.image.title="wherry" \
      org.opencontainers.image.description="Takes a large language model through prepare, train, merge, serve and eval" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      wherry.cuda="12.8" \
      wherry.minimum-driver="525.60.13"
ENV PATH=/opt/wherry/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    LANG=C.UTF-8 \
    PYTHONNOUSERSITE=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /work
ENTRYPOINT ["tini", "-s", "--", "/opt/wherry-src/entrypoints/entrypoint.sh"]
CMD ["--help"]
HEALTHCHECK --interval=30s --timeout=5s --start-period=30m \
  CMD ["/usr/bin/python3.11", "-I", "/opt/wherry-src/containers/healthcheck.py"]

# What installs (uv, the SBOM's maker) and what it fetched stay in cache mounts and never reach a layer.
FROM system AS torch
COPY containers/requirements/bootstrap.lock containers/requirements/cuda.lock /opt/wherry-src/containers/requirements/
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,torch,trim

FROM torch AS deps
COPY containers/requirements/cpu.lock containers/requirements/eval.lock /opt/wherry-src/containers/requirements/
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,deps,eval,trim

FROM deps AS smoke-vllm
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --vllm cpu --only bootstrap,vllm,trim
COPY pyproject.toml /opt/wherry-src/
COPY containers/verify.py /opt/wherry-src/containers/
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,sbom \
 && /opt/wherry/bin/python /opt/wherry-src/containers/verify.py cpu

# From here on a change of the source costs seconds: the imports are proved above, the versions once more below.
FROM smoke-vllm AS smoke
COPY . /opt/wherry-src
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,wherry \
 && /opt/wherry/bin/python /opt/wherry-src/containers/verify.py cpu --versions-only \
 && chmod -R a+rX /opt/wherry-src
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
ENV WHERRY_REVISION=${REVISION}
USER 10001:10001

# The same steps once more for the CUDA build: no stage can be a parameter of a target. Last, because an older podman
# builds every stage that stands before its target.
FROM deps AS cuda-vllm
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --vllm cuda --only bootstrap,vllm,trim
COPY pyproject.toml /opt/wherry-src/
COPY containers/verify.py /opt/wherry-src/containers/
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,sbom \
 && /opt/wherry/bin/python /opt/wherry-src/containers/verify.py cuda

FROM cuda-vllm AS cuda
COPY . /opt/wherry-src
RUN --mount=type=cache,target=/opt/wherry.bootstrap \
    --mount=type=cache,target=/root/.cache \
    /opt/wherry-src/containers/install.sh /opt/wherry --only bootstrap,wherry \
 && /opt/wherry/bin/python /opt/wherry-src/containers/verify.py cuda --versions-only \
 && chmod -R a+rX /opt/wherry-src
ARG VERSION=unknown
ARG REVISION=unknown
LABEL org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}"
ENV WHERRY_REVISION=${REVISION}
USER 10001:10001
