#!/bin/sh
# GPT-2 124M as run_gpt2_124M.sh trains it, on several GPUs of one machine: GPUS=8 scripts/run_gpt2_124M_gpus.sh
#
#   data     python3 data/prepare.py fineweb10B          20 GB of shards
#   tokens   19 073 steps · 524 288 tokens = 1.00e10     the same in the same order on any number of GPUs
#   FLOPs    6·N + 6·L·C·T = 6·124 475 904 + 6·12·768·1024 = 8.03e8 a token;  8.03e18 in all
#   time     66 minutes at 2 540 000 tokens/s, which is 52 % of the 4 · 989 TFLOP/s of 4 H200s, as measured: 97 % of four
#            times what one does
#   memory   16.2 GiB of tensors on each of 4 at B=64: the optimizer's state is divided among them (ZeRO-1)
#   8 GPUs   0.6 hours, 15.9 GiB each, at 96 % of eight times what one does; not measured here
#   disk     1.7 GB a checkpoint, two are kept; Ctrl-C writes one, and the same command, on as many GPUs or fewer, goes on
#
# -b is of a GPU: GPUS · B · 1024 has to divide 524 288, as 1, 2, 4 or 8 GPUs with B=64 do.
set -e
cd "$(dirname "$0")/.."
make train_gpt2cu
exec ./train_gpt2cu --gpus "${GPUS:-4}" \
    -e d12 -i 'data/cache/fineweb10B/train_*.bin' -j 'data/cache/fineweb10B/val_*.bin' \
    --tokenizer data/cache/fineweb10B/gpt2_tokenizer.bin \
    -b "${B:-64}" -t 1024 -d 524288 -x 19073 -l 6e-4 -u 700 -q 0 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-64})) -s 2000 -g 144 -n 1000 -nk 2 -y 1 -o log_gpt2_124M "$@"
