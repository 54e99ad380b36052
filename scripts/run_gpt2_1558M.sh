#!/bin/sh
# Trains GPT-2 1558M (d48), "the" GPT-2, from scratch on 34 billion tokens of FineWeb, on one GPU,
# with the settings of llm.c's recipe for it (which reads FineWeb-Edu).
#
#   data     python3 data/prepare.py fineweb100B --max-tokens 34e9          68 GB of shards
#   tokens   32 000 steps · 1 048 576 tokens = 3.36e10   22 for each of the 1 557 686 400 parameters
#   FLOPs    6·N + 6·L·C·T = 6·1 557 686 400 + 6·48·1600·1024 = 9.82e9 per token;  3.29e20 in all
#   time     6.9 days at 56 000 tokens/s, as measured at B=16, which is 56 % of an H200's
#            989 TFLOP/s; every step prints its rate
#   memory   56.4 GiB of tensors at B=16, 41.3 at B=8, 33.7 at B=4: B=4 scripts/run_gpt2_1558M.sh
#   4 GPUs   43.3 hours, 44.8 GiB each: scripts/run_gpt2_1558M.sh --gpus 4
#   8 GPUs   21.7 hours, 41.9 GiB each, at 96 % of eight times one GPU's rate; neither was measured
#   disk     21.8 GB per checkpoint, two are kept; Ctrl-C writes one, and the same command resumes

cd "$(dirname "$0")/.." || exit
make train_gpt2cu || exit
exec $LAUNCH ./train_gpt2cu \
    -e d48 -i 'data/cache/fineweb100B/train_*.bin' -j 'data/cache/fineweb100B/val_*.bin' \
    --tokenizer data/cache/fineweb100B/gpt2_tokenizer.bin \
    -b "${B:-16}" -t 1024 -d 1048576 -x 32000 -l 6e-4 -u 700 -q 0.1 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-16})) -s 5000 -g 384 -n 1000 -nk 2 -y 1 -o log_gpt2_1558M "$@"
