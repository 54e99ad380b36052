# docker build -t train_gpt2cu . && docker run --rm -it --gpus all train_gpt2cu
#
# docker build sees no GPU. Without --build-arg ARCH="80 90a" the program contains code for 8.0, and
# PTX for later GPUs.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
ARG ARCH
WORKDIR /train_gpt2cu
COPY . .
RUN make train_gpt2cu
ENTRYPOINT ["./train_gpt2cu"]
