#!/bin/sh
#SBATCH --job-name=gpt2_1558M --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=4
#SBATCH --time=10:00:00 --signal=TERM@300
# Trains GPT-2 1558M (d48) like run_gpt2_1558M.sh, whose comment says more, but under Slurm: a task
# for each of 32 GPUs on 4 machines.
#
#   sbatch scripts/run_gpt2_1558M_slurm.sh     in this repository's folder, on a shared file system
#
#   time     5.8 hours at 1 610 000 tokens/s, which is 50 % of the 32 · 989 TFLOP/s of 32 H100s or
#            H200s: 90 % of 32 times one GPU's rate; several machines are not measured here
#   memory   56.4 GiB of tensors on each GPU at B=16: the optimizer is not sharded (ZeRO-1), because
#            1600 channels are no multiple of 4 · 32 ranks; with 16 ranks it would be
#   end      five minutes before its time is over the job writes a checkpoint and exits; the same
#            sbatch resumes
#
# --nodes=2 on sbatch's command line overrides the line above. tasks · B · 1024 has to divide
# 1 048 576.

cd "${SLURM_SUBMIT_DIR:?start this with sbatch}" || exit
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT LAUNCH="srun --kill-on-bad-exit"
exec scripts/run_gpt2_1558M.sh "$@"
