#!/bin/sh
# launchers.sh [way…]   Trains the same 20 steps on two GPUs, started in every way (gpus, torchrun, mpirun, machines) that is
# to be had here, and compares the losses. Ends with 1 if they differ.
#
# All runs have --overlap 1. It is the default between machines alone, and it adds up the norm in another order.
# In the way "machines" each of two ranks sees one GPU, and NCCL may use the network alone, as on two machines.
cd "$(dirname "$0")/.." && self=$PWD/scripts/launchers.sh
. dev/test/within.sh
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
train="./train_gpt2cu -e d12 -b 8 -t 1024 -x 20 -v 0 -s 0 --overlap 1" first="" failed=""

start() {  # way
    case $1 in
    gpus) $train --gpus 2 ;;
    torchrun) torchrun --no-python --nproc-per-node 2 $train ;;
    mpirun) mpirun --bind-to none -np 2 sh -c "$train | cat" ;;  # its ranks would write as on a terminal
    machines)
        export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 GPT2_JOB=job$$
        export MASTER_PORT=$((20000 + $$ % 12000))
        RANK=1 CUDA_VISIBLE_DEVICES=1 NCCL_HOSTID=second $train &
        RANK=0 CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=first $train && wait $! ;;
    *) echo "launchers.sh: $1: expected gpus, torchrun, mpirun or machines" >&2; exit 2 ;;
    esac
}
if [ "$1" = --way ]; then start "$2"; exit; fi
for way in ${*:-gpus torchrun mpirun machines}; do
    case $way in torchrun | mpirun) command -v "$way" >/dev/null || { echo "$way: not here"; continue; } ;; esac
    log=$groups/$way.log code=0
    within 120 "$self" --way "$way" >"$log" 2>&1 || code=$?
    losses=$(sed -n 's/^step \([^|]*| loss [^|]*| norm [^|]*\).*/\1/p' "$log")
    if [ "$code" -ne 0 ] || [ "$(echo "$losses" | wc -l)" -ne 20 ]; then
        echo "$way: ended with $code"
        tail -n 20 "$log"
        failed=yes
        continue
    fi
    first=${first:-$losses} same="losses and norms as the first"
    if [ "$losses" != "$first" ]; then same="OTHER losses" failed=yes; fi
    echo "$way: $same; $(sed -n 's/^20 steps in //p' "$log")"
done
[ ! "$failed" ]
