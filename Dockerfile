# minisgl on the CPU, or on an NVIDIA GPU with the NVIDIA container toolkit.
#   docker build -t minisgl .
#   docker run --rm -v minisgl:/models minisgl run "What is the capital of France?"
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY minisgl minisgl
COPY cli cli
RUN pip install --no-cache-dir .

# Downloaded models outlive the container where this is a volume.
ENV MINISGL_CACHE=/models/minisgl HF_HOME=/models/huggingface
VOLUME /models

ENTRYPOINT ["minisgl"]
