#!/bin/sh
# A user's batch script, the same with and without Muri:
#   sbatch --muri=model=cpu,batch-size=64 --gres=gpu:1 examples/train.sh examples/train_cpu.py --iterations 100
muri run "$@"
