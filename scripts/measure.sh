#!/bin/sh
# measure.sh [part…]   Measures on this machine's GPU what dev/README.md shows, appends it to dev/results and rewrites the
# tables. It ends at the first failure. All parts take about half an hour on an H200. Benchmarks time nothing that fails
# validation. Without git: see scripts/tree.sh.
#
#   bf16, fp32   attention: our kernels and PyTorch's     memory    the step by T
#   accuracy     attention's errors against fp64          default   ./train_gpt2cu as it comes
#   study        what fp16 sums would buy                 torch     losses beside PyTorch's
#   ring         the ring: errors by ranks, speed         train     tokens/s, memory, where the time goes
#   scaling      tokens/s and losses of several GPUs      start     seconds to the end of step 1
set -e
cd "$(dirname "$0")/.."
all="bf16 fp32 accuracy study ring train memory default start torch scaling"
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
# Beside PyTorch's kernels and training step where PyTorch is installed.
attention=./dev/bench_attention training=./dev/bench_train torch=
if python3 -c 'import torch' 2>/dev/null; then
    attention="python3 dev/bench/peers.py" training="python3 dev/bench/peers_train.py" torch=yes
fi
measure() {  # part
    case $1 in
    bf16)
        $attention --json --dtype bf16 --shapes 4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384
        $attention --json --dtype bf16 --hs 128 --shapes 32x1024,4x4096,2x16384 ;;
    fp32)
        $attention --json --dtype fp32 --shapes 4x1024,32x1024,4x4096,2x16384
        ./dev/bench_attention --json --dtype fp32 --quick --shapes 4x2048,4x8192,4x16384,1x32768,1x65536 ;;
    accuracy)
        ./dev/accuracy --json --hs 64
        ./dev/accuracy --json --hs 128 ;;
    study) ./dev/study_accumulation --json ;;
    ring)
        ./dev/study_ring --json
        [ "$gpus" -gt 1 ] || return 0
        ./dev/bench_ring --json --gpus "$gpus" --heads 12 --hs 64
        ./dev/bench_ring --json --gpus "$gpus" --heads 32 --hs 128 ;;
    train)
        $training --json --shapes 4x1024,16x1024,64x1024
        ./dev/bench_train --json --precision fp32 --shapes 4x1024,16x1024
        ./dev/bench_train --json --attention naive --shapes 4x1024,16x1024
        ./dev/bench_train --json --breakdown ;;
    memory)
        ./dev/bench_train --json --precision fp32 --shapes 1x4096,1x8192,1x16384,1x32768
        ./dev/bench_train --json --precision bf16 --shapes 1x16384,1x32768,1x65536 ;;
    default) python3 scripts/default_run.py ;;
    start) python3 scripts/start.py --models d12,d48 --resume --json ;;
    torch)
        [ "$torch" ] || { echo "no PyTorch"; return 0; }
        python3 scripts/compare_torch.py --json
        python3 scripts/compare_torch.py --json --precision bf16 ;;
    scaling) if [ "$gpus" -gt 1 ]; then python3 scripts/scaling.py --json; else echo "one GPU"; fi ;;
    esac
}
for part in "$@"; do
    case "$part: $all " in
    --help:*)
        sed -n '2,10s/^# \{0,1\}//p' "$0"
        exit ;;
    *:*" $part "*) ;;
    *)
        echo "measure.sh: $part: expected some of $all" >&2
        exit 2 ;;
    esac
done
export RUN="$(date -u +%Y-%m-%dT%H:%M:%SZ)"  # of all rows of this call
make train_gpt2cu benches >/dev/null
for part in ${*:-$all}; do
    echo "== $part"
    measure "$part"
done
python3 scripts/tables.py || echo "the rows are in dev/results, but the tables are as they were"
