#!/bin/sh
# Takes a trained GPT-2 124M from 1 024 to 16 384 tokens of context, on one GPU.
#
#   scripts/run_long_context.sh [checkpoint]             default: what run_gpt2_124M.sh ends with
#
#   model    its 1 024 position embeddings are repeated 16 times; training tells the copies apart
#   data     python3 data/prepare.py fineweb10B          20 GB of shards; most documents are shorter than the window
#   tokens   1 000 steps · 524 288 tokens = 5.24e8
#   FLOPs    6·N + 6·L·C·T = 6·136 272 384 + 6·12·768·16 384 = 8.18e8 + 9.06e8 = 1.72e9 a token;  9.04e17 in all.
#            At this length attention is more than half of the work.
#   time     32 minutes at 270 000 tokens/s, which is 47 % of an H200's 989 TFLOP/s, as measured at B=1
#   memory   18.1 GiB of tensors at B=4, about what 64 sequences of 1 024 take: flash attention's memory is linear in T.
#            The T×T matrices of --attention naive alone would be 12·4·12·16 384²·2 B = 288 GiB.
#            B=1 scripts/run_long_context.sh needs 7.5 GiB
set -e
cd "$(dirname "$0")/.."
from=${1:-log_gpt2_124M/model_00019073.bin}
out=log_long_context
T=16384
make train_gpt2cu
mkdir -p $out
[ -e $out/start.bin ] || python3 scripts/longer_context.py "$from" $out/start.bin $T
exec ./train_gpt2cu -e $out/start.bin -i 'data/cache/fineweb10B/train_*.bin' -j 'data/cache/fineweb10B/val_*.bin' \
    --tokenizer data/cache/fineweb10B/gpt2_tokenizer.bin \
    -b "${B:-4}" -t $T -d 524288 -x 1000 -l 1e-4 -u 100 -q 0 -c 0.1 -k cosine \
    -v 100 -m $((64 / ${B:-4})) -s 0 -n 100 -nk 2 -y 1 -o $out
