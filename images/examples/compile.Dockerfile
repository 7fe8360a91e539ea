# A replica that compiles its model: docker build -t mine -f images/examples/compile.Dockerfile images/examples
# The same as --build-arg TOOLCHAIN=gcc of the image itself, for an image that exists already.
ARG SKERRY=skerry:gpu
FROM ${SKERRY}
RUN apt-get update -qq && apt-get install -qq -y --no-install-recommends g++ libc6-dev libpython3-dev \
    && rm -rf /var/lib/apt/lists/*
