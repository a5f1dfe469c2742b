#!/usr/bin/env bash
# One GPU of a Slurm cluster, from the root of the project, in which scripts/setup.sh made .venv:
#   sbatch deploy/slurm.sh data/bear.toml
# Two minutes before the time limit the run saves a checkpoint, and the job is queued again; it goes on when its turn comes.
# What Slurm preempts it queues again by itself. What scancel ends is saved, and stays ended.
#SBATCH --job-name=lora
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=08:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lora-%j.log
set -uo pipefail
config="${1:?no config; for example: sbatch deploy/slurm.sh data/bear.toml}"

out_of_time=""
# SIGTERM to the run ($!): it ends its step, writes a checkpoint and exits with 143. The batch shell alone gets USR1.
# Set before it starts: a signal that came in between would end this script and leave the run.
trap 'out_of_time=yes; kill -TERM "$!"' USR1
trap 'kill -TERM "$!"' TERM
# With a bucket, so that another cluster goes on, too:  --set checkpoint.mirror=s3://BUCKET/PREFIX
.venv/bin/python train.py --config "$config" --resume_from auto &
run=$!
# A signal ends a wait, not what is waited for. The last wait tells how the run ended, also where it did long ago.
while kill -0 "$run" 2> /dev/null; do
    wait "$run"
done
wait "$run"
status=$?
if [ "$status" -eq 143 ] && [ -n "$out_of_time" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
