#!/bin/sh
#SBATCH --job-name=gpt2_1558M --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=4
#SBATCH --time=10:00:00 --signal=TERM@300
# GPT-2 1558M (d48) as run_gpt2_1558M.sh trains it and says, under Slurm: a task for each of 32 GPUs on 4 machines.
#
#   sbatch scripts/run_gpt2_1558M_slurm.sh              from this repository's folder, which all machines share
#
#   time     5.8 hours at 1 610 000 tokens/s, which is 50 % of the 32 · 989 TFLOP/s of 32 H100s or H200s: 90 % of 32
#            times what one does; several machines are not measured here
#   memory   56.4 GiB of tensors on each at B=16: 1600 channels cannot be divided among 32 (ZeRO-1), as they can among 8
#   end      five minutes before its time is over the job writes a checkpoint and ends, and the same sbatch goes on
#
# --nodes=2 on sbatch's command line takes precedence over the line above; tasks · B · 1024 has to divide 1 048 576.
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT LAUNCH="srun --kill-on-bad-exit"
exec scripts/run_gpt2_1558M.sh "$@"
