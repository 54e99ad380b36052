#!/bin/sh
# Measures on this machine's GPU what README's tables show, appends it to dev/results and rewrites the tables. A kernel that fails
# its tests is not timed. Takes about ten minutes on an H200.   COMMIT=… names the commit where there is no git.
set -e
cd "$(dirname "$0")/.."
export COMMIT="${COMMIT:-$(git rev-parse --short=12 HEAD)}"
make -j"$(nproc)" train_gpt2cu benches dev/test_attention dev/test_layers dev/test_gpt2 >/dev/null
for t in dev/test_attention dev/test_layers dev/test_gpt2; do ./$t; done

./dev/bench_attention --dtype bf16 --shapes 4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384 --json
./dev/bench_attention --dtype bf16 --hs 128 --shapes 32x1024,4x4096,2x16384 --json
./dev/bench_attention --dtype fp32 --shapes 4x1024,32x1024,4x4096 --json
./dev/bench_train --json
./dev/bench_train --precision fp32 --shapes 4x1024,16x1024 --json
./dev/bench_train --attention naive --shapes 4x1024,16x1024 --json
python3 scripts/compare_torch.py --json || echo "no comparison with PyTorch"
python3 scripts/readme_tables.py
