# docker build -t train_gpt2cu . && docker run --rm -it --gpus all train_gpt2cu
# The build sees no GPU, so --build-arg ARCH="80 90a" says for which ones it is. By default PTX serves all from 8.0 on.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04
ARG ARCH
WORKDIR /train_gpt2cu
COPY . .
RUN make train_gpt2cu
ENTRYPOINT ["./train_gpt2cu"]
