# skerry on a base of one's own that has Python and torch: docker build -t mine -f images/examples/own-base.Dockerfile .
# The context is the root of the checkout. With a released skerry: RUN pip install 'skerry[runtime]'
ARG BASE=pytorch/pytorch:2.8.0-cuda12.6-cudnn9-runtime
FROM ${BASE}
ARG PIP_INDEX_URL
ARG VERSION=0.1.dev0
COPY pyproject.toml README.md LICENSE /src/
COPY runtime/skerry /src/runtime/skerry
COPY infra/skerry /src/infra/skerry
RUN SETUPTOOLS_SCM_PRETEND_VERSION=${VERSION} pip install --no-cache-dir '/src[runtime]'
ENV PYTHONUNBUFFERED=1 SKERRY_RUN_AS=root
ENTRYPOINT ["skerry-replica"]
CMD ["run"]
