#!/bin/sh
# Trains GPT-2 124M from scratch on 10 billion tokens of FineWeb, with the settings of llm.c's
# recipe for it, on one GPU.
#
#   data     python3 data/prepare.py fineweb10B          20 GB of shards
#   tokens   19 073 steps · 524 288 tokens = 1.00e10     80 for each of the 124 475 904 parameters
#   FLOPs    6·N + 6·L·C·T = 6·124 475 904 + 6·12·768·1024 = 8.03e8 per token;  8.03e18 in all
#   time     4.3 hours at 640 000 tokens/s, as measured, which is 52 % of an H200's 989 TFLOP/s;
#            every step prints its rate
#   memory   17.9 GiB of tensors at B=64, 10.8 at B=32, 7.3 at B=16. B only changes how a step is
#            split into micro-batches: B=16 scripts/run_gpt2_124M.sh
#   4 GPUs   1.1 hours at 2 540 000 tokens/s, as measured, 17.0 GiB each:
#            scripts/run_gpt2_124M.sh --gpus 4
#   8 GPUs   0.6 hours, 16.8 GiB each, at 96 % of eight times one GPU's rate; not measured here
#   disk     1.7 GB per checkpoint, two are kept; Ctrl-C writes one, and the same command resumes
#   result   not measured here. Published for llm.c's trainer with these settings: a validation loss
#            of 3.28 on FineWeb (the baseline in github.com/KellerJordan/modded-nanogpt); OpenAI's
#            own weights have 3.29 there (github.com/karpathy/llm.c, discussion 481)
#
# Further options are passed on to the program: for example --hellaswag FILE, with a file that
# data/hellaswag.py wrote. 160 validation batches of 64 · 1024 are 10.5 million tokens, as many as
# llm.c uses on eight GPUs.

cd "$(dirname "$0")/.." || exit
make train_gpt2cu || exit
exec ./train_gpt2cu \
    -e d12 -i 'data/cache/fineweb10B/train_*.bin' -j 'data/cache/fineweb10B/val_*.bin' \
    --tokenizer data/cache/fineweb10B/gpt2_tokenizer.bin \
    -b "${B:-64}" -t 1024 -d 524288 -x 19073 -l 6e-4 -u 700 -q 0 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-64})) -s 2000 -g 144 -n 1000 -nk 2 -y 1 -o log_gpt2_124M "$@"
