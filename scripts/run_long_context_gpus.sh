#!/bin/sh
# Takes a trained GPT-2 124M from 1 024 to 262 144 tokens of context, on four GPUs of one machine that share each sequence.
#
#   scripts/run_long_context_gpus.sh [checkpoint]        default: what run_gpt2_124M.sh ends with
#
#   model    its 1 024 position embeddings are repeated 256 times; training tells the copies apart
#   data     python3 data/prepare.py fineweb10B          20 GB of shards; a window holds hundreds of documents
#   tokens   500 steps · 524 288 tokens = 2.62e8; two sequences a step, one after the other
#   FLOPs    6·N + 6·L·C·T = 6·325 016 064 + 6·12·768·262 144 = 1.95e9 + 1.45e10 = 1.64e10 a token;  4.31e18 in all.
#            Attention is nine tenths of the work.
#   time     41 minutes at 107 000 tokens/s, which is 44 % of the 4 · 989 TFLOP/s of 4 H100s or H200s; 2.45 s a sequence
#   memory   on each of 4, 65 536 tokens take what 64 sequences of 1 024 do, and the ring has sums of its own. --memory
#            beside these options says how much
set -e
cd "$(dirname "$0")/.."
from=${1:-log_gpt2_124M/model_00019073.bin}
out=log_long_context_gpus
T=262144
make train_gpt2cu
mkdir -p $out
[ -e $out/start.bin ] || python3 scripts/longer_context.py "$from" $out/start.bin $T
exec ./train_gpt2cu --gpus "${GPUS:-4}" --context-parallel "${GPUS:-4}" \
    -e $out/start.bin -i 'data/cache/fineweb10B/train_*.bin' -j 'data/cache/fineweb10B/val_*.bin' \
    --tokenizer data/cache/fineweb10B/gpt2_tokenizer.bin \
    -b 1 -t $T -d 524288 -x 500 -l 1e-4 -u 50 -q 0 -c 0.1 -k cosine -v 100 -m 4 -s 0 -n 100 -nk 2 -y 1 -o $out
