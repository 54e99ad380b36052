#!/bin/sh
# Measures on this machine's GPU what README's tables show, appends it to dev/results and rewrites the tables. A kernel
# that fails its tests is not timed. About half an hour on an H200.  COMMIT=… names the commit where there is no git.
set -e
cd "$(dirname "$0")/.."
export COMMIT="${COMMIT:-$(git rev-parse --short=12 HEAD)}"
make -j"$(nproc)" train_gpt2cu benches dev/test_attention dev/test_layers dev/test_gpt2 >/dev/null
for t in dev/test_attention dev/test_layers dev/test_gpt2; do ./$t; done

# Beside PyTorch's kernels and training step where PyTorch is installed.
attention=./dev/bench_attention training=./dev/bench_train
if python3 -c 'import torch' 2>/dev/null; then
    attention="python3 dev/peers.py" training="python3 dev/peers_train.py"
fi
$attention --json --dtype bf16 --shapes 4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384
$attention --json --dtype bf16 --hs 128 --shapes 32x1024,4x4096,2x16384
$attention --json --dtype fp32 --shapes 4x1024,32x1024,4x4096,2x16384
./dev/bench_attention --json --dtype fp32 --quick --shapes 4x2048,4x8192,4x16384,1x32768,1x65536
for hs in 64 128; do ./dev/accuracy --json --hs $hs || echo "errors beyond their bounds"; done
./dev/study_accumulation --json || echo "study_accumulation: errors beyond what is allowed"
./dev/bench_layers --json
$training --json --shapes 4x1024,8x1024,16x1024,64x1024
./dev/bench_train --precision fp32 --shapes 4x1024,16x1024 --json
./dev/bench_train --attention naive --shapes 4x1024,16x1024 --json
./dev/bench_train --breakdown --json
./dev/bench_train --json --precision fp32 --shapes 1x4096,1x8192,1x16384,1x32768 || echo "no more lengths"
./dev/bench_train --json --precision bf16 --shapes 1x16384,1x32768,1x65536 || echo "no more lengths"
python3 scripts/default_run.py
python3 scripts/compare_torch.py --json || echo "no comparison with PyTorch"
python3 scripts/compare_losses.py --json || echo "naive and flash end at different losses"
for what in attention accumulation memory; do python3 scripts/plot_$what.py || echo "no plots of $what"; done
python3 scripts/readme_tables.py
