#!/bin/sh
# launchers.sh   Trains the same 20 steps on two GPUs, started in every way that is to be had here, and compares the losses.
#
# As two machines: each of two ranks sees one GPU, and NCCL may use the network alone. Says what differs, and ends with 1.
cd "$(dirname "$0")/.."
. dev/within.sh
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 first="" failed=""
train="./train_gpt2cu -e d12 -b 8 -t 1024 -x 20 -v 0 -s 0"
by_hand() {  # rank program
    rank=$1
    shift
    RANK=$rank WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 12000)) GPT2_JOB=job$$ "$@"
}
two_machines() {
    export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
    for rank in 0 1; do
        by_hand $rank env CUDA_VISIBLE_DEVICES=$rank NCCL_HOSTID=machine$rank $train &
    done
    wait $! && wait
}
case $1 in two-machines) two_machines; exit ;; esac
compare() {  # name command…
    name=$1 log=$groups/$1.log
    shift
    command -v "$1" >/dev/null || { echo "$name: no $1 here"; return; }
    within 120 "$@" >"$log" 2>&1
    code=$?
    losses=$(sed -n 's/^step \([^|]*| loss [^|]*| norm [^|]*\).*/\1/p' "$log")
    if [ "$code" -ne 0 ] || [ "$(echo "$losses" | wc -l)" -ne 20 ]; then
        echo "$name: ended with $code"
        tail -n 20 "$log"
        failed=yes
        return
    fi
    [ "$first" ] || first=$losses
    if [ "$losses" = "$first" ]; then same="the same"; else same="OTHER"; failed=yes; fi
    echo "$name: $same losses and norms; $(sed -n 's/^20 steps in //p' "$log")"
}
compare gpus $train --gpus 2
compare torchrun torchrun --no-python --nproc-per-node 2 $train
compare mpirun mpirun -np 2 $train
compare two-machines scripts/launchers.sh two-machines
[ ! "$failed" ]
