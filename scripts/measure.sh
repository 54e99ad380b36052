#!/bin/sh
# measure.sh [part…]   Measures on this machine's GPU what dev/README.md shows, appends the rows to
# dev/results and rewrites the tables. Stops at the first failure. All parts take about 40 minutes
# on an H200. What fails validation is not timed. Without git: see scripts/tree.sh.
#
#   bf16, fp32   attention: our kernels and PyTorch's   memory    a training step by T
#   accuracy     attention's errors against fp64        default   ./train_gpt2cu without options
#   study        what fp16 sums would gain              torch     losses compared with PyTorch's
#   ring         the ring: errors by ranks, speed       train     tokens/s, memory, time per call
#   scaling      tokens/s and losses on several GPUs    start     seconds to the end of step 1
set -e
cd "$(dirname "$0")/.."
all="bf16 fp32 accuracy study ring train memory default start torch scaling"

if [ "$1" = --help ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0"
    exit
fi
for part in "$@"; do
    case " $all " in
    *" $part "*) ;;
    *)
        echo "measure.sh: $part: no such part; give some of $all" >&2
        exit 2
        ;;
    esac
done

gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU') || true
memory_mib=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -n 1)
# If PyTorch is installed, its kernels and its training step are measured in the same runs as ours.
if python3 -c 'import torch' 2>/dev/null; then
    torch=yes
    attention="python3 dev/bench/peers.py"
    training="python3 dev/bench/peers_train.py"
else
    torch=
    attention=./dev/bench_attention
    training=./dev/bench_train
fi

measure() {  # part
    case $1 in
    bf16)
        $attention --json --dtype bf16 --shapes 4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384
        $attention --json --dtype bf16 --hs 128 --shapes 32x1024,4x4096,2x16384
        ;;
    fp32)
        $attention --json --dtype fp32 --shapes 4x1024,32x1024,4x4096,2x16384
        ./dev/bench_attention --json --dtype fp32 --quick \
            --shapes 4x2048,4x8192,4x16384,1x32768,1x65536
        ;;
    accuracy)
        ./dev/accuracy --json --hs 64
        ./dev/accuracy --json --hs 128
        ;;
    study)
        ./dev/study_accumulation --json
        ;;
    ring)
        ./dev/study_ring --json
        if [ "$gpus" -gt 1 ]; then
            ./dev/bench_ring --json --gpus "$gpus" --heads 12 --hs 64
            ./dev/bench_ring --json --gpus "$gpus" --heads 32 --hs 128
        fi
        ;;
    train)
        $training --json --shapes 4x1024,16x1024,64x1024
        ./dev/bench_train --json --precision fp32 --shapes 4x1024,16x1024
        ./dev/bench_train --json --attention naive --shapes 4x1024,16x1024
        ./dev/bench_train --json --breakdown
        if [ "${memory_mib:-0}" -gt 75000 ]; then
            # GPT-2 1558M takes up to 66 GiB.
            for size in "--model d24 --shapes 32x1024" "--model d48 --shapes 16x1024"; do
                $training --json $size  # several words
                ./dev/bench_train --json --breakdown $size
            done
        fi
        ;;
    memory)
        ./dev/bench_train --json --precision fp32 --shapes 1x4096,1x8192,1x16384,1x32768
        ./dev/bench_train --json --precision bf16 --shapes 1x16384,1x32768,1x65536
        ;;
    default)
        python3 scripts/default_run.py
        ;;
    start)
        python3 scripts/start.py --models d12,d48 --resume --json
        ;;
    torch)
        if [ "$torch" ]; then
            python3 scripts/compare_torch.py --json
            python3 scripts/compare_torch.py --json --precision bf16
        else
            echo "skipped: needs PyTorch"
        fi
        ;;
    scaling)
        if [ "$gpus" -gt 1 ]; then
            python3 scripts/scaling.py --json
        else
            echo "skipped: needs several GPUs"
        fi
        ;;
    esac
}

RUN=$(date -u +%Y-%m-%dT%H:%M:%SZ)  # marks all rows of this call
export RUN
make train_gpt2cu benches >/dev/null
for part in ${*:-$all}; do
    echo "== $part"
    measure "$part"
done
python3 scripts/tables.py || echo "the rows are in dev/results, but the tables are unchanged"
