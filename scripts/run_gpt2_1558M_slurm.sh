#!/bin/sh
#SBATCH --job-name=gpt2_1558M --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=4
#SBATCH --time=10:00:00 --signal=TERM@300
# GPT-2 1558M (d48) as run_gpt2_1558M.sh trains it, under Slurm: a task for each of 32 GPUs on 4 machines.
#
#   sbatch scripts/run_gpt2_1558M_slurm.sh              from this repository's folder, which all machines share
#
#   data     python3 data/prepare.py fineweb100B --max-tokens 34e9          68 GB of shards
#   tokens   32 000 steps · 1 048 576 tokens = 3.36e10   22 for each of the 1 557 686 400 parameters
#   FLOPs    6·N + 6·L·C·T = 6·1 557 686 400 + 6·48·1600·1024 = 9.82e9 a token;  3.29e20 in all
#   time     5.8 hours at 1 610 000 tokens/s, which is 50 % of the 32 · 989 TFLOP/s of 32 H100s or H200s: 90 % of 32
#            times what one does; several machines are not measured here
#   memory   56.4 GiB of tensors on each at B=16: 1600 channels cannot be divided among 32 (ZeRO-1), as they can among 8
#   disk     21.8 GB a checkpoint, two are kept; five minutes before its time is over the job writes one and ends, and
#            the same sbatch goes on
#
# --nodes=2 on sbatch's command line takes precedence over the line above; tasks · B · 1024 has to divide 1 048 576.
set -e
cd "${SLURM_SUBMIT_DIR:?start this with sbatch}"
make train_gpt2cu
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT
exec srun --kill-on-bad-exit ./train_gpt2cu \
    -e d48 -i 'data/cache/fineweb100B/train_*.bin' -j 'data/cache/fineweb100B/val_*.bin' \
    --tokenizer data/cache/fineweb100B/gpt2_tokenizer.bin \
    -b "${B:-16}" -t 1024 -d 1048576 -x 32000 -l 6e-4 -u 700 -q 0.1 -c 0.1 -k cosine \
    -v 250 -m $((10240 / ${B:-16})) -s 5000 -g 384 -n 1000 -nk 2 -y 1 -o log_gpt2_1558M "$@"
