#!/bin/sh
# GPT-2 350M (d24) as run_gpt2_350M.sh trains it and says, started by torchrun on one or several machines.
#
#   scripts/run_gpt2_350M_torchrun.sh                                           the 8 GPUs of this machine
#   NODES=2 NODE=0 MASTER=first scripts/run_gpt2_350M_torchrun.sh               of two: on the machine named first
#   NODES=2 NODE=1 MASTER=first scripts/run_gpt2_350M_torchrun.sh               … and on the other, within a minute
#
# Every machine has the data. The first one writes checkpoints. Several machines are not measured here. torchrun (of
# PyTorch) only starts the processes and says who is who. GPUS=4: so many of each machine.
export LAUNCH="torchrun --no-python --nnodes ${NODES:-1} --node-rank ${NODE:-0} --nproc-per-node ${GPUS:-8} \
    --master-addr ${MASTER:-127.0.0.1} --master-port ${PORT:-29500}"
exec "$(dirname "$0")/run_gpt2_350M.sh" "$@"
