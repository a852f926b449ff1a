#!/bin/sh
# Two nodes with two GPUs each, one task per GPU:
#   cd examples; sbatch --muri=model=ddp,batch-size=32 train_ddp.sh
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
# No --gres for srun: each task sees the GPUs of its node, alone as well as in a group.
srun muri run "${SLURM_SUBMIT_DIR:-.}/train_ddp.py" "$@"
