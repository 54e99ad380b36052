#!/bin/sh
# measure.sh [--no-tests] [part…]   Measures on this machine's GPU what README's tables show, appends it to dev/results
# and rewrites the tables. All parts take about half an hour on an H200. A kernel that fails its tests is not timed:
# --no-tests is for the second call of a day.  COMMIT=… names the commit where there is no git.
#
#   bf16, fp32   attention: our kernels and PyTorch's     memory    the step by T
#   accuracy     attention's errors against fp64          default   ./train_gpt2cu as it comes
#   study        what fp16 sums would buy                 torch     losses beside PyTorch's
#   ring         chunks and rings: errors, speed          losses    flash's beside naive's
#   layers       each other layer alone                   train     tokens/s, memory, where the time goes
#   scaling      tokens/s and losses of several GPUs
set -e
cd "$(dirname "$0")/.."
all="bf16 fp32 accuracy study ring layers train memory default torch losses scaling"
parts= tests=yes
for part in "$@"; do
    case " $all " in
    *" $part "*) parts="$parts $part" ;;
    *)
        if [ "$part" = --no-tests ]; then
            tests=
        elif [ "$part" = --help ]; then
            sed -n '2,11s/^# \{0,1\}//p' "$0"
            exit
        else
            echo "measure.sh: $part: expected --no-tests or some of $all" >&2
            exit 2
        fi ;;
    esac
done
parts=${parts:-$all}
export COMMIT="${COMMIT:-$(git rev-parse --short=12 HEAD)}"
make -j"$(nproc)" train_gpt2cu benches dev/test_attention dev/test_layers dev/test_gpt2 >/dev/null
[ -z "$tests" ] || for t in dev/test_attention dev/test_layers dev/test_gpt2; do ./$t; done

# Beside PyTorch's kernels and training step where PyTorch is installed.
attention=./dev/bench_attention training=./dev/bench_train
if python3 -c 'import torch' 2>/dev/null; then
    attention="python3 dev/peers.py" training="python3 dev/peers_train.py"
fi
for part in $parts; do
    echo "== $part"
    case $part in
    bf16)
        $attention --json --dtype bf16 --shapes 4x1024,32x1024,64x1024,4x2048,4x4096,4x8192,2x16384
        $attention --json --dtype bf16 --hs 128 --shapes 32x1024,4x4096,2x16384 ;;
    fp32)
        $attention --json --dtype fp32 --shapes 4x1024,32x1024,4x4096,2x16384
        ./dev/bench_attention --json --dtype fp32 --quick --shapes 4x2048,4x8192,4x16384,1x32768,1x65536 ;;
    accuracy)
        for hs in 64 128; do ./dev/accuracy --json --hs $hs || echo "errors beyond their bounds"; done ;;
    study) ./dev/study_accumulation --json || echo "errors beyond what is allowed" ;;
    ring)
        ./dev/study_ring --json || echo "errors grow with the number of ranks"
        gpus=$(nvidia-smi -L | wc -l)
        for hs in "12 64" "32 128"; do
            [ "$gpus" -lt 2 ] || ./dev/bench_ring --json --gpus "$gpus" --heads "${hs% *}" --hs "${hs#* }"
        done
        if [ "$gpus" -gt 1 ]; then
            make dev/trace.so >/dev/null && python3 scripts/trace_ring.py --json --gpus "$gpus" || echo "no timeline"
        fi ;;
    layers) ./dev/bench_layers --json ;;
    train)
        $training --json --shapes 4x1024,8x1024,16x1024,64x1024
        ./dev/bench_train --json --precision fp32 --shapes 4x1024,16x1024
        ./dev/bench_train --json --attention naive --shapes 4x1024,16x1024
        ./dev/bench_train --json --breakdown ;;
    memory)
        ./dev/bench_train --json --precision fp32 --shapes 1x4096,1x8192,1x16384,1x32768 || echo "no more lengths"
        ./dev/bench_train --json --precision bf16 --shapes 1x16384,1x32768,1x65536 || echo "no more lengths" ;;
    default) python3 scripts/default_run.py ;;
    torch) python3 scripts/compare_torch.py --json || echo "no comparison with PyTorch" ;;
    scaling)
        if [ "$(nvidia-smi -L | grep -c '^GPU')" -gt 1 ]; then python3 scripts/scaling.py --json; else echo "one GPU"; fi ;;
    losses) python3 scripts/compare_losses.py --json || echo "naive and flash end at different losses" ;;
    esac
done
for what in attention accumulation ring memory; do python3 scripts/plot_$what.py || echo "no plots of $what"; done
python3 scripts/readme_tables.py
