#!/bin/sh
# Trains GPT-2 350M (d24) from scratch on 31 billion tokens of FineWeb, with the settings of llm.c's
# recipe for it, on one GPU.
#
#   data     python3 data/prepare.py fineweb100B --max-tokens 34e9          68 GB of shards
#   tokens   60 000 steps · 524 288 tokens = 3.15e10     89 for each of the 354 871 296 parameters
#   FLOPs    6·N + 6·L·C·T = 6·354 871 296 + 6·24·1024·1024 = 2.28e9 per token;  7.17e19 in all
#   time     38 hours at 230 000 tokens/s, which is 53 % of an H200's 989 TFLOP/s (measured: 56 % at
#            B=64); every step prints its rate
#   memory   44.6 GiB of tensors at B=64, 26.1 at B=32, 16.8 at B=16: B=16 scripts/run_gpt2_350M.sh
#   4 GPUs   9.9 hours, 23.4 GiB each: scripts/run_gpt2_350M.sh --gpus 4
#   8 GPUs   4.9 hours, 22.8 GiB each, at 96 % of eight times one GPU's rate; neither was measured
#   torchrun LAUNCH="torchrun --no-python --nproc-per-node 8" scripts/run_gpt2_350M.sh. On several
#            machines add the options that parallel/README.md shows
#   disk     5.0 GB per checkpoint, two are kept; Ctrl-C writes one, and the same command resumes

cd "$(dirname "$0")/.." || exit
make train_gpt2cu || exit
exec $LAUNCH ./train_gpt2cu \
    -e d24 -i 'data/cache/fineweb100B/train_*.bin' -j 'data/cache/fineweb100B/val_*.bin' \
    --tokenizer data/cache/fineweb100B/gpt2_tokenizer.bin \
    -b "${B:-32}" -t 1024 -d 524288 -x 60000 -l 3e-4 -u 700 -q 0 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-32})) -s 5000 -g 144 -n 1000 -nk 2 -y 1 -o log_gpt2_350M "$@"
