#!/bin/sh
# GPT-2 774M (d36) from scratch on 16 billion tokens of FineWeb, on one GPU. Settings of llm.c's recipe for it, but for
# the length: that one takes 286 102 steps, at the rate below 17 days. Here each parameter gets 20 tokens.
#
#   data     python3 data/prepare.py fineweb100B --max-tokens 34e9          68 GB of shards
#   tokens   30 000 steps · 524 288 tokens = 1.57e10     20 for each of the 774 090 240 parameters
#   FLOPs    6·N + 6·L·C·T = 6·774 090 240 + 6·36·1280·1024 = 4.93e9 a token;  7.75e19 in all
#   time     44 hours at 100 000 tokens/s, which is 50 % of an H100's or H200's 989 TFLOP/s: smaller models reach that,
#            this one is not measured; every step prints its rate
#   memory   49.1 GiB of tensors at B=32, 31.9 at B=16, 22.4 at B=8: B=8 scripts/run_gpt2_774M.sh
#   4 GPUs   11.4 hours, 26.1 GiB each: scripts/run_gpt2_774M.sh --gpus 4
#   8 GPUs   5.7 hours, 24.6 GiB each, at 96 % of eight times what one does
#   disk     10.8 GB a checkpoint, two are kept; Ctrl-C writes one, the same command goes on
cd "$(dirname "$0")/.." && make train_gpt2cu && exec ./train_gpt2cu \
    -e d36 -i 'data/cache/fineweb100B/train_*.bin' -j 'data/cache/fineweb100B/val_*.bin' \
    --tokenizer data/cache/fineweb100B/gpt2_tokenizer.bin \
    -b "${B:-16}" -t 1024 -d 524288 -x 30000 -l 2.5e-4 -u 700 -q 0 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-16})) -s 5000 -g 144 -n 1000 -nk 2 -y 1 -o log_gpt2_774M "$@"
