#!/usr/bin/env bash
# A GPU of a Slurm cluster for each run, from the root of the project, in which scripts/setup.sh made .venv:
#   sbatch docker/clouds/slurm.sh data/bear.toml
#   sbatch --array=0-3 docker/clouds/slurm.sh data/bear.toml                  four seeds: outputs/bear-seed-0 and so on
#   sbatch --array=0-1 docker/clouds/slurm.sh data/bear.toml data/fox.toml    two configs: outputs/bear and outputs/fox
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
: "${1:?no config; for example: sbatch docker/clouds/slurm.sh data/bear.toml}"
configs=("$@")
task="${SLURM_ARRAY_TASK_ID:-}"
config="$1"
words=(--resume_from auto)
if [ "$#" -gt 1 ]; then
    config="${configs[${task:-$#}]:-}"
    if [ -z "$config" ]; then
        echo "error: $# configs, and none for task '$task'; give sbatch --array=0-$(($# - 1))" >&2
        exit 2
    fi
fi
if [ -n "$task" ]; then
    name="$(basename "$config" .toml)"
    if [ "$#" -eq 1 ]; then
        name="$name-seed-$task"
        words+=(--set "run.seed=$task")
    fi
    words+=(--set "run.name=$name" "run.output_dir=outputs/$name")
fi
# With a bucket, so that another cluster goes on, too (its library: bash scripts/setup.sh s3):
#   words+=(--set "checkpoint.mirror=s3://BUCKET/PREFIX/${name:-}")
# Keys: those of the shell that called sbatch, and those of .env.
if [ -f .env ]; then
    set -a
    # shellcheck source=/dev/null
    . ./.env
    set +a
fi

out_of_time=""
# SIGTERM to the run ($!): it ends its step, writes a checkpoint and exits with 143. The batch shell alone gets USR1.
# Set before it starts: a signal that came in between would end this script and leave the run.
trap 'out_of_time=yes; kill -TERM "$!"' USR1
trap 'kill -TERM "$!"' TERM
.venv/bin/python train.py --config "$config" "${words[@]}" &
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
