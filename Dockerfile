# GPU (default):  docker build -t adashift .
#                 docker run --rm --gpus all -v "$PWD/results:/adashift/results" adashift make figure-1
# CPU:            docker build -t adashift:cpu --build-arg DEVICE=cpu --build-arg TORCH_CPU_INDEX=<PyTorch's CPU wheel index> .
# The GPU image needs only the NVIDIA container runtime: the torch wheels include the CUDA libraries.
# Add --user "$(id -u):$(id -g)" to `docker run` if results/ must belong to you.

FROM python:3.11-slim

RUN apt-get update \
 && apt-get install -y --no-install-recommends git make gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/* \
 && git config --system --add safe.directory /adashift

ENV VENV=/opt/venv PATH=/opt/venv/bin:$PATH PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /adashift
COPY requirements.lock ./

# CPU: the same versions of torch and torchvision from the CPU index, and the rest of the lock without CUDA.
ARG DEVICE=gpu
ARG TORCH_CPU_INDEX=
RUN set -e; \
    case "$DEVICE:$TORCH_CPU_INDEX" in \
      gpu:*) python -m venv "$VENV"; \
        pip install -r requirements.lock ;; \
      cpu:?*) python -m venv "$VENV"; \
        awk '/^[a-z0-9]/ { keep = !/^(torch|torchvision|triton|nvidia-[^=]*|cuda-[^=]*)==/ } keep' requirements.lock > /tmp/cpu.lock; \
        pip install -r /tmp/cpu.lock; \
        pip install --no-deps --index-url "$TORCH_CPU_INDEX" $(awk '/^torch(vision)?==/ { print $1 }' requirements.lock); \
        rm /tmp/cpu.lock ;; \
      cpu:) echo "TORCH_CPU_INDEX is empty; DEVICE=cpu needs --build-arg TORCH_CPU_INDEX=<PyTorch's CPU wheel index>" >&2; exit 1 ;; \
      *) echo "DEVICE is $DEVICE; it must be gpu or cpu" >&2; exit 1 ;; \
    esac; \
    pip check

# The stamp is newer than the lock, so `make` installs nothing in the container.
COPY . .
RUN pip install --no-deps --no-build-isolation -e . \
 && touch "$VENV/.installed"

# All users can write to results, data, caches and the home folder, so `docker run --user` works with any id.
ENV HOME=/home/adashift
RUN useradd --home-dir "$HOME" --create-home adashift \
 && mkdir -p results data \
 && chmod -R a+rwX "$HOME" results data \
 && chmod a+rwX .
USER adashift
VOLUME ["/adashift/results", "/adashift/data"]
CMD ["make", "help"]
