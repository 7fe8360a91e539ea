# A replica with Hugging Face's stack: docker build -t mine -f images/examples/huggingface.Dockerfile images/examples
ARG SKERRY=skerry:gpu
FROM ${SKERRY}
ARG PIP_INDEX_URL
# accelerate is what its Trainer needs. torch stays the one of the image.
RUN pip install --no-cache-dir "transformers>=4.57,<6" accelerate
