#!/bin/sh
# launchers.sh [way…]   Trains the same 20 steps on two GPUs, started in several ways, and compares
# the losses. Exits with 1 if they differ. The ways are gpus, torchrun, mpirun and machines; by
# default all whose launcher is installed.
#
# All runs use --overlap 1, because it changes the order in which the norm is summed, and by default
# it is on only between machines. With "machines" each of the two ranks sees one GPU, and NCCL may
# use only the network, as on two machines.
cd "$(dirname "$0")/.." || exit
self=$PWD/scripts/launchers.sh
steps=20
train="./train_gpt2cu -e d12 -b 8 -t 1024 -x $steps -v 0 -s 0 --overlap 1"
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

start() {  # way
    case $1 in
    gpus)
        $train --gpus 2
        ;;
    torchrun)
        torchrun --no-python --nproc-per-node 2 $train
        ;;
    mpirun)
        # Without cat its ranks would write as if to a terminal.
        mpirun --bind-to none -np 2 sh -c "$train | cat"
        ;;
    machines)
        export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1
        export WORLD_SIZE=2 GPT2_JOB=job$$
        export MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 12000))
        RANK=1 CUDA_VISIBLE_DEVICES=1 NCCL_HOSTID=second $train &
        RANK=0 CUDA_VISIBLE_DEVICES=0 NCCL_HOSTID=first $train && wait $!
        ;;
    *)
        echo "launchers.sh: $1: no such way; give gpus, torchrun, mpirun or machines" >&2
        exit 2
        ;;
    esac
}

is_installed() {  # way
    case $1 in
    torchrun | mpirun) command -v "$1" >/dev/null ;;
    *) true ;;
    esac
}

# `within` cannot start a function, so it starts this script with --way.
if [ "$1" = --way ]; then
    start "$2"
    exit
fi

# Only now, because it makes a folder that a killed --way could not remove.
. dev/test/within.sh
first=""
failed=""
for way in ${*:-gpus torchrun mpirun machines}; do
    if ! is_installed "$way"; then
        echo "$way: skipped, because it is not installed"
        continue
    fi
    log=$scratch/$way.log
    code=0
    within 120 "$self" --way "$way" >"$log" 2>&1 || code=$?
    losses=$(sed -n 's/^step \([^|]*| loss [^|]*| norm [^|]*\).*/\1/p' "$log")
    if [ "$code" -ne 0 ] || [ "$(echo "$losses" | wc -l)" -ne "$steps" ]; then
        echo "$way: exited with code $code"
        tail -n 20 "$log"
        failed=yes
        continue
    fi

    first=${first:-$losses}
    verdict="same losses and norms as the first way"
    if [ "$losses" != "$first" ]; then
        verdict="DIFFERENT losses or norms"
        failed=yes
    fi
    echo "$way: $verdict; $(sed -n "s/^$steps steps in //p" "$log")"
done
[ ! "$failed" ]
