#!/bin/sh
# GPT-2 350M (d24) as run_gpt2_350M.sh trains it, started by torchrun on one or several machines.
#
#   scripts/run_gpt2_350M_torchrun.sh                                           the 8 GPUs of this machine
#   NODES=2 NODE=0 MASTER=first scripts/run_gpt2_350M_torchrun.sh               of two: on the machine named first
#   NODES=2 NODE=1 MASTER=first scripts/run_gpt2_350M_torchrun.sh               … and on the other, within a minute
#
#   data     python3 data/prepare.py fineweb100B --max-tokens 34e9          68 GB of shards, on every machine
#   tokens   60 000 steps · 524 288 tokens = 3.15e10     89 for each of the 354 871 296 parameters
#   FLOPs    6·N + 6·L·C·T = 6·354 871 296 + 6·24·1024·1024 = 2.28e9 a token;  7.17e19 in all
#   time     4.9 hours at 1 770 000 tokens/s, which is 51 % of the 8 · 989 TFLOP/s of 8 H100s or H200s: 96 % of eight
#            times what one is taken to do; eight, and several machines, are not measured here
#   memory   22.8 GiB of tensors on each of 8 at B=32
#   disk     5.0 GB a checkpoint on the first machine, two are kept; Ctrl-C writes one, the same command goes on
#
# torchrun (of PyTorch) only starts the processes and says who is who. GPUS=4: so many of each machine.
cd "$(dirname "$0")/.." && make train_gpt2cu && exec torchrun --no-python \
    --nnodes "${NODES:-1}" --node-rank "${NODE:-0}" --nproc-per-node "${GPUS:-8}" \
    --master-addr "${MASTER:-127.0.0.1}" --master-port "${PORT:-29500}" ./train_gpt2cu \
    -e d24 -i 'data/cache/fineweb100B/train_*.bin' -j 'data/cache/fineweb100B/val_*.bin' \
    --tokenizer data/cache/fineweb100B/gpt2_tokenizer.bin \
    -b "${B:-32}" -t 1024 -d 524288 -x 60000 -l 3e-4 -u 700 -q 0 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-32})) -s 5000 -g 144 -n 1000 -nk 2 -y 1 -o log_gpt2_350M "$@"
