# minisgl on a CPU. For a GPU begin from a CUDA development image with Python, and install ".[cuda]": kernels are compiled
# at first use, which needs gcc, nvcc and ninja; `minisgl doctor` says what is missing.
#   docker build -t minisgl .
#   docker run --rm -v minisgl:/models minisgl run "What is the capital of France?"
#   docker run --rm -p 8000:8000 -v minisgl:/models -e MINISGL_API_KEY=secret minisgl serve --host 0.0.0.0
FROM python:3.12-slim

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY minisgl minisgl
COPY cli cli
RUN pip install --no-cache-dir .

# Downloaded models outlive the container where this is a volume.
ENV MINISGL_CACHE=/models/minisgl HF_HOME=/models/huggingface
VOLUME /models

# Of `minisgl serve`. `docker stop --time 40` gives what runs its 30 seconds to end.
EXPOSE 8000

ENTRYPOINT ["minisgl"]
